"""A matrix of a ``BatchMatvec``: its tiles, and how a warp has a piece of them in shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from urdir.ptxgen.formats import Format, Part, Plane
from urdir.ptxgen.layout import Layout
from urdir.ptxgen.spec import ceil_div

#: Rows of an ``mma`` tile: what a matrix must have at least.
BLOCK_ROWS = 16


@dataclass(frozen=True, slots=True)
class Quads:
    """Where a lane finds its two quads (4 neighbouring quants each) of a unit's part.

    Lane t of the four that share a row takes quads 2t and 2t + 1, or t and t + 4 of a type with two
    groups a unit: those of group 0, then those of group 1. Quad (t, e) lies at bit
    ``t0 * lane_strides[0] + t1 * lane_strides[1] + e * stride`` of the item, t0 and t1 being the
    digits of t.
    """

    plane: Plane
    part: Part
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
    def span(self) -> int:
        """Bytes of an item that the four lanes of a row read together, rounded up to 16."""
        return 32 if self.part.source.width == 8 else 16


@dataclass(frozen=True, slots=True)
class Copy:
    """How a warp copies one plane's items of a stage: 16 rows, ``units`` units of each.

    ``piece`` bytes at a time, ``pieces`` of them a row, ``pitch`` bytes from row to row in shared
    memory, so that eight rows' words at one column are in different banks; ``offset``: the plane's
    first byte in a stage.
    """

    quads: Quads
    units: int
    piece: int
    pitch: int
    offset: int

    @property
    def pieces(self) -> int:
        """Pieces of a row, a power of two up to 32."""
        return self.units * self.quads.plane.nbytes // self.piece

    @property
    def nbytes(self) -> int:
        """Bytes of the plane in a stage, for each block of rows."""
        return BLOCK_ROWS * self.pitch


@dataclass(frozen=True)
class Matrix:
    """One of the matrices of a launch: how its tiles are shared out, and names of registers.

    A tile is ``blocks`` times 16 rows; those of a gated pair are of two matrices. Group g of CTAs
    has tiles ``each * g`` and up.
    """

    number: int
    layout: Layout
    tiles: int
    each: int
    first_tile: int
    first_group: int
    units: int

    @property
    def groups(self) -> int:
        """Groups of CTAs that work on it."""
        return ceil_div(self.tiles, self.each)

    @property
    def rows(self) -> int:
        """Rows of the matrix."""
        return self.layout.rows

    @property
    def suffix(self) -> str:
        """What follows the names of its parameters: nothing for the first one."""
        return str(self.number or "")

    @cached_property
    def copies(self) -> tuple[Copy, ...]:
        """The planes of quants in a stage."""
        copies: list[Copy] = []
        for quads in Quads.of(self.layout.format):
            run = self.units * quads.plane.nbytes
            row = self.layout.row_nbytes(quads.plane)
            piece = next(p for p in (16, 8, 4) if row % p == 0 and run % p == 0)
            pitch = run if run // quads.span % 2 else run + quads.span
            pitch = ceil_div(pitch, 16) * 16
            offset = copies[-1].offset + copies[-1].nbytes if copies else 0
            copies.append(Copy(quads, self.units, piece, pitch, offset))
        return tuple(copies)

    @property
    def unrolled(self) -> int:
        """Units of a stage that are multiplied without a jump: as many as share a load of scales,
        but two at least."""
        return min(self.units, max(2, 16 // self.scale_nbytes))

    @property
    def block_nbytes(self) -> int:
        """Bytes of a stage for each block of rows."""
        return self.copies[-1].offset + self.copies[-1].nbytes

    @property
    def scale_nbytes(self) -> int:
        """Bytes of a row's decoded scales and minimums for a unit, f32."""
        fmt = self.layout.format
        return 4 * fmt.unit_groups * (2 if fmt.has_minimums else 1)

    @property
    def scale_pitch(self) -> int:
        """Bytes from row to row of these: an odd multiple of 16."""
        return 16 * (self.units * self.scale_nbytes // 16 | 1)
