"""What the CTAs of `Gemv` have room for: in the registers of a thread, and in shared memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from urdir.ptxgen.kernels.exchange.gives import SumOfRanks
from urdir.ptxgen.kernels.linear.cut import Footprint
from urdir.ptxgen.kernels.linear.ends import is_first
from urdir.ptxgen.kernels.linear.gate import Gate
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.spec import ceil_div
from urdir.ptxgen.weights.formats import Format
from urdir.ptxgen.weights.layout import TILE_COLS, TILE_ROWS, TILE_UNITS, Layout

#: With fewer warps `GemvF32` is faster: each warp has too many activations to round.
LEAST_WARPS = 4
#: Registers of a thread, at most: with more, older assemblers' code spills.
MAX_REGISTERS = 170
#: Registers of a thread beside the arrays of the stream and of norms, with a margin.
OTHER_REGISTERS = 56
#: Those that words of other ranks take beside.
WORD_REGISTERS = 16
#: Bytes of a unit's activations in shared memory: see templates/linear/_tile_x.j2.
RECORD_NBYTES = {"f32": 144, "i16": 80}

Activations = Literal["f32", "i16"]


def has_room(
    formats: Iterable[Format],
    cols: int,
    activations: Activations,
    shared: int,
    norm: Norm | None = None,
    after: Norm | SumOfRanks | None = None,
    cluster: int = 1,
    gate: Gate | None = None,
) -> bool:
    """Whether ``shared`` bytes of shared memory have room for the activations and the tiles of
    enough warps, and these warps have registers for the activations; for the weights and the bias
    of a norm as well, if it must be complete before the product or is ``after`` a block, and for
    the ``gate``.

    Each CTA of a ``cluster`` has a part of the columns, which allows neither of these norms.
    """
    if cluster > 1 and (after is not None or (norm is not None and is_first(norm))):
        return False
    warps = footprint(formats, cols, cluster, activations).most_warps(shared)
    blocks = ceil_div(ceil_div(cols, TILE_COLS), cluster * warps)
    if after is not None:
        arrays = 2 + max(norm_vectors(after), norm_vectors(norm))
        others = OTHER_REGISTERS + (WORD_REGISTERS if isinstance(after, SumOfRanks) else 0)
        has_registers = 8 * arrays * blocks + others <= most_registers(warps)
    else:
        arrays = 1 + norm_vectors(norm) if norm is not None and is_first(norm) else 1
        arrays += gate is not None
        has_registers = 8 * arrays * blocks + 16 <= most_registers(warps)
    return warps >= LEAST_WARPS and has_registers


def norm_vectors(norm: Norm | SumOfRanks | None) -> int:
    """Vectors that a norm has beside x."""
    return 0 if norm is None else norm.weight + norm.bias


def most_registers(warps: int) -> int:
    """Registers of a thread, at most, if an SM has room for two CTAs of so many warps."""
    return min(MAX_REGISTERS, 1024 // warps)


def footprint(
    formats: Iterable[Format], cols: int, cluster: int, activations: Activations
) -> Footprint:
    """Each CTA has the activations of its blocks."""
    cta_blocks = ceil_div(ceil_div(cols, TILE_COLS), cluster)
    return Footprint(
        tile=max(Layout(fmt, 1, cols).tile_nbytes for fmt in formats),
        sums=4 * TILE_ROWS,
        warp_squares=4,
        activations=RECORD_NBYTES[activations] * TILE_UNITS * cta_blocks,
    )
