"""Bit fields: positions of numbers in a GGUF block, and the planes that they are moved to."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """The position of an unsigned number of ``width`` <= 8 bits, for every index in a block.

    Bit ``8 * byte + shift`` counts from the block's first byte, least significant bit first. Index
    i lies at ``start`` plus ``strides[k]`` for every set binary digit k of i; it never
    crosses a byte. ``signed``: two's complement, stored with the sign bit flipped when repacked.
    """

    width: int
    start: int
    strides: tuple[int, ...] = ()
    signed: bool = False
    #: The number that is stored as 0 when repacked.
    nan: int | None = dataclasses.field(default=None, repr=False)

    def position(self, index: int) -> int:
        """The bit position of number ``index``."""
        return self.start + sum(s for k, s in enumerate(self.strides) if index >> k & 1)

    @property
    def mask(self) -> int:
        """The field's bits, at shift 0."""
        return (1 << self.width) - 1


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """Bits ``shift`` and up of a number ("q", "scale", "minimum", "d", "m") and their move.

    ``source`` is indexed through a whole block, ``target`` through one item of the plane: the low
    digits of the source's index are the target's, the high ones select the item in the block.
    """

    number: str
    shift: int
    source: Field
    target: Field

    @property
    def count(self) -> int:
        """Numbers of this part in one item of its plane."""
        return 1 << len(self.target.strides)


@dataclasses.dataclass(frozen=True, slots=True)
class Plane:
    """One kind of data in the tiles of a repacked matrix: an item of ``nbytes`` bytes for every
    ``units`` units. ``running``: items of four bytes whose half bytes 0 to 6 are, once parts are
    moved, the exclusive or of themselves and those below."""

    name: str
    units: int
    nbytes: int
    parts: tuple[Part, ...] = ()
    running: bool = False

    @property
    def shares_bytes(self) -> bool:
        """Whether two units share each byte."""
        return self.units == 2 and self.nbytes == 1
