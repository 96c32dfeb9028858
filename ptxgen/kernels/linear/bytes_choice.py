"""How a product of signed bytes is cut for a device: an estimate of its time for each way.

The numbers are computed, from the rates of an H200; `tests/product_cuts.py` measures each way. An
8B Q4_K_M model, tokens/s on an H200 (2026-11-28), int8 / f16, with clusters of four that share
activations, and CTAs of 64 rows, where these were estimated to be faster (o, down; all with up to
512 rows): prompts of 512, 2,048, 8,192 tokens 31,850 / 38,313, 49,999 / 39,493, 45,295 / 35,238;
128, 256, 512 sequences 28,016, 28,119, 30,180. Such cuts took about twice their estimate, so that
there are none any more; without them it is not measured.

Tiles of up to 288 vectors, whose registers are handed over (`BytesCut.hands_over`), in place of
208: an 8B model of E4M3 weights, tokens/s of prompts of 512, 513, 1,024, 1,025 and 2,048 tokens
58,819, 55,980, 71,449, 70,390 and 74,909, before 53,620, 51,909, 65,576, 57,013 and 70,450 on a
card whose dense products are 10 % faster (2026-11-30).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear import mma_choice
from urdir.ptxgen.kernels.linear.packed_parts import BANDS
from urdir.ptxgen.kernels.linear.products.gemm_bytes import MOST, BytesCut, GemmBytes
from urdir.ptxgen.spec import ceil_div
from urdir.ptxgen.target import Target
from urdir.ptxgen.weights import eights
from urdir.ptxgen.weights.formats import Format
from urdir.ptxgen.weights.packed import GROUP

#: The targets whose products they are. Others have mma.sync (`mma_choice`): of signed bytes from
#: sm_80 on, of E4M3 numbers these. What ptxas 13.5 makes of it for sm_90, sm_100, sm_103 and sm_110
#: makes f16 of E4M3 numbers in registers, and multiplies these.
TARGETS, MMA_E4M3 = ("sm_90a",), ("sm_89", "sm_120", "sm_121")
#: From this many rows of activations on they are multiplied as bytes: with fewer, tiles of 128
#: vectors are less full. 512 tokens of an 8B Q4_K_M model: 47,997 tokens/s, 43,460 in f16.
LEAST_ROWS = 449
#: The same of floats of eight bits, of which none are made. An 8B FP8 model, as they are / in f16,
#: tokens/s: 136 sequences 26,164 (128 in f16 28,461), 144, 160, 192, 256 29,845 / 28,420,
#: 32,085 / 30,186, 34,602 / 32,444, 41,880 / 36,486; prompts of 144, 160, 192, 256, 384 tokens
#: 26,700 / 27,334, 29,720 / 29,236, 31,684 / 32,432, 42,036 / 35,475, 51,816 / 39,430 (an H200,
#: 2026-11-30).
LEAST_FLOATS = 137
#: The same of floats with a scale for each 128 columns. An 8B model, as they are / in f16,
#: tokens/s: prompts of 144, 512, 2,048 tokens 27,126 / 24,948 (or 26,743), 48,219 / 41,038,
#: 62,644 / 46,332; us of the matrices of a layer, 256 rows 149 / 187 (an H200, 2026-11-30). Rows
#: between are not measured: of 192 f16 may be as fast.
LEAST_BLOCKS = 249
#: Row groups of a CTA, its vectors, or all there are, and in how many tiles more than the fewest
#: these may be.
ROW_GROUPS, VECTORS, TILES = 2, (64, 96, 128, 160, 192, 208), 6
#: CTAs that share activations, and that divide the columns: four of them up to this many vectors. A
#: prompt of 256 tokens of an 8B model of E4M3 weights takes 6.7 ms without four, with them 7.3.
#: Floats with scales of 128 columns spill in wider tiles.
CLUSTERS, FOUR_MOST, BLOCKS_MOST = ((2, 1), (1, 1), (1, 2), (1, 4)), 208, 192
#: Stages of weights and of activations, deepest first.
RINGS = ((4, 6), (4, 5), (3, 5), (3, 4), (2, 4), (2, 3), (1, 3), (1, 2))
#: us of a tile of 256 columns: of 64 rows and a vector on tensor cores; of bytes made of weights,
#: and of those of each 64 rows; and bytes of L2 that an SM gets.
PRODUCT, WEIGHTS, PER_ROWS, NBYTES = 0.0029, 0.12, 0.3, 42e3
#: us of a CTA besides, and of sums of a cluster; of this many SMs clusters of four leave one idle:
#: an H200 has room for 30. As 32 of four, down of 144 vectors took 42.9 us, as 64 of two 33.6.
BEGIN, CLUSTER, IDLE = 3.0, 2.2, 11


def multiplies_bytes(target: str) -> bool:
    """Whether a device with that native target has products of signed bytes."""
    return target in TARGETS or Target.parse(target).portable in mma_choice.TARGETS


def multiplies_e4m3(target: str, fmt: Format) -> bool:
    """Whether it has products of E4M3 numbers of such weights."""
    by_mma = fmt.of_rows and Target.parse(target).portable in MMA_E4M3
    return eights.are_e4m3(fmt) and (target in TARGETS or by_mma)


def least_rows(fmt: Format) -> int:
    """From how many rows of activations on weights of the type are multiplied in 8 bits."""
    if not eights.are_e4m3(fmt):
        return LEAST_ROWS
    return LEAST_FLOATS if fmt.of_rows else LEAST_BLOCKS


@lru_cache(maxsize=256)
def choose_bytes(product: GemmBytes, sms: int) -> GemmBytes:
    """The product, cut for a device with ``sms`` SMs; the cut that it has does not matter."""
    return min(ways(product, sms), key=lambda way: estimate(way, sms))


def any_cut(batch: int) -> BytesCut:
    """A cut that every product of ``batch`` vectors may have at first."""
    return BytesCut(ROW_GROUPS, min(64, _whole(batch)), 1, 1)


def estimate(product: GemmBytes, sms: int) -> float:
    """us on an H200."""
    cut = product.cut
    idle = sms // IDLE if max(cut.sharers, cut.cluster) > 2 else 0
    waves = ceil_div(_ctas(product), sms - idle)
    copied = BANDS * cut.row_groups * product.layout.tile_nbytes + 256 * cut.vectors / cut.sharers
    made = 0.0 if product.operands.are_floats else WEIGHTS + PER_ROWS * cut.row_groups
    tile = max(cut.row_groups * cut.vectors * PRODUCT, made, copied / NBYTES)
    apart = CLUSTER if cut.cluster > 1 else 0.0
    return waves * (BEGIN + ceil_div(product.layout.row_tiles, cut.cluster) * tile) + apart


def ways(product: GemmBytes, sms: int) -> list[GemmBytes]:
    """The product with each cut that may be the best one."""
    found = []
    for vectors in _widths(product):
        for sharers, cluster in CLUSTERS:
            way = _deepest(product, vectors, sharers, cluster)
            most = FOUR_MOST if cluster > 2 else MOST
            if way is not None and vectors <= most and (cluster == 1 or _ctas(way) <= sms):
                found.append(way)
    return found


def _widths(product: GemmBytes) -> list[int]:
    """Vectors of a CTA: instructions take E4M3 numbers of one group more, and bytes of two."""
    floats = product.operands.are_floats
    groups, unit = ceil_div(product.batch, GROUP), 1 if floats else 2
    most = BLOCKS_MOST if floats and not all(fmt.of_rows for fmt in product.formats) else MOST
    whole = GROUP * groups if unit == 1 else _whole(product.batch)
    tiles = range(1, ceil_div(whole, most) + TILES)
    even = {GROUP * unit * ceil_div(groups, unit * count) for count in tiles}
    return sorted({min(whole, each) for each in (*VECTORS, *even) if VECTORS[0] <= each <= most})


def _ctas(product: GemmBytes) -> int:
    grid = product.launch_shape.grid
    return grid[0] * grid[1]


def _whole(batch: int) -> int:
    """Vectors in whole groups, two groups from 32 on."""
    groups = ceil_div(batch, GROUP)
    return GROUP * (groups if groups < 4 else groups - groups % 2)


def _deepest(product: GemmBytes, vectors: int, sharers: int, cluster: int) -> GemmBytes | None:
    """With the deepest rings that fit, and two sets of registers if they do; None for a cut that
    the product cannot have."""
    for sets in (2, 1):
        for weights, activations in RINGS:
            try:
                rings = weights, activations
                cut = BytesCut(ROW_GROUPS, vectors, *rings, sharers, sets, cluster)
                return replace(product, cut=cut)
            except PtxgenError:
                continue
    return None
