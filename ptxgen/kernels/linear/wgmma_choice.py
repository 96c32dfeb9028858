"""How a product on Hopper's tensor cores is cut: an estimate of its time for each way, measured.

The numbers are fitted to the times of 700 ways on an H200 (2026-11-28), a chain of launches with
programmatic edges and cold weights; the way that the estimate takes is 1 % slower than the fastest
one on average. us of the fastest (rows x vectors of the weights; Q6_K down, else Q4_K):

| vectors | 6144 x 4096 | 4096 x 4096 | 2 x 14336 x 4096 | 4096 x 14336 |
|---|---|---|---|---|
| 9, 16 | 7.7 | 6.4 | 20.8 | 15.8 |
| 32 | 8.8 | 7.1 | 23.3 | 17.7 |
| 64 | 10.8 | 8.8 | 28.6 | 20.1 |
| 65 | 11.2 | 8.4 | 36.1 | 21.0 |
| 96 | 14.6 | 9.0 | 39.4 | 29.7 |
| 136 | 16.8 | 10.9 | 47.4 | 32.8 |
| 208 | 21.0 | 15.9 | 73.8 | 40.3 |
| 256 | 24.2 | 17.3 | 85.4 | 46.2 |
| 512 | 47.1 | 27.0 | 152.7 | 85.4 |
| 2048 | 140.3 | 108.1 | 608.4 | 292.0 |

Tiles of more than 256 vectors spare a round of CTAs, Q4_K_M (2026-11-30):

| vectors | 2 x 14336 x 4096, up to 256, of 264 | 4096 x 14336, up to 256, of 264 |
|---|---|---|
| 1056 | 306.9, 303.1 | 179.1, 147.9 |

2048 of BF16, gate and up: 937 in tiles of 128, 880 of 208, 807 of 256 vectors, whose registers are
handed over (`WgmmaCut.hands_over`). Two CTAs of a launch that fit on one SM are sometimes there,
with none on another: 96 vectors of down took 36.4 so. More stages than two have room for end that
(`_alone_on_sm`: 29.7). A warpgroup that has an SM alone takes 1.2 to 1.4 times what its tiles need
(1.43 with 88 vectors, 1.2 with 128). Two splits, whose stages have half a tile of activations or a
quarter, take 4 to 6 us less of down and 2 to 4 of Q, K and V (96 and 104 vectors, in a step); four
row groups 4 of gate and up and 77 of the output (104 vectors; 2026-11-29). One by one (2026-11-29):

| vectors | 6144 x 4096, one split, two | 4096 x 14336 | 2 x 14336 x 4096, two row groups, four |
|---|---|---|---|
| 112 | 16.1, 12.5 | 31.3, 25.0 | 42.9, 41.6 |
| 120 | 16.0, 14.9 | 32.1, 28.0 | 44.3, 43.9 |
| 128 | 16.3, 14.4 | 33.8, 28.9 | 45.9, - |

Two CTAs that shared their activations, each copying half of them to both (`cp.async.bulk` with
`multicast`), took twice as long with every width.

Four warpgroups take nearly all registers of an SM: the CTAs of the next launch, often a norm with
packing, start after them. A step of 32 rows of an 8B Q4_K_M model takes 2.19 ms with four splits
of attention output and down, which are in clusters, with two 2.10.

CTAs that take tiles of y in turns (`_in_turns`), F16, us, and with a tile of each CTA (2026-11-29,
both in one call; "packed" with GELU, gated 2 x; + a residual):

| vectors | 3 x 1024 x 1024 | 4096 x 1024, packed | + 1024 x 1024 | + 1024 x 4096 |
|---|---|---|---|---|
| 8192 | 102.9, 104.0 | 119.8, 148.0 | 54.8, 49.2 | 117.1, 122.9 |

| vectors | 6144 x 4096 | 2 x 14336 x 4096, packed | + 4096 x 4096 |
|---|---|---|---|
| 2048 | 150.0, 156.2 | 664.9, 790.9 | 115.8, 113.7 |

An f32 y is 16 lines of memory for each store of a warp, so its ends are long; with 32 (16 bytes of
a vector) Q, K and V take 155.1. Of 4096 x 1024 the order of tiles (`rows_beside`) saves 9, a fourth
stage of activations 5, a third of weights 4. Products that do not overlap the loads of weights take
105.6, 120.1, 55.5 and 118.9 of 8192 vectors.

Of a mixture of 128 experts (qwen3-30b-a3b: 8 of them, 2 x 768 x 2048 Q4_K, 2048 x 768 Q6_K), us
up and down: 49 and 42 with 16 rows, 71 and 56 with 64, in tiles of 16 pairs, two CTAs of 128 rows
on an SM (one takes a third longer); 105 and 84 with 512 rows (tiles of 64, 256 rows of weights);
245 and 170 with 2048 (tiles of 128).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.epilogue.adapted import Adapted
from urdir.ptxgen.kernels.linear.epilogue.residual import Residual
from urdir.ptxgen.kernels.linear.packed_parts import BANDS, Mixture
from urdir.ptxgen.kernels.linear.products.gemm_wgmma import (
    FEW,
    MOST,
    SLICE_REGISTERS,
    GemmWgmma,
    WgmmaCut,
    can_take_turns,
)
from urdir.ptxgen.kernels.linear.products.packed_product import CTA_COST, SM_NBYTES
from urdir.ptxgen.ptx.architecture import SM_REGISTERS
from urdir.ptxgen.spec import ceil_div
from urdir.ptxgen.weights.format import Format
from urdir.ptxgen.weights.halves import Halves
from urdir.ptxgen.weights.layout import TILE_COLS
from urdir.ptxgen.weights.packed import GROUP, TILE_SLICES

#: The targets whose products they are.
TARGETS = ("sm_90a",)
#: Row groups and splits of the columns: for vectors that fit in one CTA's few, and for more.
FEW_SHAPES = ((1, 4), (1, 2), (4, 1), (2, 2), (2, 1), (1, 1))
MANY_SHAPES = ((2, 1), (1, 1))
#: The most vectors of a CTA with weights that are floats. An 8B BF16 model, ms of prompts of 513
#: and 1,025 tokens: 16.87 and 28.49 in tiles of up to 296, 16.55 and 26.68 before there were these.
FLOATS_MOST = 256
#: Up to this many vectors splits as well: a warpgroup alone takes longer than the tiles of two.
SPLIT_SHAPES, SPLIT_MOST = ((1, 2),), 136
#: Up to this many, stages of splits may have a part of a tile of activations; more: not measured.
SLICED_MOST = 128
#: Up to this many vectors four row groups have registers for the sums, which are handed over.
TALL_SHAPES, TALL_MOST = ((4, 1),), 120
#: Of more vectors than a CTA's, in how many tiles they may be, and how wide these are else.
TILES, WIDTHS = range(1, 5), (128, 176, 192, 208, 256)
#: Or in up to as many tiles from the fewest on that are no narrower than the first of these. Q, K
#: and V of 512 vectors of an 8B Q4_K_M model in five of 104 take 42.7 us by the estimate, in two
#: 44.0; a prompt took 12.19 ms so, else 11.69.
MORE = 6
#: The most stages of weights, of CTAs that are to have an SM each.
MOST_STAGES = 8
#: Stages of weights, and stages of activations and their slices, deepest first.
RINGS = (
    *((4, 3, 4), (3, 2, 4), (2, 3, 2), (2, 2, 4)),
    *((3, 4, 1), (2, 4, 1), (2, 3, 1), (1, 3, 1)),
)
#: Stages of weights of a row group, and of activations, of CTAs that take turns.
TURN_RINGS = ((3, 8), (3, 5), (3, 4), (3, 3), (2, 3))
#: Vectors from which on there are turns: of fewer, weights need the deeper ring. Tiles of the
#: columns of a product with a residual from which on turns pay, if it has more tiles of vectors
#: than of rows.
TURN_BATCH, TURN_ROW_TILES = 512, 8
#: us of a tile of 64 rows and 256 columns of an SM, and of each vector: the more of weights that
#: are made (of quants in two planes for longer), or of products; and of floats.
MADE, PLANES, MULTIPLIED, FLOATS = (0.245, 0.0033), 0.07, (0.045, 0.00475), (0.395, 0.0044)
#: How much longer tiles take whose registers are handed over where an SM has more than this many.
HANDED, HANDED_FROM = 1.12, 8
#: How much longer they take where two CTAs may be on an SM, none on another, by CTAs of a cluster.
PAIRED = {1: 1.4, 2: 2.0, 3: 2.0}
#: How much longer a warpgroup takes that has an SM alone, up to `SLICED_MOST` vectors: for each
#: vector below this many, and at least.
LONE, LONE_MOST, LONE_LEAST = 0.005, 120, 0.08
#: us of the same of a warpgroup alone, and of one that makes weights between products.
ALONE, ALONE_PER_VECTOR, APART_PER_VECTOR = 0.42, 0.0007, 0.0061
#: Registers that a thread has beside those that it must have: of a pair's CTAs, so that with up to
#: 120 vectors two fit, and where weights are not made beside products.
PAIR_REGISTERS, APART_REGISTERS = 16, 12
#: us of a launch, of each CTA of an SM after the other, of a vector of it at its end (of the
#: second `FEW`), of a cluster of two, and of a split for 64 vectors.
LAUNCH, NEXT, END, CLUSTER, SPLIT = 1.88, 0.23, 0.02, 1.98, 0.256
#: Bytes in a us: that an SM gets from L2, that memory gives, and an SM gets of these.
L2_NBYTES, MEMORY_NBYTES, SM_NBYTES_READ = 110e3, 3.57e6, 42e3
#: Tiles of the columns from which on three CTAs may share few vectors of quantised weights, and how
#: many such clusters a device has room for at once, one CTA an SM. A step of qwen3-30b-a3b with 64
#: vectors takes 3.889 ms with the attention output (2048 x 4096) in clusters of three, one split,
#: in place of 3.936 in clusters of two, two splits; two splits of three 3.937, one of four, two
#: CTAs an SM, 3.959; in another call 3.560 and 3.592, with 16 vectors 2.719 and 2.736, of
#: qwen2.5-1.5b 1.201 and 1.237, 0.803 and 0.810 (2026-11-29).
TILES_OF_THREE, MOST_OF_THREE = 16, 36
#: us that a tile and a vector of it take of a mixture, and us from a CTA's begin to its first
#: product, and from its last one to its end.
EXPERT_SHAPES = ((1, 1), (2, 1), (1, 2), (4, 1), (2, 2))
EXPERT_TILE, EXPERT_VECTOR, EXPERT_ALONE, EXPERT_ALONE_VECTOR = 0.25, 0.0041, 0.7, 0.002
BEGIN = 2.0
#: Bytes of a tile's columns of an activation vector.
TILE_NBYTES = 2 * TILE_COLS


@lru_cache(maxsize=256)
def choose_wgmma(product: GemmWgmma, sms: int) -> GemmWgmma:
    """The product, cut for a device with ``sms`` SMs; the cut that it has does not matter."""
    return min(ways(product, sms), key=lambda way: estimate(way, sms))


def ways(product: GemmWgmma, sms: int) -> list[GemmWgmma]:
    """The product with each cut that may be the best one; `tests/product_cuts.py` measures them."""
    return [_in_turns(way, sms) for way in _with_cuts(product, sms)]


def _in_turns(way: GemmWgmma, sms: int) -> GemmWgmma:
    """With a CTA for each SM, if there are more tiles than that and turns pay."""
    if not can_take_turns(way) or way.batch < TURN_BATCH or _ctas(way) <= sms:
        return way
    few = way.layout.row_tiles < TURN_ROW_TILES or way.tiling.tiles <= way.tiling.row_ctas
    if few and way.steps.has(Residual):
        return way
    for weights, activations in TURN_RINGS:
        try:
            rings = {"weight_stages": weights, "x_stages": activations}
            return replace(way, cut=replace(way.cut, **rings, ctas=sms))
        except PtxgenError:
            continue
    return way


def any_cut(batch: int) -> WgmmaCut:
    """A cut that every product of ``batch`` vectors may have at first; for tiles of a mixture their
    height is the batch."""
    return WgmmaCut(2, min(128, GROUP * ceil_div(batch, GROUP)), weight_stages=1, x_stages=1)


def estimate(product: GemmWgmma, sms: int) -> float:
    """us on an H200."""
    cut = product.cut
    if product.mixture is not None:
        return _estimate_of_experts(product, product.mixture, sms)
    ctas, tiles = _ctas(product), ceil_div(product.layout.row_tiles, cut.cluster)
    each = ceil_div(ctas, sms)
    waves = ceil_div(each, min(each, _together(product)))
    per_vector = ALONE_PER_VECTOR if product.overlaps else APART_PER_VECTOR
    alone = waves * tiles * (ALONE + per_vector * cut.vectors) / cut.splits
    on_sm = each * tiles * cut.row_groups * _tile(product.format, cut.vectors)
    on_sm *= PAIRED[cut.cluster] if each == 1 and _together(product) > 1 else 1
    is_lone = each * cut.warpgroups * _together(product) == 1
    if is_lone and FEW < cut.vectors <= SLICED_MOST:
        longer = 1 + max(LONE * (LONE_MOST - cut.vectors), LONE_LEAST)
        alone, on_sm = longer * alone, longer * on_sm
    is_slow = cut.hands_over and each > HANDED_FROM and not product.format.is_float
    on_sm *= HANDED if is_slow else 1
    weights = BANDS * cut.row_groups * product.layout.tile_nbytes
    copied = tiles * (weights + TILE_NBYTES * cut.vectors) * (each if each > 1 else ctas / sms)
    readers = ctas // product.tiling.tiles
    read = readers * tiles * weights / min(MEMORY_NBYTES, SM_NBYTES_READ * min(readers, sms))
    if cut.weight_stages == 1:  # nothing is copied while a tile is multiplied
        on_sm += copied / L2_NBYTES
    at_once = (alone, on_sm, copied / L2_NBYTES, read)
    apart = CLUSTER if cut.cluster > 1 else 0.0
    apart += SPLIT * cut.splits * cut.vectors / FEW if cut.splits > 1 else 0.0
    together = math.sqrt(math.hypot(*(us * us for us in at_once)))  # the longest, or some more
    end = NEXT + END * min(max(0, cut.vectors - FEW), FEW)
    ends = 1 if product.cut.takes_turns else waves
    return LAUNCH + ends * end + together + apart


def _tile(fmt: Format, vectors: int) -> float:
    """us of an SM for 64 rows and 256 columns."""
    if fmt.is_float:
        return FLOATS[0] + FLOATS[1] * vectors
    made, multiplied = (us + each * vectors for us, each in (MADE, MULTIPLIED))
    return max(made + (PLANES if Halves(fmt).have_bytes else 0.0), multiplied)


def _together(product: GemmWgmma) -> int:
    """CTAs for which an SM has room at once."""
    cut = product.cut
    more = PAIR_REGISTERS if cut.cluster > 1 else SLICE_REGISTERS
    registers = cut.used_registers + (more if product.overlaps else APART_REGISTERS)
    by_registers = SM_REGISTERS // (cut.threads * registers)
    return max(1, min(by_registers, SM_NBYTES // (product.grids.end + CTA_COST)))


def _estimate_of_experts(product: GemmWgmma, mixture: Mixture, sms: int) -> float:
    """The same where each tile has an expert's matrix, which few share."""
    cut, experts = product.cut, mixture.experts
    chosen = experts * (1 - (1 - mixture.used / experts) ** product.batch)
    tiles = max(chosen, product.tiling.products / mixture.height)
    ctas = math.ceil(tiles) * product.launch_shape.grid[0]
    alone = (EXPERT_ALONE + EXPERT_ALONE_VECTOR * cut.vectors) / cut.warpgroups
    together = cut.resident * (EXPERT_TILE + EXPERT_VECTOR * cut.vectors)
    each = cut.row_groups * product.layout.row_tiles * max(together, alone)
    return ceil_div(ctas, sms * cut.resident) * (BEGIN + each)


