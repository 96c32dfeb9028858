"""How quants become halves: two of a quad (four neighbouring quants) at a time, by masks alone.

The bits of a small integer, read as an f16, are a subnormal number: 2^-24 times the integer. So a
mask makes two f16 numbers of a 32-bit word that has one quant in each of its bytes: of bytes 0 and
2, or, after a shift, of bytes 1 and 3. Quants in the upper halves of bytes stay there (``lift``),
which fits the ten bits of a subnormal number. Quants whose bits are in two planes become bytes
first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from urdir.ptxgen.weights.fields import Plane
from urdir.ptxgen.weights.format import UNIT, Format
from urdir.ptxgen.weights.packed_few import Order

#: Quads of a unit, and of half a unit, for which weights are made together.
QUADS, HALF_QUADS = UNIT // 4, UNIT // 8
#: Codes are looked up as bytes that are larger than their values by so much.
TABLE_OFFSET = 128


@dataclass(frozen=True, slots=True)
class Move:
    """Bits of a word of a plane's item: shifted left by ``distance`` (or right), then masked."""

    plane: Plane
    word: int
    distance: int
    mask: int


@dataclass(frozen=True, slots=True)
class Halves:
    """What the templates ask about a type's quants as halves."""

    format: Format

    def lift(self, quad: int) -> int:
        """How far left the quants of a quad stay."""
        if self.format.table or self.have_bytes:
            return 0
        _, part = next(self.format.parts("q"))
        return 4 if part.target.position(4 * quad) % 8 >= 4 else 0

    @property
    def lifts(self) -> tuple[int, ...]:
        """All that there are."""
        return tuple(sorted({self.lift(quad) for quad in range(QUADS)}))

    @property
    def have_bytes(self) -> bool:
        """Whether the quants of a quad become bytes first: those whose bits are in two planes. Both
        pairs of halves then come of one word."""
        return len(list(self.format.parts("q"))) == 2 and not self.format.table

    @property
    def mask(self) -> int:
        """The bits of two quants that are halves, not lifted."""
        bits = sum(part.source.width for _, part in self.format.parts("q"))
        return ((1 << bits) - 1) * 0x00010001

    def bytes_of(self, quad: int) -> Iterator[Move]:
        """What brings the bits of a quad from each plane to their places in bytes. Only the bits
        that the mask has are the quad's."""
        for plane, part in self.format.parts("q"):
            word, position = divmod(part.target.position(4 * quad), 32)
            mask = (part.source.mask << part.shift) * 0x01010101
            yield Move(plane, word, part.shift - position, mask)

    def group(self, quad: int) -> int:
        """The group of a unit that a quad belongs to."""
        return 4 * quad // self.format.group

    def moves(self, quad: int, odd: int) -> Iterator[Move]:
        """What makes the halves of a quad's quants 0 and 2, or (``odd`` 1) of 1 and 3."""
        lift = self.lift(quad)
        for plane, part in self.format.parts("q"):
            word, position = divmod(part.target.position(4 * quad), 32)
            up = part.shift + lift
            mask = (part.source.mask << up) * 0x00010001
            yield Move(plane, word, up - position - 8 * odd, mask)

    @property
    def stay_whole(self) -> bool:
        """Whether few vectors are multiplied with the quants as they are, and the products with
        scales: of half-bytes, with a scale and a minimum of each unit. That takes 235 instructions
        for a tile of Q4_K, 281 if each weight is made."""
        fmt = self.format
        widths = [part.source.width for _, part in fmt.parts("q")]
        numbers = fmt.has("scale") and fmt.has("minimum") and fmt.unit_groups == 1
        return numbers and widths == [4] and not fmt.table

    @property
    def order(self) -> Order:
        """That of few packed vectors for such weights."""
        return "units" if self.stay_whole else "lanes"

    @property
    def offset(self) -> int:
        """What a quant is too large by."""
        return TABLE_OFFSET if self.format.table else self.format.offset

    def loaded(self, plane: Plane, half: int) -> tuple[int, int]:
        """The words of an item, first and count, that are loaded for half a unit. What is no more
        than 16 bytes is loaded with the first half for both."""
        words = plane.nbytes // 4
        if words <= 4:
            return (0, 0 if half else words)
        return half * words // 2, words // 2

    @property
    def roundings(self) -> int:
        """How many times a weight and what it is made of are rounded: it, its scale and its minimum
        if they are products; with a minimum, both are larger than the weight."""
        fmt = self.format
        if fmt.is_float:
            return 1 if fmt.has_powers else 0
        return 1 + fmt.has("scale") + 2 * fmt.has_minimums

    @property
    def skew(self) -> int:
        """Bytes between a tile and the one below it in shared memory, so that lanes of a load find
        different banks: tiles of even and of odd rows (`weights/_halves.j2`) are apart by half of
        what four of its lanes and two rows span."""
        item = self.format.planes[0].nbytes
        return {4: 16, 8: 32, 16: 64}.get(item, 16)
