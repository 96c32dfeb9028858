"""Attention over prompts on wgmma: borders of tiles, equal bits, segments of sequences, cost."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.ptxgen.prompt_chunks import IDLE, Inputs, check_chunks, chunk, prefill_of, run
from urdir.driver.device import Device
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.choice import prompt_attention
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.prefill_attention import PrefillAttention
from urdir.ptxgen.kernels.attention.prefill_wgmma import PrefillWgmma
from urdir.ptxgen.kernels.attention.prompt import PromptAttention
from urdir.ptxgen.kernels.attention.random_inputs import attention_inputs
from urdir.ptxgen.kernels.attention.scores import Scores
from urdir.ptxgen.tools.assemble import assemble, is_available
from urdir.ptxgen.weights.packed import pack

ALL = Scores(softcap=30.0, window=4096, chunk=8192, sinks=True, max_bias=8.0)


pytestmark = pytest.mark.usefixtures("on_hopper")


def prefill(heads: int = 2, rows: int = 70, **fields: Any) -> PrefillWgmma:
    """A small spec; ``fields`` are the layout's or the scores'."""
    made: PrefillWgmma
    made = prefill_of(PrefillWgmma, heads, rows, {"max_len": 400, "head_dim": 64, **fields})
    return made


# ---- borders ----


# 70 rows of 2 heads: two tiles of 128 queries; keys come in tiles of 112
@pytest.mark.parametrize("start", [0, 41, 42, 43, 111, 112, 154, 250])
def test_chunks_around_the_borders_of_key_tiles(device: Device, start: int) -> None:
    spec = prefill()
    run(device, spec, chunk(spec, start))


@pytest.mark.parametrize(
    ("rows", "group"), [(1, 1), (64, 1), (65, 1), (43, 3), (18, 7), (19, 7), (4, 71)]
)
def test_rows_around_the_borders_of_query_tiles(device: Device, rows: int, group: int) -> None:
    """Tiles, and the halves of their two warpgroups, begin within a row."""
    spec = prefill(2 * group, rows, kv_heads=2, max_len=150)
    run(device, spec, chunk(spec, 70))


@pytest.mark.parametrize(
    ("head_dim", "value_dim"), [(80, 0), (112, 0), (128, 64), (128, 0), (192, 160), (256, 0)]
)
def test_dims(device: Device, head_dim: int, value_dim: int) -> None:
    spec = prefill(rows=20, max_len=230, head_dim=head_dim, value_dim=value_dim)
    run(device, spec, chunk(spec, 205))


@pytest.mark.parametrize("window", [1, 111, 112, 113])
def test_windows(device: Device, window: int) -> None:
    spec = prefill(rows=100, window=window)
    run(device, spec, chunk(spec, 290))


@pytest.mark.parametrize(
    ("dtype", "head_dim", "value_dim"), [("bf16", 144, 80), ("q8_0", 128, 0), ("q8_0", 64, 96)]
)
def test_caches_that_are_converted(
    device: Device, dtype: str, head_dim: int, value_dim: int
) -> None:
    """More tiles of keys than the rings have places."""
    spec = prefill(rows=9, head_dim=head_dim, value_dim=value_dim, dtype=dtype)
    run(device, spec, chunk(spec, 390))


def test_all_of_it_at_once(device: Device) -> None:
    spec = prefill(
        10, 37, kv_heads=2, head_dim=96, max_len=256, page_len=32, pages=12, scale=0.2,
        window=120, chunk=140, softcap=4.0, sinks=True, max_bias=4.0,
    )  # fmt: skip
    run(device, spec, chunk(spec, 180, live=30))


def test_ctas_of_a_launch_see_different_numbers_of_keys(device: Device) -> None:
    """The middle one of three has one tile of keys, the last has none."""
    spec = prefill(1, 3 * 128)
    positions = [*range(272, 400), *range(100), *[IDLE] * 156]
    run(device, spec, attention_inputs(spec, np.random.default_rng(5), positions, [0] * spec.rows))


# ---- equal bits ----


@pytest.mark.sanitizer
def test_paged_is_contiguous_bit_for_bit(device: Device) -> None:
    contiguous = prefill(rows=30, sequences=2, max_len=256, window=120)
    paged = prefill(rows=30, sequences=2, max_len=256, window=120, page_len=16, pages=40)
    inputs = attention_inputs(contiguous, np.random.default_rng(1), [*range(170, 200)], [1] * 30)
    scattered = {**inputs, "block_table": paged.layout.random_table(np.random.default_rng(2))}
    for name in ("k_cache", "v_cache"):
        values = contiguous.layout.read(inputs[name], 1, np.arange(200))
        scattered[name] = paged.layout.empty()
        paged.layout.write(scattered[name], 1, np.arange(200), values, scattered["block_table"])
    np.testing.assert_array_equal(run(device, paged, scattered), run(device, contiguous, inputs))


@pytest.mark.parametrize("fields", [{}, {"window": 50}, {"heads": 5, "head_dim": 256}])
def test_a_row_has_the_same_bits_in_every_chunk(device: Device, fields: dict[str, Any]) -> None:
    whole = prefill(**{"rows": 140, **fields})
    check_chunks(device, whole, 120, ((3, 3), (90, 67), (70, 70)))


# ---- packed heads ----


# runs of 128, 64 and 32 columns; parts of heads; rows and tiles that end with zeros
@pytest.mark.parametrize(
    ("heads", "kv_heads", "value_dim", "rows"),
    [(6, 2, 128, 43), (16, 2, 64, 17), (8, 4, 96, 5), (8, 8, 192, 3), (3, 1, 256, 42)],
)
def test_packed_heads_are_those_of_the_other_form(
    device: Device, heads: int, kv_heads: int, value_dim: int, rows: int
) -> None:
    spec = prefill(heads, rows, kv_heads=kv_heads, max_len=60, value_dim=value_dim)
    inputs = chunk(spec, 10, live=rows - 1)
    expected = pack(run(device, spec, inputs).reshape(rows, -1))
    packed = dataclasses.replace(spec, packs=True)
    np.testing.assert_array_equal(run(device, packed, inputs), expected)


@pytest.mark.parametrize(("heads", "value_dim"), [(2, 64), (16, 80), (16, 144)])
def test_heads_that_leave_gaps_are_not_packed(heads: int, value_dim: int) -> None:
    layout = KvLayout(1, 1, 60, 64, "f16", value_dim=value_dim)
    with pytest.raises(PtxgenError, match=f"not {heads} heads of {value_dim}"):
        PrefillWgmma(heads, layout, packs=True)
    assert prompt_attention(heads, layout, 9, "sm_90a", packs=True) == PrefillWgmma(
        heads, layout, 9
    )


# ---- segments of several sequences ----


@pytest.mark.parametrize("kind", [PrefillWgmma, PrefillAttention])
@pytest.mark.parametrize("group", [2, 3])
def test_sequences_share_a_launch(device: Device, kind: type[PromptAttention], group: int) -> None:
    """Each begins with a tile; the rows between them are idle. A row has the bits that it has in a
    launch of its own sequence."""
    layout = KvLayout(3, 1, 96, 64, "f16", page_len=16, pages=18)
    aligned = kind(group, layout, 1).segment_rows if kind is PrefillWgmma else 64
    lengths, starts, order = (20, 1, 33), (60, 95, 0), (2, 0, 1)
    rows = 2 * aligned + 40
    spec = kind(group, layout, rows)
    assert aligned % spec.segment_rows == 0
    positions, sequences = [IDLE] * rows, [1 << 20] * rows
    places = []
    for number, (length, start, sequence) in enumerate(zip(lengths, starts, order, strict=True)):
        place = slice(number * aligned, number * aligned + length)
        positions[place] = range(start, start + length)
        sequences[place] = [sequence] * length
        places.append(place)
    inputs = attention_inputs(
        spec, np.random.default_rng(6), positions, [s % (1 << 20) for s in sequences]
    )
    inputs["sequence"][:] = sequences
    out = run(device, spec, inputs)
    for place in places:
        alone = kind(group, layout, place.stop - place.start)
        own = {**inputs, **{n: inputs[n][place] for n in ("q", "sequence", "position")}}
        if "count" in own:
            own["count"] = np.uint32(alone.rows)
        np.testing.assert_array_equal(run(device, alone, own), out[place])


# ---- memory ----


def test_idle_rows_read_nothing(device: Device) -> None:
    """Neither q, nor the caches, nor the table: here all are NaN or out of range."""
    spec = prefill(rows=20, page_len=16, max_len=64, pages=4)
    inputs: Inputs = {
        "count": np.uint32(20),
        "q": np.full((20, 2, 64), np.nan, np.float32),
        "k_cache": spec.layout.empty(),
        "v_cache": spec.layout.empty(),
        "block_table": np.full((1, 4), 1 << 20, np.uint32),
        "sequence": np.full(20, 1 << 20, np.uint32),
        "position": np.array([64, 65, IDLE, 1 << 31] * 5, np.uint32),
    }
    np.testing.assert_array_equal(run(device, spec, inputs), 0)


# ---- the choice ----


@pytest.mark.parametrize(
    ("target", "head_dim", "value_dim", "dtype", "expected"),
    [
        ("sm_90a", 128, 0, "f16", PrefillWgmma),
        ("sm_90a", 64, 256, "f16", PrefillWgmma),
        ("sm_90a", 48, 0, "f16", PrefillAttention),
        ("sm_90a", 72, 0, "f16", PrefillAttention),
        ("sm_90a", 320, 0, "f16", PrefillAttention),
        ("sm_90a", 128, 0, "q8_0", PrefillWgmma),
        ("sm_90a", 160, 0, "q8_0", PrefillAttention),
        ("sm_90a", 192, 128, "bf16", PrefillWgmma),
        ("sm_90a", 128, 0, "f32", PrefillAttention),
        ("sm_90", 128, 0, "f16", PrefillAttention),
        ("sm_120", 128, 0, "f16", PrefillAttention),
    ],
)
def test_choice(
    target: str, head_dim: int, value_dim: int, dtype: Any, expected: type[PromptAttention]
) -> None:
    layout = KvLayout(1, 2, 100, head_dim, dtype, value_dim=value_dim)
    scores = Scores(window=70)
    spec = prompt_attention(6, layout, 33, target, scores=scores)
    assert spec == expected(6, layout, 33, scores)


def test_caches_and_heads_that_it_does_not_take_are_refused() -> None:
    with pytest.raises(PtxgenError, match="not f32, head_dim 64"):
        prefill(dtype="f32")
    with pytest.raises(PtxgenError, match="head_dim 320, value_dim 64"):
        prefill(head_dim=320, value_dim=64)


# ---- cost ----


@pytest.mark.turns(4, which=1)
@pytest.mark.skipif(not is_available(), reason="nvJitLink is not installed")
@pytest.mark.parametrize("scores", [Scores(), Scores(window=4096, softcap=50.0), ALL])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "value_dim"),
    [
        ("f16", 64, 64),
        ("f16", 80, 80),
        ("f16", 128, 128),
        ("f16", 256, 256),
        ("bf16", 192, 192),
        ("q8_0", 128, 128),
    ],
)
def test_no_spills_and_products_run_on(
    dtype: Any, head_dim: int, value_dim: int, scores: Scores
) -> None:
    """`assemble` fails where wgmma is serialised."""
    layout = KvLayout(4, 8, 1 << 17, head_dim, dtype, 16, 1 << 15, value_dim=value_dim)
    spec = PrefillWgmma(56, layout, 512, scores, packs=value_dim % 32 == 0)
    cost = assemble(spec.ptx("sm_90a"), "sm_90a").entries[spec.name]
    assert not cost.spills
    assert spec.launch_shape.threads * cost.registers <= 65536
    assert cost.shared + spec.launch_shape.shared_bytes <= 227 * 1024
