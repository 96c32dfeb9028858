"""How decode attention divides query heads among CTAs, and keys among what multiplies them."""

from __future__ import annotations

from dataclasses import dataclass

from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.scores import Scores
from urdir.ptxgen.spec import ceil_div

WARPS = 8
#: Query heads that share one read of K and V. Eight need more registers than two CTAs per SM have.
MAX_TILE = 4
#: Statically declared shared memory that every target supports.
MAX_STATIC_SHARED = 48 << 10
#: Values of a head per lane: 16 bytes of f16.
LANE_DIMS = 8
#: Keys that a warp multiplies at once on tensor cores: the rows of an mma.
TILE_KEYS = 16
#: Values of a head whose sums fit registers, and with quants, whose scales also take registers.
MAX_VALUES, MAX_QUANTS_DIM = 512, 256


@dataclass(frozen=True, slots=True)
class HeadLanes:
    """A group of lanes of the ``warps`` has a key of ``head_dim`` values at a time, and its value
    of ``value_dim``; a lane groups of eight of them."""

    head_dim: int
    value_dim: int
    warps: int

    @property
    def count(self) -> int:
        """Lanes of a group: head_dim / 8 (or value_dim / 8, if larger), rounded up to a power of
        two (the rest is idle); at most a warp."""
        eights = max(self.head_dim, self.value_dim) // LANE_DIMS
        return min(32, 1 << (eights - 1).bit_length())

    @property
    def pieces(self) -> tuple[int, int]:
        """Number of groups of eight dims per lane, of a key and of a value: groups lane, lane + 32,
        ..."""
        first, second = (
            ceil_div(dims // LANE_DIMS, self.count) for dims in (self.head_dim, self.value_dim)
        )
        return first, second

    @property
    def keys_per_pass(self) -> int:
        """Keys that a CTA takes at once, one per group."""
        return self.warps * (32 // self.count)


@dataclass(frozen=True, slots=True)
class HeadTiles:
    """Each CTA has a tile of the query heads that share one of ``kv_heads``, ``group`` of them.

    A tile has ``size`` heads, a power of two (the last one of a KV head may have fewer), of up to
    ``rows`` rows of a sequence at once. ``lanes`` share a key, unless ``tensor_cores`` multiply,
    which they do from ``since`` on; keys and values in flight to these use ``ring`` bytes of
    dynamic shared memory, or with 0 static memory.
    """

    kv_heads: int
    group: int
    size: int
    lanes: HeadLanes
    rows: int = 1
    tensor_cores: bool = False
    ring: int = 0

    @property
    def each(self) -> int:
        """Tiles of the heads that share a KV head."""
        return ceil_div(self.group, self.size)

    @property
    def count(self) -> int:
        """Tiles of all heads."""
        return self.kv_heads * self.each

    @property
    def since(self) -> int:
        """The first architecture whose tensor cores multiply: before sm_90 the sums of more than
        256 values do not fit beside the assembler's other registers."""
        return 90 if self.lanes.value_dim > 256 else 80


def decode_tiles(
    layout: KvLayout,
    scores: Scores,
    heads: int,
    rows: int,
    most_heads: int,
    *,
    warps: int = WARPS,
    ring: int = 0,
    run: int = 1,
) -> HeadTiles:
    """Tiles of at most ``most_heads`` of the ``heads`` of ``rows`` rows, of which ``run`` share a
    CTA, such that the sums of all warps fit the ring, or static shared memory.

    Tensor cores multiply what they take, except a single head without scales of one row, which is
    less work for lanes. On an H200 256 keys (32 heads, 8 KV heads of 128 values, f16) take 3.6 us
    in lanes, on tensor cores 3.8; eight rows of them (16 heads, 8 KV heads of 256 values) 13.8 and
    7.7.
    """
    group, lanes = heads // layout.kv_heads, HeadLanes(*layout.widths, warps)
    is_single = rows == 1 and min(most_heads, lanes.count, group) == 1
    is_scaled = any(of.is_scaled for of in layout.formats)
    multiplies = tensor_cores_take(layout, scores) and (is_scaled or not is_single)
    fit = MAX_TILE // max(lanes.pieces)
    if multiplies:
        fit = (ring or MAX_STATIC_SHARED) // (4 * warps * (lanes.value_dim + 2))
    fit = min(MAX_TILE, 1 << (fit.bit_length() - 1))
    size = min(most_heads, fit, lanes.count, 1 << (group - 1).bit_length())
    return HeadTiles(layout.kv_heads, group, size, lanes, run, multiplies, ring * multiplies)


def tensor_cores_take(layout: KvLayout, scores: Scores) -> bool:
    """Whether tensor cores multiply from sm_80 on: 16-bit operands, sums that fit registers, a ring
    no shorter than a tile of keys; two f16 scales are copied at once, and must belong to the same
    slot, as do 16 bytes of elements."""
    if 0 < layout.capacity < TILE_KEYS or layout.values_per_head > MAX_VALUES:
        return False
    if scores.texts:  # of exact arithmetic alone
        return False
    if scores.relative:  # a load for each score
        return False
    if layout.is_chosen:  # a tile of keys is copied as neighbours
        return False
    formats = (layout.format, layout.values.format)
    for of, width in zip(formats, layout.widths, strict=True):
        whole = {"": 0, "s8": 64}.get(of.operand, 128 // of.bits)
        if not whole or width % whole or layout.value_start % whole:
            return False
    return max(layout.widths) <= MAX_QUANTS_DIM or not any(of.operand == "s8" for of in formats)
