"""How a product of packed activations by ``mma.sync`` is cut: an estimate of its time for each way.

The estimate takes the times of `wgmma_choice` on an H200, and 1.7 times as long for a vector
(mma.sync has 60 % of wgmma's rate), 2.5 times where a warp has one operand, and reads activations
from shared memory as fast as that allows.

us of a launch on an H200 (2026-11-22), `Gemm` / `GemmMma`, the weights in memory:

    vectors     28672 x 4096 Q4_K    4096 x 14336 Q4_K    28672 x 4096 F16
    16                 73 /    48            61 /  32           90 /   80
    64                140 /    92           111 /  41          169 /  111
    512               521 /   393           387 / 202          994 /  480
    2,048           1,900 / 1,498           927 / 726        3,666 / 1,831

It was faster at 4096 x 4096, with Q6_K and Q8_0, and at 32 and 128 vectors as well.

2,048 vectors by `GemmMma` / `GemmMmaBytes`, Q4_K (an H200, 2026-11-30): 4096 x 4096 219.0 / 133.9
us, 14336 x 4096 750.6 / 453.3, 4096 x 14336 711.1 / 412.6. E4M3R256 by `GemmMma` / `GemmMmaE4m3`,
which multiplies f16 numbers there: 245.6 / 285.2, 833.0 / 980.7. Where mma.sync multiplies E4M3
numbers (`bytes_choice.MMA_E4M3`) it has not been measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.choice import Limits
from urdir.ptxgen.kernels.linear.packed_parts import BANDS
from urdir.ptxgen.kernels.linear.products.gemm_mma import GemmMma, MmaCut
from urdir.ptxgen.kernels.linear.products.gemm_mma_bytes import MmaBytesCut
from urdir.ptxgen.kernels.linear.products.packed_product import CTA_COST
from urdir.ptxgen.spec import ceil_div
from urdir.ptxgen.target import since
from urdir.ptxgen.weights.format import Format
from urdir.ptxgen.weights.layout import TILE_COLS, TILE_ROWS, Layout
from urdir.ptxgen.weights.packed import GROUP, TILE_SLICES

#: The targets that it serves. Only an H200 has been measured, whose own kernel is `GemmWgmma`.
TARGETS = since(80)
#: Row groups, splits and operands.
SHAPES = (
    *((1, 4, 1), (1, 2, 1), (1, 1, 1), (2, 2, 1), (2, 1, 1), (2, 2, 2), (2, 1, 2)),
    *((4, 1, 1), (4, 1, 2)),
)
#: The most vectors of a CTA by operands: of 128 with two the assembler spills.
MOST = {1: 128, 2: 64}
#: Stages of weights, stages of activations and their slices, deepest first.
RINGS = ((4, 4, 2), (3, 4, 2), (3, 3, 2), (2, 3, 2), (2, 3, 1), (2, 2, 1))
#: us: of a row group for a tile, per vector by operands, and of four warps alone.
TILE, PER_VECTOR, ALONE, ALONE_PER_VECTOR = 0.25, {1: 0.010, 2: 0.007}, 0.7, 0.004


def fits(fmt: Format, limits: Limits) -> bool:
    """Whether a CTA has room for a gated product: two stages of two row groups, and activations.
    Unquantised weights are too large for it on sm_86, sm_89 and sm_120."""
    tile = Layout(fmt, TILE_ROWS, TILE_COLS).tile_nbytes + 128
    return 2 * 2 * BANDS * tile + (16 << 10) <= limits.shared_per_cta


@lru_cache(maxsize=256)
def choose_mma(product: GemmMma, limits: Limits) -> GemmMma:
    """The product, cut for a device with these ``limits``; the cut that it has does not matter.

    Raises PtxgenError where no cut fits.
    """
    ways = list(_ways(product, limits))
    if not ways:
        raise PtxgenError(f"{product} fits no CTA of {limits.shared_per_cta} bytes")
    return min(ways, key=lambda way: estimate(way, limits))


def any_cut(batch: int) -> MmaCut:
    """A cut that every product of ``batch`` vectors may have at first."""
    return MmaCut(2, min(64, GROUP * ceil_div(batch, GROUP)), x_stages=2)


def any_bytes_cut(batch: int) -> MmaBytesCut:
    """The same of a product of numbers of eight bits."""
    return MmaBytesCut(2, min(64, GROUP * ceil_div(batch, GROUP)), x_stages=2)


def estimate(product: GemmMma, limits: Limits) -> float:
    """us on an H200; of numbers of eight bits, whose instructions multiply twice as many, a vector
    takes half as long."""
    cut, grid = product.cut, product.launch_shape.grid
    ctas = grid[0] * grid[1]
    beside = min(cut.resident, ceil_div(ctas, limits.sms))
    waves = ceil_div(ctas, limits.sms * beside)
    vectors = cut.vectors * cut.slices / TILE_SLICES
    together = TILE + PER_VECTOR[cut.operands] * vectors
    warps = beside * cut.splits * cut.row_groups / cut.operands
    alone = cut.operands * (ALONE + ALONE_PER_VECTOR * vectors) / warps
    return waves * beside * cut.row_groups * product.layout.row_tiles * max(together, alone)


def _ways(product: GemmMma, limits: Limits) -> Iterator[GemmMma]:
    whole, cut = GROUP * ceil_div(product.batch, GROUP), type(product.cut)
    for groups, splits, operands in SHAPES:
        most = MOST[operands]
        for vectors in sorted({min(whole, most), min(whole, 64), min(whole, 32)}):
            for resident in (1, 2):
                shape = cut(groups, vectors, splits, operands, resident=resident)
                if (way := _deepest(product, shape, limits)) is not None:
                    yield way


def _deepest(product: GemmMma, shape: MmaCut, limits: Limits) -> GemmMma | None:
    """With the deepest rings that fit; None where none does."""
    most = min(limits.shared_per_cta, limits.shared_per_sm // shape.resident - CTA_COST)
    for weights, activations, slices in RINGS:
        try:
            cut = replace(shape, weight_stages=weights, x_stages=activations, x_slices=slices)
            way = replace(product, cut=cut)
        except PtxgenError:
            continue
        if way.grids.end <= most:
            return way
    return None
