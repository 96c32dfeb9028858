"""The choice of the attention kernel, as a table."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.choice import decode_attention, length_buckets
from urdir.ptxgen.kernels.attention.flash_decode import FlashDecode
from urdir.ptxgen.kernels.attention.incremental_attention import IncrementalAttention
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.kv_types import KvDtype
from urdir.ptxgen.kernels.attention.latent_decode import LatentDecode
from urdir.ptxgen.kernels.attention.own_token import QK_NORM, OwnToken
from urdir.ptxgen.kernels.attention.scores import Scores
from urdir.ptxgen.kernels.rotation import Rotation


@pytest.mark.parametrize(
    ("max_len", "buckets"),
    [
        (1, (1,)),
        (256, (256,)),
        (257, (256, 257)),
        (512, (256, 512)),
        (8192, (256, 512, 8192)),
        (131072, (256, 512, 8192, 131072)),
    ],
)
def test_buckets(max_len: int, buckets: tuple[int, ...]) -> None:
    assert length_buckets(max_len) == buckets


@pytest.mark.parametrize(
    ("heads", "kv_heads", "rows", "max_keys", "window", "sm_count", "ctas", "most"),
    [  # no CTAs: incremental
        (32, 8, 1, 256, 0, 132, 0, 0),
        (32, 8, 1, 512, 0, 132, 16, 0),
        (32, 8, 1, 8192, 0, 132, 16, 0),
        (32, 8, 1, 131072, 0, 132, 33, 0),
        (32, 8, 2, 512, 0, 132, 0, 0),
        (32, 8, 2, 2048, 0, 132, 33, 2048),
        (32, 8, 16, 131072, 0, 132, 33, 2048),
        (32, 8, 33, 131072, 0, 132, 33, 4096),
        (32, 8, 32, 131072, 0, 132, 33, 4096),
        (64, 8, 64, 131072, 0, 132, 16, 6144),  # two tiles a KV head
        (28, 4, 1, 32768, 0, 132, 33, 0),
        (8, 1, 1, 131072, 0, 132, 132, 0),
        (32, 8, 1, 131072, 256, 132, 0, 0),
        (32, 8, 1, 131072, 1024, 132, 16, 0),
        (32, 8, 8, 131072, 512, 132, 0, 0),
        (32, 8, 1, 32768, 0, 16, 4, 0),
        (71, 71, 1, 32768, 0, 4, 1, 0),
    ],
)
def test_choice(
    heads: int,
    kv_heads: int,
    rows: int,
    max_keys: int,
    window: int,
    sm_count: int,
    ctas: int,
    most: int,
) -> None:
    layout = KvLayout(rows, kv_heads, 131072, 128, "f16")
    whole = IncrementalAttention(heads, layout, rows, Scores(window=window))
    spec = decode_attention(whole, max_keys, sm_count)
    assert (spec.heads, spec.layout, spec.rows, spec.scores.window) == (heads, layout, rows, window)
    if ctas:
        assert isinstance(spec, FlashDecode)
        assert (spec.ctas, spec.most) == (ctas, most)
    else:
        assert isinstance(spec, IncrementalAttention)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "rows", "max_keys", "sm_count", "target", "cluster", "ring"),
    [
        (32, 8, 1, 512, 132, "sm_90a", 4, 0),
        (32, 8, 1, 8192, 132, "sm_90a", 8, 112 << 10),
        (32, 8, 1, 8192, 132, "sm_120", 8, 0),  # an SM has less shared memory
        (32, 8, 1, 16384, 132, "sm_90a", 1, 0),  # more keys than 64 SMs read at the memory's pace
        (32, 8, 2, 8192, 132, "sm_90a", 8, 85 << 10),  # of several rows one CTA an SM
        (32, 8, 4, 8192, 132, "sm_90a", 1, 0),  # clusters of four are slower
        (32, 8, 7, 8192, 132, "sm_90a", 2, 85 << 10),
        (32, 8, 8, 131072, 132, "sm_90a", 2, 85 << 10),
        (32, 8, 8, 8192, 132, "sm_120", 1, 0),
        (32, 8, 6, 8192, 132, "sm_90a", 1, 0),  # a quarter of the SMs would be idle
        (32, 4, 4, 8192, 132, "sm_90a", 1, 0),
        (32, 8, 16, 8192, 132, "sm_90a", 1, 0),
        (8, 2, 8, 8192, 132, "sm_90a", 8, 85 << 10),
        (32, 8, 1, 8192, 132, "sm_89", 1, 0),
        (32, 8, 1, 8192, 132, "", 1, 0),
        (32, 32, 1, 512, 132, "sm_90", 4, 0),
        (32, 16, 1, 8192, 132, "sm_90", 1, 0),  # clusters that would follow each other
        (8, 2, 1, 512, 132, "sm_90", 4, 0),
        (8, 2, 1, 8192, 132, "sm_90", 1, 0),  # too few SMs
        (32, 8, 1, 512, 14, "sm_90", 1, 0),
    ],
)
def test_clusters(
    heads: int,
    kv_heads: int,
    rows: int,
    max_keys: int,
    sm_count: int,
    target: str,
    cluster: int,
    ring: int,
) -> None:
    layout = KvLayout(rows, kv_heads, 131072, 128, "f16")
    spec = decode_attention(IncrementalAttention(heads, layout, rows), max_keys, sm_count, target)
    assert isinstance(spec, FlashDecode)
    assert (spec.cluster, spec.ring) == (cluster, ring)
    if cluster > 1 and rows == 1:
        assert spec.launch_shape.grid == (spec.head_tiles.count, cluster, 1)


#: A latent vector and a part that rotates: 16 heads, or more, have the key in common.
LATENT = KvLayout(1, 1, 131072, 576, "f16", value_dim=512, values_in_keys=True)


@pytest.mark.parametrize(
    ("heads", "rows", "max_keys", "dtype", "target", "tile", "cluster", "ring"),
    [  # no cluster: incremental
        (16, 1, 256, "f16", "sm_90a", 1, 4, 0),
        (16, 1, 512, "f16", "sm_90a", 1, 8, 0),
        (32, 1, 512, "q8_0", "sm_120", 1, 4, 0),
        (64, 1, 512, "f16", "sm_90a", 2, 4, 0),  # clusters of a head would follow each other
        (64, 1, 256, "f16", "sm_90a", 1, 0, 0),
        (16, 1, 8192, "f16", "sm_90a", 2, 1, 0),
        (16, 1, 16384, "f16", "sm_90a", 2, 1, 0),
        (16, 1, 131072, "bf16", "sm_100a", 2, 1, 0),
        (16, 1, 8192, "q8_0", "sm_90a", 1, 1, 0),
        (16, 1, 8192, "f16", "sm_89", 1, 1, 0),  # lanes, which have no registers for two heads
        (16, 8, 512, "f16", "sm_90a", 1, 0, 0),
        (16, 8, 8192, "f16", "sm_90a", 2, 1, 0),
        (16, 8, 512, "f16", "sm_89", 1, 0, 0),
    ],
)
def test_wide_heads(
    heads: int,
    rows: int,
    max_keys: int,
    dtype: Any,
    target: str,
    tile: int,
    cluster: int,
    ring: int,
) -> None:
    layout = dataclasses.replace(LATENT, sequences=rows, dtype=dtype)
    spec = decode_attention(IncrementalAttention(heads, layout, rows), max_keys, 132, target)
    assert spec.head_tiles.size == tile
    assert isinstance(spec, FlashDecode) == (cluster > 0)
    if isinstance(spec, FlashDecode):
        assert (spec.cluster, spec.ring) == (cluster, ring)
        assert spec.launch_shape.grid[0] * spec.launch_shape.grid[1] <= 2 * 132


#: What a step's rows bring along of it.
LATENT_TOKEN = OwnToken(Rotation(64, "interleaved"), latent_norm=QK_NORM)


@pytest.mark.parametrize(
    ("heads", "rows", "max_keys", "dtype", "each", "cluster", "ctas"),
    [
        (16, 1, 256, "f16", 8, 8, 8),
        (16, 1, 8192, "bf16", 8, 8, 8),
        (16, 1, 16384, "f16", 16, 8, 16),
        (32, 1, 512, "f16", 8, 8, 4),
        (40, 1, 16384, "f16", 8, 8, 3),  # no multiple of 16
        (128, 1, 512, "f16", 16, 8, 2),
        (16, 8, 512, "f16", 16, 8, 16),
        (16, 16, 131072, "f16", 16, 8, 16),
        (16, 17, 131072, "f16", 16, 4, 33),  # more than clusters of eight
        (128, 64, 131072, "f16", 16, 4, 4),
    ],
)
def test_latent_heads_on_wgmma(
    heads: int, rows: int, max_keys: int, dtype: Any, each: int, cluster: int, ctas: int
) -> None:
    layout = dataclasses.replace(LATENT, sequences=rows, dtype=dtype)
    whole = IncrementalAttention(heads, layout, rows, token=LATENT_TOKEN)
    spec = decode_attention(whole, max_keys, 132, "sm_90a")
    assert isinstance(spec, LatentDecode)
    assert (spec.head_tiles.size, spec.cluster, spec.ctas) == (each, cluster, ctas)
    for target in ("", "sm_100a"):
        other = decode_attention(whole, max_keys, 132, target)
        assert not isinstance(other, LatentDecode)


@pytest.mark.parametrize("rows", range(1, 17))
@pytest.mark.parametrize("max_len", [600, 8192, 131072])
@pytest.mark.parametrize(
    ("heads", "of", "token"),
    [
        (32, KvLayout(1, 8, 600, 128, "f16"), None),
        (16, LATENT, LATENT_TOKEN),
        (128, LATENT, LATENT_TOKEN),
    ],
)
def test_clusters_leave_no_more_chunks(
    rows: int, max_len: int, heads: int, of: KvLayout, token: OwnToken | None
) -> None:
    """The workspace is made for those without."""
    layout = dataclasses.replace(of, sequences=rows, max_len=max_len)
    whole = IncrementalAttention(heads, layout, rows)
    near = decode_attention(dataclasses.replace(whole, token=token), max_len, 132, "sm_90a")
    apart = decode_attention(whole, max_len, 132)
    assert isinstance(near, FlashDecode)
    assert isinstance(apart, FlashDecode)
    assert near.split.chunks <= apart.split.chunks


@pytest.mark.parametrize(("target", "clusters"), [("sm_90a", [4, 8, 1]), ("sm_120", [4, 1, 1])])
def test_more_quantised_keys_go_to_clusters_with_much_memory(
    target: str, clusters: list[int]
) -> None:
    layout = KvLayout(1, 8, 131072, 128, "q8_0")
    whole = IncrementalAttention(32, layout)
    found = [decode_attention(whole, n, 132, target) for n in (512, 8192, 16384)]
    assert [spec.cluster for spec in found if isinstance(spec, FlashDecode)] == clusters


@pytest.mark.parametrize("dtype", ["q8_0", "f16"])
@pytest.mark.parametrize("target", ["sm_90a", "sm_89"])
def test_rows_that_fill_the_sms_alone_have_no_cluster_and_no_ring(dtype: Any, target: str) -> None:
    layout = KvLayout(32, 8, 8192, 128, dtype)
    spec = decode_attention(IncrementalAttention(32, layout, 32), 8192, 132, target)
    assert isinstance(spec, FlashDecode)
    assert (spec.cluster, spec.ring) == (1, 0)


def test_the_options_reach_the_kernel() -> None:
    layout, rope = KvLayout(1, 2, 4096, 64, "q8_0"), Rotation(64, "half")
    scores = Scores(scale=0.5, window=4000, softcap=30.0)
    whole = IncrementalAttention(4, layout, 1, scores, OwnToken(rope))
    for max_keys in (256, 4096):
        spec = decode_attention(whole, max_keys, 132)
        assert (spec.scores.scale, spec.scores.window, spec.scores.softcap, spec.rope) == (
            0.5,
            4000,
            30.0,
            rope,
        )


@pytest.mark.parametrize(
    ("heads", "kv_heads", "rows", "sm_count", "ctas"),
    [
        (32, 8, 1, 132, 32),  # a query head each
        (32, 8, 4, 132, 128),
        (32, 8, 8, 132, 128),  # two
        (32, 8, 9, 132, 72),  # four, as where they share all they can
        (12, 2, 1, 132, 12),
        (12, 2, 1, 8, 6),
        (32, 8, 1, 4, 8),
        (8, 8, 1, 132, 8),
    ],
)
def test_few_rows_are_spread_over_the_sms(
    heads: int, kv_heads: int, rows: int, sm_count: int, ctas: int
) -> None:
    whole = IncrementalAttention(heads, KvLayout(rows, kv_heads, 512, 128, "f16"), rows)
    spec = decode_attention(whole, 256, sm_count)
    grid = spec.launch_shape.grid
    assert grid[0] * grid[1] == ctas


@pytest.mark.parametrize(
    ("rows", "dtype", "target", "warps"),
    [
        (32, "f16", "sm_90a", 8),  # 256 CTAs, two of 132 SMs each
        (34, "f16", "sm_90a", 4),
        (512, "q8_0", "sm_100a", 4),
        (64, "f32", "sm_90a", 8),  # which tensor cores do not multiply
        (64, "f16", "sm_89", 8),
    ],
)
def test_many_rows_have_fewer_warps_each(
    rows: int, dtype: KvDtype, target: str, warps: int
) -> None:
    layout = KvLayout(rows, 8, 512, 128, dtype)
    spec = decode_attention(IncrementalAttention(32, layout, rows), 512, 132, target)
    assert isinstance(spec, IncrementalAttention)
    assert spec.warps == warps
    assert spec.launch_shape.threads == 32 * warps


@pytest.mark.parametrize(
    ("heads", "kv_heads", "norms", "warps"), [(16, 8, 3, 4), (32, 8, 5, 4), (64, 8, 5, 4)]
)
def test_a_warp_finds_the_norms_of_several_heads(
    heads: int, kv_heads: int, norms: int, warps: int
) -> None:
    """Those of a tile of queries, and the key."""
    token, layout = OwnToken(qk_norm=QK_NORM), KvLayout(64, kv_heads, 512, 128, "f16")
    whole = IncrementalAttention(heads, layout, 64, token=token)
    spec = decode_attention(whole, 512, 132, "sm_90a")
    assert isinstance(spec, IncrementalAttention)
    assert (token.norms(spec.head_tiles.size), spec.warps) == (norms, warps)


@pytest.mark.parametrize("max_len", [512, 4096, 1 << 20])
@pytest.mark.parametrize("rows", [1, 7, 64])
@pytest.mark.parametrize("sm_count", [1, 16, 132])
def test_every_bucket_of_every_shape_is_served(max_len: int, rows: int, sm_count: int) -> None:
    for heads, kv_heads in ((1, 1), (28, 4), (32, 32), (71, 1)):
        layout = KvLayout(rows, kv_heads, max_len, 64, "f16")
        whole = IncrementalAttention(heads, layout, rows)
        for max_keys in length_buckets(max_len):
            spec = decode_attention(whole, max_keys, sm_count)
            if isinstance(spec, FlashDecode):
                assert spec.rows * spec.split.chunks >= spec.split.takers
                assert spec.split.takers * spec.cluster == spec.launch_shape.grid[1]


@pytest.mark.parametrize(
    ("heads", "rows", "max_keys", "packs"),
    [
        (32, 16, 512, True),
        (32, 64, 8192, True),
        (32, 5, 512, True),
        (32, 7, 8192, True),
        (32, 12, 8192, False),  # a group of eight rows is not full
        (9, 16, 512, False),  # 1,152 values, no multiple of 256
    ],
)
def test_heads_are_packed_where_they_fill_their_places(
    heads: int, rows: int, max_keys: int, packs: bool
) -> None:
    layout = KvLayout(rows, 1, 131072, 128, "f16")
    whole = IncrementalAttention(heads, layout, rows)
    spec = decode_attention(whole, max_keys, 132, "sm_90a", packs=True)
    assert spec.packs == packs
    assert not decode_attention(whole, max_keys, 132).packs


@pytest.mark.parametrize(("heads", "rows"), [(4, 12), (3, 16)])
def test_what_does_not_fill_its_places_is_not_packed(heads: int, rows: int) -> None:
    with pytest.raises(PtxgenError, match="attention packs up to 8 rows, or groups of as many"):
        IncrementalAttention(heads, KvLayout(12, 1, 40, 64, "f16"), rows=rows, packs=True)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "group", "rows", "run", "target", "shared"),
    [
        (128, "f16", 4, 8, 8, "sm_90a", 4),
        (128, "q8_0", 4, 8, 4, "sm_90a", 4),
        (128, "bf16", 8, 2, 2, "sm_90", 2),
        (64, "f16", 1, 3, 3, "sm_100a", 4),
        (256, "f16", 2, 8, 8, "sm_90a", 2),
        (192, "bf16", 4, 8, 3, "sm_90a", 2),
        (128, "f16", 4, 8, 1, "sm_90a", 1),  # no drafts
        (128, "f16", 4, 8, 8, "sm_89", 1),  # too little shared memory
        (128, "f16", 7, 8, 8, "sm_90a", 4),  # tiles of four heads and of three
        (128, "f32", 4, 8, 8, "sm_90a", 1),  # not on tensor cores
        (512, "f16", 4, 8, 8, "sm_90a", 1),  # sums do not fit
    ],
)
def test_rows_of_drafts(
    head_dim: int, dtype: Any, group: int, rows: int, run: int, target: str, shared: int
) -> None:
    """How many rows of a sequence share a read of its keys; of few keys none."""
    layout = KvLayout(8, 8, 1 << 15, head_dim, dtype)
    whole = IncrementalAttention(8 * group, layout, rows)
    for keys in (512, 1 << 15):
        spec = decode_attention(whole, keys, 132, target, run=run)
        assert spec.head_tiles.rows == (1 if keys == 512 else shared)
        if spec.head_tiles.rows > 1:
            assert isinstance(spec, FlashDecode)
            assert spec.head_tiles.count * spec.ctas <= 132
            sizing = decode_attention(whole, keys, 132, run=run)
            assert sizing.nbytes(sizing.param("partial")) >= spec.nbytes(spec.param("partial"))
