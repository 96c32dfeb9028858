"""How a product on Hopper's tensor cores is cut: an estimate of its time for each way, measured.

On an H200, Q4_K, a chain of launches with programmatic edges, us (rows x vectors of the weights):

| vectors | 6144 x 4096 | 4096 x 4096 | 2 x 14336 x 4096 | 4096 x 14336 |
|---|---|---|---|---|
| 16 | 7.2 | 6.3 | 23.2 | 14.2 |
| 32 | 8.0 | 7.3 | 25.0 | 15.6 |
| 64 | 10.2 | 8.9 | 31.9 | 18.8 |
| 128 | 17.1 | 12.4 | 53.2 | 32.1 |
| 256 | 25.8 | 17.8 | 107.5 | 47.4 |
| 512 | 51.7 | 27.2 | 187.9 | 87.3 |
| 2048 | 155 | 107 | 747 | 356 |

A CTA takes about 0.25 us and 4.1 ns a vector for each 64 rows x 256 columns if it has several
warpgroups; one warpgroup takes three times as long. A cluster of two costs 2.2 us, a cluster of
four more than it saves.

Four warpgroups take nearly all registers of an SM: the CTAs of the next launch, often a norm with
packing, start after them. A step of 32 rows of an 8B Q4_K_M model takes 2.19 ms with four splits
of attention output and down, which are in clusters, with two 2.10.

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
from urdir.ptxgen.kernels.linear.packed_parts import Mixture
from urdir.ptxgen.kernels.linear.products.gemm_wgmma import GemmWgmma, WgmmaCut
from urdir.ptxgen.spec import ceil_div
from urdir.ptxgen.weights.packed import GROUP, TILE_SLICES

#: The targets whose products they are.
TARGETS = ("sm_90a",)
#: Row groups and splits of the columns: for vectors that fit in one CTA's few, and for more.
FEW_SHAPES, MANY_SHAPES = ((1, 4), (1, 2), (4, 1), (2, 2), (2, 1)), ((2, 1), (1, 1))
#: The most vectors of a CTA with activations of a whole tile in a stage, and of any.
FEW, MOST = 64, 128
#: Up to so many vectors splits as well, with activations of a whole tile in a stage: a warpgroup
#: alone takes longer than the tiles of two.
SPLIT_SHAPES, SPLIT_MOST = ((1, 2),), 96
#: Stages of weights, and stages of activations and their slices, deepest first.
RINGS = ((4, 3, 4), (3, 2, 4), (2, 2, 4), (3, 4, 1), (2, 4, 1), (2, 3, 1), (1, 3, 1))
#: CTAs that share the activations of more than `FEW` vectors, 1 or 2: two are not measured.
SHARERS = 1
#: us: of a CTA for a tile of an operand, per vector, of a warpgroup alone, and of a cluster.
TILE, PER_VECTOR, ALONE, ALONE_PER_VECTOR, CLUSTER = 0.25, 0.0041, 0.7, 0.002, 2.2
#: us by which four splits in a cluster must be faster than two.
CROWDED = 0.1
#: The same for tiles of mixtures, and us from a CTA's begin to its first product, and from its last
#: one to its end.
EXPERT_SHAPES = ((1, 1), (2, 1), (1, 2), (4, 1), (2, 2))
BEGIN = 2.0


@lru_cache(maxsize=256)
def choose_wgmma(product: GemmWgmma, sms: int) -> GemmWgmma:
    """The product, cut for a device with ``sms`` SMs; the cut that it has does not matter."""
    ways = [replace(product, cut=cut) for cut in _cuts(product, sms)]
    return _sharing(min(ways, key=lambda way: estimate(way, sms)))


def _sharing(product: GemmWgmma) -> GemmWgmma:
    """The product with CTAs that share activations, if there are pairs of them."""
    cut = product.cut
    if cut.vectors <= FEW or cut.x_slices > 1 or cut.cluster > 1 or product.mixture is not None:
        return product
    if cut.vectors % (SHARERS * GROUP) or product.row_ctas % SHARERS:
        return product
    return replace(product, cut=replace(cut, sharers=SHARERS))


def any_cut(batch: int) -> WgmmaCut:
    """A cut that every product of ``batch`` vectors may have at first; for tiles of a mixture their
    height is the batch."""
    return WgmmaCut(2, min(128, GROUP * ceil_div(batch, GROUP)), weight_stages=1, x_stages=1)


def estimate(product: GemmWgmma, sms: int) -> float:
    """us on an H200."""
    cut = product.cut
    if product.mixture is not None:
        return _estimate_of_experts(product, product.mixture, sms)
    waves = ceil_div(_ctas(product), sms)
    tiles = cut.row_groups * ceil_div(product.row_tiles, cut.cluster)
    together = TILE + PER_VECTOR * cut.vectors
    alone = (ALONE + ALONE_PER_VECTOR * cut.vectors) / cut.warpgroups
    apart = CLUSTER + (CROWDED if cut.splits > 2 else 0.0) if cut.cluster > 1 else 0.0
    return waves * tiles * max(together, alone) + apart


def _estimate_of_experts(product: GemmWgmma, mixture: Mixture, sms: int) -> float:
    """The same where each tile has an expert's matrix, which few share."""
    cut, experts = product.cut, mixture.experts
    chosen = experts * (1 - (1 - mixture.used / experts) ** product.batch)
    tiles = max(chosen, product.products / mixture.height)
    ctas = math.ceil(tiles) * product.launch_shape.grid[0]
    alone = (ALONE + ALONE_PER_VECTOR * cut.vectors) / cut.warpgroups
    together = cut.resident * (TILE + PER_VECTOR * cut.vectors)
    each = cut.row_groups * product.row_tiles * max(together, alone)
    return ceil_div(ctas, sms * cut.resident) * (BEGIN + each)


def _cuts(product: GemmWgmma, sms: int) -> Iterator[WgmmaCut]:
    if product.mixture is not None:
        for groups, splits in EXPERT_SHAPES:
            for resident in (2, 1):
                cut = _deepest(product, groups, splits, 1, product.mixture.height, resident)
                if cut is not None:
                    yield cut
        return
    whole = GROUP * ceil_div(product.batch, GROUP)
    half = GROUP * ceil_div(whole // GROUP, 2)
    few = whole <= FEW
    shapes: tuple[tuple[int, int], ...] = FEW_SHAPES if few else MANY_SHAPES
    shapes += SPLIT_SHAPES if FEW < whole <= SPLIT_MOST else ()
    for vectors in sorted({whole} if few else {v for v in (whole, half, FEW, MOST) if v <= MOST}):
        for groups, splits in shapes:
            for cluster in (1, 2):
                cut = _deepest(product, groups, splits, cluster, vectors)
                if cut is not None and (cluster == 1 or _ctas(replace(product, cut=cut)) <= sms):
                    yield cut


def _ctas(product: GemmWgmma) -> int:
    grid = product.launch_shape.grid
    return grid[0] * grid[1]


def _deepest(
    product: GemmWgmma, groups: int, splits: int, cluster: int, vectors: int, resident: int = 1
) -> WgmmaCut | None:
    """With the deepest rings that fit; None where none does."""
    for weights, activations, slices in RINGS:
        if (vectors <= FEW or splits > 1) != (slices == TILE_SLICES):
            continue
        try:
            cut = WgmmaCut(groups, vectors, splits, cluster, weights, activations, slices, resident)
            replace(product, cut=cut)
        except PtxgenError:
            continue
        return cut
    return None