def _with_cuts(product: GemmWgmma, sms: int) -> Iterator[GemmWgmma]:
    if product.mixture is not None:
        yield from _of_experts(product, product.mixture.height)
        return
    whole = GROUP * ceil_div(product.batch, GROUP)
    shapes: tuple[tuple[int, int], ...] = FEW_SHAPES if whole <= FEW else MANY_SHAPES
    shapes += SPLIT_SHAPES if FEW < whole <= SPLIT_MOST else ()
    shapes += TALL_SHAPES if FEW < whole <= TALL_MOST else ()
    for vectors in _widths(whole, any(fmt.is_float for fmt in product.formats)):
        for groups, splits in shapes:
            for cluster in _clusters(product, vectors):
                way = _deepest(product, groups, splits, cluster, vectors)
                if way is None:
                    continue
                most = 3 * MOST_OF_THREE if cluster == 3 else sms
                if cluster == 1 or _ctas(way) <= min(sms, most):
                    yield way
                    if _ctas(way) <= sms and vectors > FEW and _together(way) > 1:
                        yield from _alone_on_sm(way)


def _of_experts(product: GemmWgmma, height: int) -> Iterator[GemmWgmma]:
    """Tiles of ``height`` vectors, of which an SM has one or two."""
    for groups, splits in EXPERT_SHAPES:
        for resident in (2, 1):
            way = _deepest(product, groups, splits, 1, height, resident)
            if way is not None:
                yield way


