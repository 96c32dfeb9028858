"""How tiles of weights lie in a warp's shared memory, made for tensor cores.

A tile (`layout`) is one run of bytes in each plane, and so it is in shared memory, plane after
plane. Lane (g, t) = (lane / 4, lane % 4) reads units t and 4 + t of rows g and g + 8.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from urdir.ptxgen.formats import Plane
from urdir.ptxgen.layout import TILE_ROWS, TILE_UNITS, Layout
from urdir.ptxgen.spec import ceil_div

#: Bytes that a lane, and that a warp copies at a time.
PIECE, WARP_PIECE = 16, 512


@dataclass(frozen=True, slots=True)
class Run:
    """A tile's bytes of one plane, from ``offset`` on in shared memory.

    ``first`` counts the pieces of runs that do not fill a warp's copy; these runs share copies.
    """

    plane: Plane
    offset: int
    first: int

    @property
    def nbytes(self) -> int:
        """Bytes of the run, a multiple of `PIECE`."""
        return TILE_ROWS * self.row_nbytes

    @property
    def row_nbytes(self) -> int:
        """Bytes of a tile's row."""
        return TILE_UNITS // self.plane.units * self.plane.nbytes

    @property
    def copies(self) -> int:
        """Copies of the whole warp; 0 if it shares one."""
        return self.nbytes // WARP_PIECE

    @property
    def pieces(self) -> int:
        """Pieces of a shared copy."""
        return 0 if self.copies else self.nbytes // PIECE

    @property
    def chunks(self) -> int:
        """Pieces of a unit; 0 if it is smaller than one."""
        return self.plane.nbytes // PIECE if self.plane.units == 1 else 0

    @property
    def swizzle(self) -> tuple[int, int]:
        """What is added (xor) to a piece's number in an odd row, and where bit 3 of it is set.

        Eight lanes that read a piece each at a time, of two rows, find them in different banks.
        """
        return {1: (4, 0), 2: (1, 0), 4: (2, 1)}.get(self.chunks, (0, 0))


@dataclass(frozen=True)
class Tile:
    """The tiles of a matrix of that layout."""

    layout: Layout

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """A run of each plane."""
        runs: list[Run] = []
        offset = first = 0
        for plane in self.layout.format.planes:
            runs.append(Run(plane, offset, first))
            offset += runs[-1].nbytes
            first += runs[-1].pieces
        return tuple(runs)

    @property
    def nbytes(self) -> int:
        """Bytes of a tile."""
        return sum(run.nbytes for run in self.runs)

    @property
    def pieces(self) -> int:
        """Pieces of all shared copies."""
        return sum(run.pieces for run in self.runs)

    @property
    def shared_copies(self) -> int:
        """Copies that runs share."""
        return ceil_div(self.pieces, WARP_PIECE // PIECE)

    def shared_by(self, copy: int) -> Iterator[Run]:
        """The runs that lanes 0 to 31 meet in such a copy."""
        low, high = 32 * copy, 32 * (copy + 1)
        return (r for r in self.runs if r.pieces and r.first < high and r.first + r.pieces > low)
