"""How tiles of weights lie in a warp's shared memory, made for tensor cores.

A tile is 16 rows x 8 units (256 columns) of a matrix. Lane (g, t) = (lane / 4,
lane % 4) reads units t and 4 + t of rows g and g + 8. Items of 4 bytes and more are *wide*: whole
units, up to 16 bytes a lane. Smaller items (scales, factors) are *narrow*: copied in words.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from urdir.ptxgen.formats import Plane
from urdir.ptxgen.layout import Layout
from urdir.ptxgen.spec import ceil_div

LANES = 32
#: Rows of a tile, units of one of its rows.
ROWS, UNITS = 16, 8


@dataclass(frozen=True, slots=True)
class Wide:
    """A plane of wide items: ``width`` bytes a lane at a time, ``chunks`` of them a unit."""

    plane: Plane
    offset: int
    width: int
    chunks: int

    @property
    def row_nbytes(self) -> int:
        """Bytes of a tile's row."""
        return UNITS * self.plane.nbytes

    @property
    def row_lanes(self) -> int:
        """Lanes that copy a row together."""
        return self.row_nbytes // self.width

    @property
    def copy_rows(self) -> int:
        """Rows that a warp copies at a time."""
        return LANES // self.row_lanes

    @property
    def swizzle(self) -> int:
        """Chunk c of an odd row lies at place ``c ^ swizzle``.

        The eight lanes that read 16 bytes each at a time, of two rows, find them in different banks.
        """
        return {(16, 1): 4, (16, 2): 1}.get((self.width, self.chunks), 0)


@dataclass(frozen=True, slots=True)
class Narrow:
    """A plane of narrow items: ``words`` of 4 bytes hold those of a tile's row.

    Where these are 2 bytes, the word has another tile's as well: `halves`.
    """

    plane: Plane
    offset: int
    first: int

    @property
    def item_nbytes(self) -> int:
        """Bytes of a row's items."""
        return UNITS // self.plane.units * self.plane.nbytes

    @property
    def halves(self) -> bool:
        """Whether a word holds the items of two tiles."""
        return self.item_nbytes == 2

    @property
    def words(self) -> int:
        """Words of a row."""
        return max(1, self.item_nbytes // 4)


@dataclass(frozen=True)
class Tile:
    """A tile of a matrix of that layout."""

    layout: Layout

    @cached_property
    def wide(self) -> tuple[Wide, ...]:
        """The planes of wide items."""
        found: list[Wide] = []
        offset = 0
        for plane in self.layout.format.planes:
            if plane.nbytes >= 4 and plane.units == 1:
                width = min(16, plane.nbytes)
                found.append(Wide(plane, offset, width, plane.nbytes // width))
                offset += ROWS * found[-1].row_nbytes
        return tuple(found)

    @cached_property
    def narrow(self) -> tuple[Narrow, ...]:
        """The other planes."""
        wide = [w.plane for w in self.wide]
        found: list[Narrow] = []
        base, words = sum(ROWS * w.row_nbytes for w in self.wide), 0
        for plane in self.layout.format.planes:
            if plane not in wide:
                found.append(Narrow(plane, base + 4 * words, words))
                words += ROWS * found[-1].words
        return tuple(found)

    @property
    def words(self) -> int:
        """Words of all narrow planes."""
        return sum(ROWS * n.words for n in self.narrow)

    @property
    def copies(self) -> int:
        """Copies of words that a lane makes."""
        return ceil_div(self.words, LANES)

    def narrow_of(self, copy: int) -> tuple[Narrow, ...]:
        """The planes that lanes 0 to 31 meet in their ``copy``-th copy."""
        low, high = LANES * copy, LANES * (copy + 1)
        return tuple(n for n in self.narrow if n.first < high and n.first + ROWS * n.words > low)

    @property
    def nbytes(self) -> int:
        """Bytes of a tile, in whole 16."""
        return ceil_div(sum(ROWS * w.row_nbytes for w in self.wide) + 4 * self.words, 16) * 16
