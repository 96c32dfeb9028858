"""Choice of the attention kernel by shape, length bucket and device.

A plan is built for a length bucket; the choice is made then, independent of device state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from urdir.ptxgen.kernels.attention.chunk_cut import CHUNK_UNIT
from urdir.ptxgen.kernels.attention.flash_decode import FlashDecode, can_share
from urdir.ptxgen.kernels.attention.incremental_attention import IncrementalAttention
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.latent_decode import LatentDecode, serves_latents
from urdir.ptxgen.kernels.attention.own_token import OwnToken
from urdir.ptxgen.kernels.attention.prefill_attention import PrefillAttention
from urdir.ptxgen.kernels.attention.prefill_block import PrefillBlock
from urdir.ptxgen.kernels.attention.prefill_wgmma import PrefillWgmma
from urdir.ptxgen.kernels.attention.prompt import PromptAttention
from urdir.ptxgen.kernels.attention.scores import PLAIN, Scores
from urdir.ptxgen.target import Target

#: Up to this many keys attention is not split: for one row, for several. A step of an 8B Q4_K_M
#: model on an H200 takes 1.32 ms at 128 keys, split 1.35; 1.41 at 288, split 1.38; of two rows at
#: 288 keys 1.40, split 1.48.
SINGLE_KEYS, INCREMENTAL_KEYS = 256, 512
#: Up to this many keys split attention of one row has one CTA per SM, above it two. At 2,048 keys
#: it takes 5.6 us with one, 7.7 with two, at 4,096 8.5 and 8.8, at 16,384 20.5 and 20.6.
FEW_KEYS = 8192
#: Shared memory of each CTA of a large cluster for keys in flight, on architectures that have it
#: beside a CTA of the products. A step of one row of an 8B Q4_K_M model on an H200 at 4,096 keys
#: takes 1.484 ms with it, 1.512 with 80 KB, 1.531 with 48, 1.549 without clusters; at 256 keys with
#: clusters of four 1.329, of eight 1.336, without 1.391.
RING_NBYTES, LARGE_SHARED = 112 << 10, (90, 100)
#: The same for several rows, of the only CTA of an SM. A step of 8 rows takes 2.728 ms with it,
#: 2.807 without at 4,096 keys, 1.931 and 2.002 at 700, with q8_0 2.303 and 2.354, 1.883 and 1.971;
#: with a row of 32,600 keys among seven of 128 2.922 and 2.990; but 5.823 and 5.565 at 16,000, as
#: rows are cut from 8,192 on, not 16,384. 2 rows: 1.682 and 1.729 at 4,096. 4 rows take 2.101 with
#: clusters of four, 2.024 without. The limit on head width keeps a CTA beside one of the products.
ONE_RING_NBYTES, NARROW = 85 << 10, 128
#: Rows of a sequence that share a read of its keys at most: of narrow heads, and of wider ones. The
#: sums of more do not fit the registers of the only CTA of an SM.
RUN, WIDER_RUN = 4, 2
#: CTAs of eight warps, with narrow heads, that an SM holds.
CTAS_PER_SM = 2
#: Heads with norms of CTAs with half the warps, at most: more take another round.
MOST_NORMS = 6
#: Minimum keys of a chunk, and for several rows the approximate number (see `FlashDecode`). 32 rows
#: of 4,128 keys take 123 us in a chunk each, 134 in three, 136 in five; with q8_0 74 and 86.
LEAST_KEYS, MOST_KEYS = 64, 2048
#: Heads with more values are wide; and shared memory for their keys in flight, all of an SM's. For
#: few keys of one row, clusters per head are less work per lane: a step of DeepSeek-V2-Lite at 160
#: keys took 0.880 ms in clusters of four, 0.894 of eight, 1.054 without; 1.005, 0.960 and 1.006 at
#: 440.
WIDE, WIDE_RING_NBYTES = 256, 192 << 10
#: Heads of one row up to which CTAs of `LatentDecode` have eight heads, not 16, while keys are few.
#: A step of DeepSeek-V2-Lite (16 heads) on an H200 in milliseconds, by heads per CTA, CTAs per
#: cluster and per SM:
#:
#:     rows                  1                          8      32
#:     keys                160  1,000  4,000  16,000  4,000  4,000
#:     8, 8, 1           0.881  0.942  1.015
#:     8, 8, 2                                 1.305   2.21
#:     8, 4, 2                                                4.57
#:     16, 8, 1                 0.987  1.028   1.229   2.00
#:     16, 4, 1                                1.362   2.03   3.91
#:     16, 8, 2                                1.394   2.11   3.98
FEW_HEADS = 32
#: For this many rows each, chunks may be longer, so that partial results do not grow.
MANY_ROWS = 32


def length_buckets(max_len: int) -> tuple[int, ...]:
    """Ascending values of max_keys, the last one ``max_len``, at which another kernel or cut is
    chosen.

    A step whose rows all have a position below a bucket can use the plan built for it.
    """
    borders = (SINGLE_KEYS, INCREMENTAL_KEYS, FEW_KEYS)
    return (*(border for border in borders if border < max_len), max_len)


def several_rows_buckets(lengths: Sequence[int]) -> tuple[int, ...]:
    """The `length_buckets` at which the choice for several rows changes."""
    return tuple(n for n in lengths if n == INCREMENTAL_KEYS or n == lengths[-1])


@lru_cache(maxsize=256)
def prompt_attention(
    heads: int,
    layout: KvLayout,
    rows: int,
    target: str,
    *,
    scores: Scores = PLAIN,
    packs: bool = False,
) -> PromptAttention:
    """The kernel for prompt rows on a device of native target ``target``.

    wgmma if the device has it and the kernel supports the cache. ``packs`` requests packed heads,
    which some shapes support: then the kernel ``packs``. Raises PtxgenError for unsupported shapes.
    """
    if PrefillWgmma.serves(layout) and not scores.relative:
        kernel = PrefillWgmma(heads, layout, rows, scores)
        if kernel.target_on(target):
            return replace(kernel, packs=packs and kernel.can_pack)
    return PrefillAttention(heads, layout, rows, scores)


def block_attention(
    heads: int,
    dims: tuple[int, int],
    tokens: int,
    room: int,
    rows: int,
    target: str,
    *,
    scores: Scores = PLAIN,
) -> PrefillBlock | None:
    """The kernel for prompt rows over blocks of up to ``room`` keys, with keys and values of
    ``dims`` in f16, of sequences of up to ``tokens``; None if a device of native target ``target``
    has none.
    """
    layout = KvLayout(1, heads, tokens, dims[0], "f16", value_dim=dims[1])
    if not PrefillWgmma.serves(layout) or scores != replace(PLAIN, scale=scores.scale):
        return None
    whole = PrefillWgmma(heads, layout, rows, scores)
    length = room // whole.cta.key_tile * whole.cta.key_tile
    if whole.cta.parts > 1 or not length or whole.target_on(target) is None:
        return None
    layout = replace(layout, max_len=length)
    return PrefillBlock(heads, layout, rows, scores, tokens=tokens)


@lru_cache(maxsize=256)
def decode_attention(
    whole: IncrementalAttention,
    max_keys: int,
    sm_count: int,
    target: str = "",
    *,
    packs: bool = False,
    run: int = 1,
) -> IncrementalAttention | FlashDecode:
    """The kernel for the rows of ``whole`` with positions below ``max_keys``, a bucket.

    Incremental attention for few keys (a window bounds them too), flash decoding otherwise. With a
    token the kernel also prepares and appends the rows' new tokens; the choice is the same.
    With the device's native ``target`` it may use clusters, whose rows have fewer chunks. ``packs``
    requests packed heads, which some shapes support: then the kernel ``packs``. With drafts up to
    ``run`` rows side by side are consecutive tokens of a sequence, and may share reads of its keys:
    then partial results take more. Keys of texts are not split. Raises PtxgenError for unsupported
    shapes.
    """
    whole = replace(whole, packs=packs and whole.can_pack)
    if target and whole.token is not None:
        limits = (max_keys, sm_count, whole.rows)
        shape = (whole.heads, whole.layout, *limits, whole.scores, whole.token, target)
        if (latent := latent_attention(*shape)) is not None:
            return replace(latent, packs=whole.packs)
    if whole.value_dim > WIDE and target:
        if Target.parse(target).sm < whole.head_tiles.since:
            whole = replace(whole, most_heads=1)
        elif (wide := _wide(whole, max_keys, sm_count, target)) is not None:
            return wide
    few = SINGLE_KEYS if whole.rows == 1 else INCREMENTAL_KEYS
    if whole.scores.texts or min(whole.scores.span or max_keys, max_keys) <= few:
        return _narrowed(_spread(whole, sm_count), sm_count, target)
    split = split_attention(whole, max_keys, sm_count)
    if run > 1 and (shared := _shared(split, run, sm_count, target)) is not None:
        return shared
    if not target:
        return split
    if whole.rows == 1:
        near = _one_near(split, max_keys, sm_count, target)
    else:
        near = _near(split, sm_count, target)
    return near if near.target_on(target) else split


def _one_near(split: FlashDecode, max_keys: int, sm_count: int, target: str) -> FlashDecode:
    """The kernel for one row with a cluster per KV head (tile of query heads), if that is faster:
    for few keys; for more, if the clusters are resident together and enough to read at full
    bandwidth."""
    keys = min(split.scores.span or max_keys, max_keys)
    if keys <= INCREMENTAL_KEYS:
        near = replace(split, ctas=1, cluster=4)
        is_faster = near.cluster * near.head_tiles.count <= sm_count
    else:
        is_large = _has_much_memory(target)
        near = replace(split, ctas=1, cluster=8, ring=RING_NBYTES if is_large else 0)
        ctas = near.cluster * near.head_tiles.count
        is_read_whole = split.head_tiles.tensor_cores and (
            is_large or not any(of.is_scaled for of in split.layout.formats)
        )
        is_faster = keys <= FEW_KEYS and 2 * sm_count <= 5 * ctas <= 4 * sm_count and is_read_whole
    return near if is_faster else split


def _near(split: FlashDecode, sm_count: int, target: str) -> FlashDecode:
    """The kernel for several rows with one CTA per SM, a cluster for each row's KV head (tile of
    query heads), if that fills most SMs."""
    fits = max(split.head_dim, split.value_dim) <= NARROW and _has_much_memory(target)
    if not (split.head_tiles.tensor_cores and fits):
        return split
    ctas = sm_count // split.head_tiles.count
    for cluster in (2, 8):
        if 7 * ctas <= 8 * cluster * split.rows <= 8 * ctas:
            return replace(split, ctas=ctas // cluster, cluster=cluster, ring=ONE_RING_NBYTES)
    return split


def _shared(split: FlashDecode, run: int, sm_count: int, target: str) -> FlashDecode | None:
    """The kernel for several rows of each sequence, up to ``run``, that share reads of keys, with
    one CTA per SM; None where it is not supported. Without a ``target``: on a device where it
    is."""
    widest = max(split.head_dim, split.value_dim)
    if widest > WIDE or (target and not _has_much_memory(target)):
        return None
    most = min(RUN if widest <= NARROW else WIDER_RUN, 2 if run == 2 else RUN)
    alone = replace(split, ctas=max(1, sm_count // split.head_tiles.count), ring=ONE_RING_NBYTES)
    return replace(alone, run=most) if most > 1 and can_share(alone, most) else None


def _wide(
    whole: IncrementalAttention, max_keys: int, sm_count: int, target: str
) -> FlashDecode | None:
    """Flash decoding of wide heads on a device with clusters; None if keys are so few that it is
    slower, or if a row's clusters would not be resident together."""
    keys = min(whole.scores.span or max_keys, max_keys)
    split = split_attention(whole, max_keys, sm_count)
    if keys <= INCREMENTAL_KEYS:
        if whole.rows > 1:
            return None
        near = replace(split, most_heads=1, ctas=1, cluster=4, least=CHUNK_UNIT)
        if keys > SINGLE_KEYS and 8 * near.head_tiles.count <= sm_count:
            near = replace(near, cluster=8)
        return near if near.cluster * near.head_tiles.count <= sm_count else None
    is_short = whole.rows == 1 and keys <= FEW_KEYS
    has_ring = split.head_tiles.tensor_cores and _has_much_memory(target)
    if is_short or whole.layout.values_in_keys or not has_ring:
        return split
    near = replace(split, cluster=2, ring=WIDE_RING_NBYTES)
    return replace(near, ctas=max(1, sm_count // (2 * near.head_tiles.count)))


@lru_cache(maxsize=256)
def latent_attention(
    heads: int,
    layout: KvLayout,
    max_keys: int,
    sm_count: int,
    rows: int,
    scores: Scores,
    token: OwnToken,
    target: str,
) -> LatentDecode | None:
    """The kernel for a latent vector on wgmma, one CTA per SM; None if unsupported. A ``token``
    that is not appended is that of several rows of a sequence."""
    if not serves_latents(heads, layout, scores, token):
        return None
    is_short = rows == 1 and max_keys <= FEW_KEYS and heads <= FEW_HEADS
    each = 8 if is_short or heads % 16 else 16
    tiles = heads // each
    cluster = 8 if 8 * tiles * rows <= sm_count else 4
    spec = LatentDecode(
        *(heads, layout, rows, scores, token, each),
        ctas=max(1, sm_count // (cluster * tiles)),
        least=LEAST_KEYS,
        most=0 if rows == 1 else MOST_KEYS,
        cluster=cluster,
    )
    return spec if spec.target_on(target) else None


def chosen_attention(
    heads: int,
    layout: KvLayout,
    rows: int,
    scores: Scores,
    sm_count: int,
    target: str,
    parts: OwnToken | None,
) -> LatentDecode | IncrementalAttention:
    """The kernel for rows that each attend to tokens of their own choice (`KvLayout.chosen`), whose
    keys are in the cache and whose queries have been rotated: on wgmma if supported, with queries
    in MLA's two ``parts``, a token that is neither rotated nor appended."""
    if parts is not None and serves_latents(heads, layout, scores, parts):
        each = 8 if heads % 16 or (rows == 1 and heads <= FEW_HEADS) else 16
        clusters = rows * heads // each
        cluster = next((n for n in (8, 4) if n * clusters <= sm_count), 2)
        spec = LatentDecode(
            *(heads, layout, rows, scores, parts, each),
            ctas=rows,
            least=LEAST_KEYS,
            cluster=cluster,
        )
        if spec.target_on(target):
            return spec
    return _spread(IncrementalAttention(heads, layout, rows, scores), sm_count)


def _has_much_memory(target: str) -> bool:
    """Whether SMs have room for a large ring beside a CTA of the products."""
    return Target.parse(target).sm in LARGE_SHARED


def split_attention(whole: IncrementalAttention, max_keys: int, sm_count: int) -> FlashDecode:
    """Flash decoding equivalent to ``whole``, for rows with positions below ``max_keys``."""
    is_short = min(whole.scores.span or max_keys, max_keys) <= FEW_KEYS
    ctas = sm_count if is_short and whole.rows == 1 else 2 * sm_count
    return FlashDecode(
        whole.heads,
        whole.layout,
        whole.rows,
        whole.scores,
        whole.token,
        whole.most_heads,
        ctas=max(1, ctas // whole.head_tiles.count),
        least=LEAST_KEYS,
        most=0 if whole.rows == 1 else MOST_KEYS * (1 + whole.rows // MANY_ROWS),
        packs=whole.packs,
    )


def _spread(spec: IncrementalAttention, sm_count: int) -> IncrementalAttention:
    """The kernel with fewer query heads per CTA, while every CTA has an SM to itself: each then has
    less work per key, and keys that are read again come from the L2 cache."""
    for heads in (2, 1):
        fewer = replace(spec, most_heads=heads)
        if spec.rows * fewer.head_tiles.count > sm_count:
            break
        spec = fewer
    return spec


def _narrowed(spec: IncrementalAttention, sm_count: int, target: str) -> IncrementalAttention:
    """The kernel with half the warps per CTA where there are more CTAs than SMs hold with all: SMs
    then hold twice as many rows, and each merges fewer sums."""
    ctas = spec.rows * spec.head_tiles.count
    multiplies = spec.head_tiles.tensor_cores and max(spec.head_dim, spec.value_dim) <= NARROW
    if not target or not multiplies or ctas <= CTAS_PER_SM * sm_count:
        return spec
    if spec.token and spec.token.norms(spec.head_tiles.size) > MOST_NORMS:
        return spec
    if Target.parse(target).sm not in LARGE_SHARED:
        return spec
    return replace(spec, warps=spec.warps // 2)


def fills_sms(keys: int) -> bool:
    """Whether the launch after attention over ``keys`` keys puts idle CTAs on SMs that it does not
    need.

    On an SM without a CTA the next launch would put two, and take as long as these. It does so
    after split attention: 397 tokens/s with idle CTAs, 361 without, at 32,768 keys (8B Q4_K_M on an
    H200). After incremental attention idle CTAs only cost time: 728 with, 732 without.
    """
    return keys > INCREMENTAL_KEYS