def _clusters(product: GemmWgmma, vectors: int) -> tuple[int, ...]:
    """CTAs that a cluster may have: of a product with adapters, which may compute A x, two."""
    is_long = product.layout.row_tiles >= TILES_OF_THREE and not any(
        f.is_float for f in product.formats
    )
    return (1, 2, 3) if vectors <= FEW and is_long and not product.steps.has(Adapted) else (1, 2)


def _alone_on_sm(way: GemmWgmma) -> Iterator[GemmWgmma]:
    """With the fewest stages of weights more for which an SM has no room for two CTAs."""
    for stages in range(way.cut.weight_stages + 1, MOST_STAGES + 1):
        try:
            deeper = replace(way, cut=replace(way.cut, weight_stages=stages))
        except PtxgenError:
            return
        if _together(deeper) == 1:
            yield deeper
            return


def _widths(whole: int, is_float: bool) -> list[int]:
    """Vectors of a CTA, of a ``whole`` number of groups."""
    if whole <= FEW:
        return [whole]
    most = FLOATS_MOST if is_float else MOST
    fewest, groups = ceil_div(whole, most), whole // GROUP
    even = {GROUP * ceil_div(groups, tiles) for tiles in TILES}
    more = (GROUP * ceil_div(groups, tiles) for tiles in range(fewest, fewest + MORE))
    even |= {vectors for vectors in more if vectors >= WIDTHS[0]}
    return sorted(v for v in {*even, *WIDTHS} if FEW / 2 <= v <= min(whole, most))


