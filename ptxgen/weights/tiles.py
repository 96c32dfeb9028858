"""How tiles of weights lie in a warp's shared memory, made for tensor cores.

A tile (`layout`) is one run of bytes in global memory. In shared memory it is the same, but that
the 16-byte pieces of quants change places in a row. Lane (g, t) = (lane / 4, lane % 4) reads units
2t and 2t + 1 of rows g and g + 8; or of these rows unit after unit, its quads of each, and the
scales of units t and 4 + t.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from urdir.ptxgen.weights.fields import Part as Number
from urdir.ptxgen.weights.fields import Plane
from urdir.ptxgen.weights.formats import Format
from urdir.ptxgen.weights.grids import parts
from urdir.ptxgen.weights.halves import Halves
from urdir.ptxgen.weights.layout import TILE_ROWS, TILE_UNITS, Layout

#: Bytes that a lane, and that a warp copies at a time.
PIECE, WARP_PIECE = 16, 512


@dataclass(frozen=True, slots=True)
class Quads:
    """Where a lane finds its two quads (4 neighbouring quants each) of a unit's part.

    Lane t of the four that share a row takes quads 2t and 2t + 1, or t and t + 4 of a type with two
    groups a unit: those of group 0, then those of group 1. Quad (t, e) lies at bit
    ``t0 * lane_strides[0] + t1 * lane_strides[1] + e * stride`` of the item, t0 and t1 being the
    digits of t.
    """

    plane: Plane
    part: Number
    lane_strides: tuple[int, int]
    stride: int

    @staticmethod
    def of(fmt: Format) -> tuple[Quads, ...]:
        """Of every part of the type's quants."""
        found = []
        for plane, part in fmt.parts("q"):
            first, second, third = part.target.strides[2:]
            lanes, e = (
                ((first, second), third) if fmt.unit_groups == 2 else ((second, third), first)
            )
            found.append(Quads(plane, part, lanes, e))
        return tuple(found)

    @property
    def lane_bytes(self) -> tuple[int, int]:
        """Bytes from the item's first to the lane's word, for each digit of t."""
        first, second = (s // 8 if s >= 32 else 0 for s in self.lane_strides)
        return first, second

    @property
    def lane_shifts(self) -> tuple[int, int]:
        """Bits from the word's lowest to the lane's quad, for each digit of t."""
        first, second = (s if s < 32 else 0 for s in self.lane_strides)
        return first, second

    @property
    def shifts_vary(self) -> bool:
        """Whether lanes shift by numbers of their own, before they take a word's quads apart."""
        return any(self.lane_shifts)

    @property
    def is_matrix(self) -> bool:
        """Whether items are the rows of ``ldmatrix``: four words, number t for lane t."""
        return self.plane.nbytes == PIECE and self.lane_strides == (32, 64)


@dataclass(frozen=True, slots=True)
class Run:
    """A tile's bytes of one plane, from ``offset`` on in the tile; ``plain``: pieces keep their
    places."""

    plane: Plane
    offset: int
    plain: bool = False

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
        """Copies of the whole warp; 0 if it is smaller, and others follow it in the same one."""
        return self.nbytes // WARP_PIECE

    @property
    def chunks(self) -> int:
        """Pieces of a unit; 0 if it is smaller than one."""
        return self.plane.nbytes // PIECE if self.plane.units == 1 else 0

    @property
    def swizzle(self) -> tuple[int, ...]:
        """What is added (xor) to a piece's number for each digit of its row's, from the lowest.

        Eight lanes find what they read at a time in different banks: every other unit's piece of
        each of two rows, or those of one unit of four or eight rows.
        """
        return () if self.plain else {1: (1, 2, 4), 2: (2, 4), 4: (4,)}.get(self.chunks, ())

    @property
    def swizzle_by_piece(self) -> int:
        """What is added of the piece's number divided by eight: a mask."""
        return {2: 1, 4: 3}.get(self.chunks, 0)

    def place(self, piece: int, row: int) -> int:
        """Where in its row piece number ``piece`` lies."""
        piece ^= piece >> 3 & self.swizzle_by_piece
        for digit, added in enumerate(self.swizzle):
            piece ^= added * (row >> digit & 1)
        return piece

    @property
    def odd_copies(self) -> int:
        """What is added to the pieces' numbers in every other copy of the warp."""
        rows = WARP_PIECE // self.row_nbytes
        return self.swizzle[rows.bit_length() - 1]


@dataclass(frozen=True)
class Tile:
    """The tiles of a matrix of that layout; as ``halves`` (`weights/_halves.j2`) all pieces keep
    their places, and the powers of a tile's rows follow it, if they are needed."""

    layout: Layout
    as_halves: bool = False

    @property
    def format(self) -> Format:
        """The type of the weights."""
        return self.layout.format

    @property
    def halves(self) -> Halves:
        """How quants become halves."""
        return Halves(self.format)

    def second_row(self, plane: Plane) -> int:
        """Bytes from an item of a plane to that eight rows below."""
        return 8 * Run(plane, 0).row_nbytes

    @property
    def exact(self) -> bool:
        """Whether weights as halves lack only a factor of their row, if the type has one."""
        return self.as_halves and self.halves.factors_are_exact

    @property
    def rows_apart(self) -> bool:
        """Whether that factor, the same in every tile of the row, stays in global memory and
        multiplies sums."""
        return self.exact and self.format.has_singles

    @property
    def has_powers(self) -> bool:
        """Whether weights as halves are as many times what they should be as their row's power
        says."""
        return self.as_halves and not self.exact

    @property
    def nbytes(self) -> int:
        """Bytes of a tile in shared memory."""
        return self.copied_nbytes + (4 * TILE_ROWS if self.has_powers else 0)

    @property
    def copied_nbytes(self) -> int:
        """Bytes of its planes there."""
        return sum(run.nbytes for run in self.runs)

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """A run of each plane."""
        at = self.layout.offsets
        return tuple(
            Run(plane, at[plane.name], self.as_halves)
            for plane in self.format.tile_planes
            if not self.rows_apart or plane is not self.format.factors
        )

    @cached_property
    def quads(self) -> tuple[tuple[Run, Quads], ...]:
        """The runs of quants, with where a lane finds its own; none of types with a codebook."""
        if self.format.grid:
            return ()
        runs = {run.plane.name: run for run in self.runs}
        return tuple((runs[q.plane.name], q) for q in Quads.of(self.layout.format))

    @cached_property
    def grid_runs(self) -> tuple[Run, ...]:
        """The runs of indices, the first one, and of signs of types with a codebook."""
        return tuple(
            run for run in self.runs if run.plane.name in ("index", "signs", "upper", "highest")
        )

    @property
    def has_words(self) -> bool:
        """Whether a lane loads words of several quads for one unit at a time, or shifts them."""
        return any(
            quads.part.source.width < 8
            and (quads.shifts_vary or (run.chunks > 0 and not quads.is_matrix))
            for run, quads in self.quads
        )

    @cached_property
    def other_runs(self) -> tuple[Run, ...]:
        """The runs of scales and factors."""
        if self.format.grid:
            needed = [p for n in ("step", "d") for p, _ in parts(self.format.stored, n)]
            return tuple(run for run in self.runs if run.plane in needed)
        return tuple(run for run in self.runs if run not in [quads for quads, _ in self.quads])

    @property
    def alignment(self) -> int:
        """What the address of a tile must be a multiple of, if it is read by quads or as halves."""
        if self.as_halves:
            return PIECE
        return max(run.row_nbytes for run in self.runs if run.chunks or run is self.runs[0])

    @property
    def rest(self) -> int:
        """Where in the tile the runs begin that are smaller than a copy: they are the last ones."""
        return sum(run.nbytes for run in self.runs if run.copies)

    @property
    def rest_pieces(self) -> int:
        """Pieces of these runs."""
        return (self.copied_nbytes - self.rest) // PIECE

    @property
    def has_plain_pieces(self) -> bool:
        """Whether pieces of some runs keep their order."""
        return not all(run.swizzle for run in self.runs)
