"""Conversion of quants to f16: two of a quad (four neighbouring quants) at a time, by masks only.

The bits of a small integer, read as an f16, are a subnormal number: 2^-24 times the integer. So a
mask makes two f16 numbers of a 32-bit word with one quant in each byte: of bytes 0 and 2, or, after
a shift, of bytes 1 and 3. Quants in the upper halves of bytes stay there (``lift``), within the ten
bits of a subnormal number. Quants whose bits are in two planes become bytes first.

Of floats of four bits a sign and three other bits are those of an f16 that is 2^-14 times as large:
its sign, the lower bits of its exponent, and the first one of its fraction.

Tables of numbers of two bytes are looked up as f16 numbers, 2^-24 times as large and rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from urdir.ptxgen.weights.fields import Plane
from urdir.ptxgen.weights.format import E2M1, UNIT, Format
from urdir.ptxgen.weights.packed_few import Order

#: Quads of a unit, and of half a unit, converted together.
QUADS = UNIT // 4


@dataclass(frozen=True, slots=True)
class Move:
    """Bits of a word of a plane's item: shifted left by ``distance`` (or right), then masked."""

    plane: Plane
    word: int
    distance: int
    mask: int


@dataclass(frozen=True, slots=True)
class Halves:
    """Conversion of a type's quants to f16, for templates."""

    format: Format

    def lift(self, quad: int) -> int:
        """How far left the quants of a quad stay."""
        if self.format.table or self.have_bytes:
            return 0
        _, part = next(self.format.parts("q"))
        return 4 if part.target.position(4 * quad) % 8 >= 4 else 0

    @property
    def lifts(self) -> tuple[int, ...]:
        """All distinct lifts."""
        return tuple(sorted({self.lift(quad) for quad in range(QUADS)}))

    @property
    def have_bytes(self) -> bool:
        """Whether the quants of a quad become bytes first: those whose bits are in two planes. Both
        pairs of f16 values then come from one word."""
        return len(list(self.format.parts("q"))) == 2 and not self.format.table

    @property
    def are_e2m1(self) -> bool:
        """Whether quants are codes of floats of four bits: their bits are those of f16 numbers."""
        return self.format.table == E2M1

    @property
    def are_floats(self) -> bool:
        """Whether quants become f16 numbers with a sign, from which nothing is subtracted."""
        return self.are_e2m1 or self.format.digits == 2

    def table_bytes(self, number: int) -> tuple[int, ...]:
        """Byte ``number`` of a table's values as f16 numbers."""
        halves = (np.array(self.format.table) * 2.0**-24).astype(np.float16)
        return tuple((halves.view(np.uint16) >> np.uint16(8 * number) & 255).tolist())

    @property
    def factors_are_exact(self) -> bool:
        """Whether an f16 number holds a quant times its group's factor: floats of four bits, and
        factors of eight. What else multiplies them is the same in a row."""
        fmt = self.format
        of_rows = fmt.of_rows or not fmt.has_singles
        return self.are_e2m1 and fmt.has_e4m3_factors and of_rows

    @property
    def pay_early(self) -> bool:
        """Whether products of two vectors are faster with packed ones than with f32 ones."""
        return self.factors_are_exact or self.format.arithmetic == "e4m3"

    @property
    def raised(self) -> int:
        """By what power of two f16 quants are more than 2^-24 times what the table says."""
        return 9 if self.are_e2m1 else 0

    @property
    def mask(self) -> int:
        """The bits of two quants as f16, not lifted."""
        bits = sum(part.source.width for _, part in self.format.parts("q"))
        return ((1 << bits) - 1) * 0x00010001

    def bytes_of(self, quad: int) -> Iterator[Move]:
        """The moves of a quad's bits from each plane to their places in bytes. Only the bits in the
        mask belong to the quad."""
        for plane, part in self.format.parts("q"):
            word, position = divmod(part.target.position(4 * quad), 32)
            mask = (part.source.mask << part.shift) * 0x01010101
            yield Move(plane, word, part.shift - position, mask)

    def group(self, quad: int) -> int:
        """The group of a unit that a quad belongs to."""
        return 4 * quad // self.format.group

    def moves(self, quad: int, odd: int) -> Iterator[Move]:
        """The moves for a quad's quants 0 and 2, or (``odd`` 1) for 1 and 3."""
        lift = self.lift(quad)
        for plane, part in self.format.parts("q"):
            word, position = divmod(part.target.position(4 * quad), 32)
            up = part.shift + lift
            mask = (part.source.mask << up) * 0x00010001
            yield Move(plane, word, up - position - 8 * odd, mask)

    @property
    def stay_whole(self) -> bool:
        """Whether few vectors are multiplied by the quants unchanged, and the products by scales:
        for half-bytes, with a minimum and a scale, or a factor, per unit. That takes 235
        instructions for a tile of Q4_K, 281 if each weight is computed. And for floats of eight
        bits, whose factors are those of whole units."""
        fmt = self.format
        if fmt.arithmetic == "e4m3":
            return True
        widths = [part.source.width for _, part in fmt.parts("q")]
        numbers = fmt.has("minimum") and fmt.unit_groups == 1
        return numbers and widths == [4] and not fmt.table

    @property
    def order(self) -> Order:
        """The order of few packed vectors for such weights."""
        return "units" if self.stay_whole else "lanes"

    @property
    def offset(self) -> int:
        """The offset of stored quants."""
        return self.format.bias

    def loaded(self, plane: Plane, half: int) -> tuple[int, int]:
        """The words of an item, first and count, that are loaded for half a unit. Items of up to 16
        bytes are loaded with the first half for both."""
        words = plane.nbytes // 4
        if words <= 4:
            return (0, 0 if half else words)
        return half * words // 2, words // 2

    @property
    def roundings(self) -> int:
        """Number of roundings of a weight and its factors: it, its scale and its minimum if they
        are products; with a minimum, both are larger than the weight. What a table of two digits
        says is rounded, and so is its factor, an f32 number."""
        fmt = self.format
        if fmt.is_float:
            return 1 if fmt.has_powers else 0
        if fmt.digits == 2:
            return 3
        return 1 + fmt.has("scale") + 2 * fmt.has_minimums

    @property
    def skew(self) -> int:
        """Bytes between a tile and the one below it in shared memory, so that lanes of a load use
        different banks: tiles of even and of odd rows (`weights/_halves.j2`) are separated by half
        of the span of four of its lanes and two rows."""
        item = self.format.tile_planes[0].nbytes
        return {4: 16, 8: 32, 16: 64}.get(item, 16)