def _ctas(product: GemmWgmma) -> int:
    """Its tiles of y, in parts of the columns."""
    return product.cut.cluster * product.tiling.row_ctas * product.tiling.tiles


def _deepest(
    product: GemmWgmma, groups: int, splits: int, cluster: int, vectors: int, resident: int = 1
) -> GemmWgmma | None:
    """With the deepest rings that fit; None where none does."""
    for weights, activations, slices in RINGS:
        if slices not in _slices(product.format, groups, splits, vectors):
            continue
        if splits > 1 and slices == 1 and weights > 2:  # 1 to 2 % slower (112 to 128 vectors)
            continue
        try:
            cut = WgmmaCut(groups, vectors, splits, cluster, weights, activations, slices, resident)
            return replace(product, cut=cut)
        except PtxgenError:
            continue
    return None


def _slices(fmt: Format, groups: int, splits: int, vectors: int) -> tuple[int, ...]:
    """How many slices of activations a stage may have. Splits of floats and of more than
    `SLICED_MOST` vectors are not measured."""
    if vectors <= FEW or (splits == 1 and groups > 2):
        return (TILE_SLICES,)
    if splits == 1:
        return (1,)
    is_measured = vectors <= SLICED_MOST and not fmt.is_float
    return (TILE_SLICES, 2, 1) if is_measured else (TILE_SLICES,)
