"""How a warp's weights lie in shared memory on their way to its registers.

A stage holds 32 neighbouring units (a lane takes one) of every row that the warp works on. Items of
4 bytes and more are *wide*: copied plane by plane, up to 16 bytes a lane. Smaller items (scales,
factors) are *narrow*: those of all planes and rows are one run of pieces, copied a piece a lane.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from urdir.ptxgen.formats import Plane
from urdir.ptxgen.layout import Layout
from urdir.ptxgen.spec import ceil_div

LANES = 32


@dataclass(frozen=True, slots=True)
class Wide:
    """A plane of wide items: ``chunks`` copies of ``width`` bytes a lane for 32 units of a row.

    ``offset``: its first row's place in a stage; rows follow each other.
    """

    plane: Plane
    offset: int
    width: int
    chunks: int

    @property
    def row_nbytes(self) -> int:
        """Bytes of a row's 32 units."""
        return LANES * self.plane.nbytes

    @property
    def swizzle(self) -> int:
        """Chunk c of a row lies at place ``c ^ (c >> 3 & swizzle)``.

        Lanes that read the q-th 16 bytes of their units then find them in different banks.
        """
        return min(self.chunks, 4) - 1


@dataclass(frozen=True, slots=True)
class Run:
    """``count`` pieces from number ``first`` on: 32 units of one plane of one row."""

    plane: Plane
    matrix: int
    row: int
    first: int
    count: int


@dataclass(frozen=True)
class Stage:
    """32 units of ``rows`` rows of each of ``matrices`` matrices of one layout, for one warp."""

    layout: Layout
    rows: int
    matrices: int

    @property
    def all_rows(self) -> int:
        """Rows of all matrices."""
        return self.rows * self.matrices

    @cached_property
    def wide(self) -> tuple[Wide, ...]:
        """The planes of wide items, one behind the other."""
        found: list[Wide] = []
        offset = 0
        for plane in self.layout.format.planes:
            if plane.nbytes >= 4 and plane.units == 1:
                width = min(16, plane.nbytes)
                found.append(Wide(plane, offset, width, plane.nbytes // width))
                offset += self.all_rows * found[-1].row_nbytes
        return tuple(found)

    @property
    def narrow_offset(self) -> int:
        """Where the narrow items begin."""
        return sum(self.all_rows * wide.row_nbytes for wide in self.wide)

    @property
    def narrow_planes(self) -> tuple[Plane, ...]:
        """The planes that are not wide."""
        wide = [w.plane for w in self.wide]
        return tuple(p for p in self.layout.format.planes if p not in wide)

    @property
    def piece(self) -> int:
        """Bytes of a piece: 4 (what cp.async takes at least), 2 where rows are not aligned so."""
        aligned = all(self.layout.row_nbytes(p) % 4 == 0 for p in self.narrow_planes)
        return 4 if aligned else 2

    def pieces_of(self, plane: Plane, units: int = LANES) -> int:
        """Pieces of that many units of a row."""
        return units // plane.units * plane.nbytes // self.piece

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """All pieces of a stage."""
        found: list[Run] = []
        first = 0
        for plane in self.narrow_planes:
            count = self.pieces_of(plane)
            for matrix in range(self.matrices):
                for row in range(self.rows):
                    found.append(Run(plane, matrix, row, first, count))
                    first += count
        return tuple(found)

    @property
    def pieces(self) -> int:
        """How many there are."""
        return sum(run.count for run in self.runs)

    @property
    def copies(self) -> int:
        """Copies of pieces that a lane makes for a stage."""
        return ceil_div(self.pieces, LANES)

    def runs_of(self, copy: int) -> Iterator[Run]:
        """The runs that lanes 0 to 31 meet in their ``copy``-th copy."""
        low, high = LANES * copy, LANES * (copy + 1)
        return (run for run in self.runs if run.first < high and run.first + run.count > low)

    def offset_of(self, plane: Plane) -> int:
        """Where a narrow plane's first row begins in a stage."""
        first = next(run.first for run in self.runs if run.plane is plane)
        return self.narrow_offset + self.piece * first

    @property
    def nbytes(self) -> int:
        """Bytes of a stage, in whole 16."""
        return ceil_div(self.narrow_offset + self.piece * self.pieces, 16) * 16
