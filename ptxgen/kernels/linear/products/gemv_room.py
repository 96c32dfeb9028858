"""What the CTAs of `Gemv` have room for: in the registers of a thread, and in shared memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

from urdir.ptxgen.kernels.linear.cut import WARPS, Cut, Footprint
from urdir.ptxgen.kernels.linear.prologue.sum import OTHER_REGISTERS, DeferredAdd
from urdir.ptxgen.kernels.linear.steps import Prologue, find
from urdir.ptxgen.spec import ceil_div
from urdir.ptxgen.weights.formats import Format
from urdir.ptxgen.weights.grids import ENTRIES, FIELDS_ENTRIES, SharedGrids, entries_nbytes
from urdir.ptxgen.weights.layout import TILE_COLS, TILE_ROWS, TILE_UNITS, Layout

#: With fewer warps `GemvF32` is faster: each warp has too many activations to round.
LEAST_WARPS = 4
#: Registers of a thread, at most: with more, older assemblers' code spills.
MAX_REGISTERS = 170
#: Entries of a codebook in shared memory at most, several copies of each (`Grid.kept`): look-ups of
#: 256 or 512 bind a product (model/measure/FINDINGS.md).
GRID_ENTRIES = 8192
#: The most slots of a ring beside a codebook, in a `Gemv`. With more the next launch starts with
#: more tiles left, and stores its entries while this one looks up. On an H200 8B IQ3_XXS decodes at
#: 873 tokens/s with three, at 845 with four, IQ2_XS at 979 with three, at 958 with four to six;
#: with two 865 and 955.
GRID_SLOTS = 3
#: Bytes of a unit's activations in shared memory: see templates/linear/products/_tile_x.j2.
RECORD_NBYTES = {"f32": 144, "i16": 80, "f16": 128}
#: Bytes that warps leave for partial sums beside f16 activations or `Grid.fields`, which are large.
LEAST_PARTIALS_NBYTES = 4096

Activations = Literal["f32", "i16", "f16"]


def has_room(
    formats: Iterable[Format],
    cols: int,
    activations: Activations,
    shared: int,
    prologue: Sequence[Prologue] = (),
    cluster: int = 1,
) -> bool:
    """Whether ``shared`` bytes of shared memory have room for the activations and the tiles of
    enough warps, and these warps have registers for the activations and what the steps of the
    ``prologue`` hold.

    Each CTA of a ``cluster`` has a part of the columns, which allows neither a norm that must be
    complete first nor a deferred add.
    """
    if cluster > 1 and any(step.warp_sums for step in prologue):
        return False
    warps = footprint(formats, cols, cluster, activations, shared).most_warps(shared)
    held = _registers(cols, cluster, prologue, warps)
    return warps >= LEAST_WARPS and held <= most_registers(warps)


def _registers(cols: int, cluster: int, prologue: Sequence[Prologue], warps: int) -> int:
    """Registers of a thread for the activations and what the steps hold."""
    add = find(prologue, DeferredAdd)
    if add is not None:
        vectors, others = 2 + max(step.vectors for step in prologue), add.registers
    else:
        vectors, others = 1 + sum(step.held_vectors for step in prologue), 16
    return _of_vectors(vectors, cols, cluster, warps) + others


def _of_vectors(count: int, cols: int, cluster: int, warps: int) -> int:
    """Registers of a thread for its values of vectors."""
    return 8 * count * ceil_div(ceil_div(cols, TILE_COLS), cluster * warps)


def has_room_ahead(cols: int, cut: Cut, prologue: Sequence[Prologue], tile: int) -> bool:
    """Whether a thread has ``tile`` registers for a tile while it has the activations and what the
    steps load."""
    vectors = 1 + sum(step.vectors for step in prologue)
    held = _of_vectors(vectors, cols, cut.columns.cluster, cut.warps) + 16 + tile
    return held <= most_registers(cut.warps)


def has_room_for_norm(cut: Cut, prologue: Sequence[Prologue]) -> bool:
    """Whether a thread has registers for the norm's weights beside those of a deferred add."""
    vectors = 2 + sum(step.vectors for step in prologue)
    registers = 8 * vectors * cut.lane_blocks + OTHER_REGISTERS
    return registers <= most_registers(2 * ceil_div(cut.warps, 2))


def most_registers(warps: int) -> int:
    """Registers of a thread, at most, if an SM has room for two CTAs of this many warps."""
    return min(MAX_REGISTERS, 1024 // warps)


def footprint(
    formats: Iterable[Format],
    cols: int,
    cluster: int,
    activations: Activations,
    shared: int,
) -> Footprint:
    """Each CTA has the activations of its blocks, and of codebooks the most for which all warps
    have room beside these: `Grid.fields` if all types may have them, `GRID_ENTRIES`, or the
    least."""
    cta_blocks = ceil_div(ceil_div(cols, TILE_COLS), cluster)
    formats = tuple(formats)
    room = Footprint(
        tile=max(Layout(fmt, 1, cols).tile_nbytes for fmt in formats),
        sums=4 * TILE_ROWS,
        warp_squares=4,
        activations=RECORD_NBYTES[activations] * TILE_UNITS * cta_blocks,
    )
    if activations == "f16":
        return replace(room, least_partials=LEAST_PARTIALS_NBYTES)
    if activations == "f32":
        return room
    least, most = (
        replace(room, tables=entries_nbytes(formats, entries))
        for entries in (ENTRIES, GRID_ENTRIES)
    )
    if all(fmt.grid is not None and fmt.grid.has_fields(FIELDS_ENTRIES) for fmt in formats):
        fields = entries_nbytes(formats, FIELDS_ENTRIES)
        most = replace(room, tables=fields, least_partials=LEAST_PARTIALS_NBYTES)
    return most if most.most_warps(shared) == WARPS else least


def codebooks(
    formats: tuple[Format, ...],
    cols: int,
    cluster: int,
    activations: Activations,
    shared: int,
    others: int,
) -> SharedGrids:
    """Those that `footprint` gives shared memory, after ``others`` bytes."""
    if activations != "i16":
        return SharedGrids((), others)
    tables = footprint(formats, cols, cluster, activations, shared).tables
    given = (ENTRIES, GRID_ENTRIES, FIELDS_ENTRIES)
    entries = next(n for n in given if tables <= entries_nbytes(formats, n))
    return SharedGrids.of(formats, others, entries)
