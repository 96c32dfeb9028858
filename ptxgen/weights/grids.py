"""Codebooks (ggml's grids) of IQ1, IQ2, IQ3 and TQ1_0, and their weights in registers and numpy.

A weight's level is in an entry of its type's grid: a 32-bit word for eight weights (a code of four
bits each, which `Grid.values` decodes), or for four (a byte each). Of a unit a tile has

- the indices of its entries, their upper bits perhaps in a plane of their own;
- a word of signs: bit 4k + g is the sign of weight k of the eight of group g. Where seven of eight
  are stored, the number of minus signs is even, and nibble 7 has other bits; nibble k then has
  whether that of weights 0 to k is odd (`running_signs`), so that all eight signs are the word's
  nibbles 0 to 6 and the same nibbles one place higher, exclusive or: two operations. IQ1 has in
  their place one bit for a unit or for eight weights: each is an eighth below its level, not above
  it;
- the steps s of its groups: their scales are 2 s + 1.

TQ1_0 has neither signs nor steps: of eight weights the first five are digits to base 3 of a byte,
the others of five bits (`recode`). Both are indices of one table of digits.

Kernels make of these what a type with bytes and scales of eight bits has (`Format.planes`). Source:
ggml's blocks, as the ``gguf`` package's ``quants`` decodes them; its grids are used.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self

import numpy as np
import numpy.typing as npt

from urdir.ptxgen.weights.fields import Part, Plane

#: Entries of a codebook in shared memory, several of each or the 2,048 of IQ1, by default.
ENTRIES = 2048

#: Words of IQ1's with two bits for a weight, 16 copies of each entry (`Grid.fields`).
FIELDS_ENTRIES = 16384
# Where those of eight weights are in an entry.
_FIELD_BITS = (2, 10, 0, 8, 6, 14, 4, 12)

Signs = Literal["seven", "eight", "below", "none"]
Numbers = Literal["index", "rest", "step", "below"]


@dataclass(frozen=True, slots=True)
class Grid:
    """The codebook of the ``gguf`` class ``name``, whose entries are for ``weights`` weights.

    ``values``: what codes stand for, those of minus signs (or of levels below) from 4 on; empty
    where entries have bytes.
    """

    name: str
    weights: int
    signs: Signs
    values: tuple[int, ...] = ()

    @property
    def variable(self) -> str:
        """Its name in PTX."""
        return self.name.lower()

    @property
    def words(self) -> tuple[int, ...]:
        """Its entries."""
        return _words(self.name, 4 if self.values else 8)

    def kept(self, entries: int) -> int:
        """Entries in shared memory, copies included, which may have as many as ``entries``: 16 or
        32 copies of each, else no more than `ENTRIES`; words of `fields`, if it has these.

        Lanes with different copies never wait for each other, but lanes with the same one do: 32
        look-ups take 3.5 wavefronts with one copy, 2.9 with eight, two with 16, one with 32.
        """
        if self.has_fields(entries):
            return FIELDS_ENTRIES
        copies = min(32, entries // len(self.words))
        return len(self.words) * copies if copies >= 16 else ENTRIES

    def copies(self, entries: int) -> int:
        """Copies of an entry side by side."""
        return self.kept(entries) // len(self.words)

    def has_fields(self, entries: int) -> bool:
        """Whether they are `fields`."""
        return self.signs == "below" and entries == FIELDS_ENTRIES

    @property
    def fields(self) -> tuple[int, ...]:
        """Its 2,048 entries as 16 bits each, two in a word, for the address of one (shared memory
        has 16 copies of four, then of the next four): bit 7 of an index and the seven below it
        as a number with a sign choose 256 bytes, bit 10 a half of these, bits 8 and 9 one of four.

        A level, 0, 1 or 2 in place of -1, 0 and 1, has two bits. With the entry a second time from
        bit 18 on, `places` of all bytes are four levels of neighbours.
        """
        words = np.array(self.words, np.uint32)
        levels = words[:, None] >> np.arange(0, 32, 4, dtype=np.uint32) & np.uint32(3)
        places = np.array(_FIELD_BITS, np.uint32)
        halves = (levels << places).sum(axis=1, dtype=np.uint32)
        index = np.arange(2048).reshape(2, 4, 2, 128)  # bit 10, bits 8 and 9, bit 7, the others
        order = index.transpose(2, 3, 0, 1)[::-1].reshape(-1, 2)
        pairs = halves[order]
        return tuple((pairs[:, 0] | pairs[:, 1] << np.uint32(16)).tolist())

    @property
    def places(self) -> tuple[int, ...]:
        """The bits of each byte that have two levels' fields: of four weights, of four others."""
        return (2, 6)

    @property
    def entries(self) -> int:
        """Entries for a unit."""
        return 32 // self.weights

    def weights_of(
        self, index: npt.NDArray[np.uint16], minus: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.int8]:
        """Weights (units, 32) from indices (units, entries), those of the last three digits of
        eight 256 times, and signs or levels below (units, 32)."""
        width, table = 32 // self.weights, np.array(self.words, np.uint32)
        if self.signs == "none":
            words = (table[index & 0xFF] | table[index >> 8] << np.uint32(20))[:, :, None]
        else:
            words = table[index][:, :, None]
        shifts = width * np.arange(self.weights, dtype=np.uint32)
        levels = (words >> shifts & np.uint32((1 << width) - 1)).reshape(len(index), -1)
        if not self.values:
            sizes: npt.NDArray[np.int8] = levels.astype(np.int8)
            return np.where(minus, -sizes, sizes)
        codes = levels + np.uint32(4) * minus
        values: npt.NDArray[np.int8] = np.array(self.values, np.int8)[codes]
        return values


@functools.cache
def _words(name: str, width: int) -> tuple[int, ...]:
    if name == "TQ1_0":
        return tuple(sum(v // 3**n % 3 << 4 * n for n in range(5)) for v in range(256))
    import gguf.quants  # rarely needed

    of: Any = getattr(gguf.quants, name)
    of.init_grid()
    levels = of.grid.reshape(of.grid_shape)
    if width == 4:
        levels = np.searchsorted(np.array(of.grid_map, np.float32), levels)
    shifts = np.uint32(width) * np.arange(of.grid_shape[1], dtype=np.uint32)
    words: npt.NDArray[np.uint32] = (levels.astype(np.uint32) << shifts).sum(1, np.uint32)
    return tuple(words.tolist())


#: Half bytes of a word with seven signs of eight.
SEVEN = 0x0FFFFFFF


def running_signs(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Words whose nibbles 0 to 6 are each the exclusive or of itself and those below; as many."""
    found = words & np.uint32(SEVEN)
    for distance in (4, 8, 16):
        found ^= found << np.uint32(distance)
    running: npt.NDArray[np.uint32] = found & np.uint32(SEVEN) | words & np.uint32(0xF0000000)
    return running


def signs_of(words: npt.NDArray[np.uint32], signs: Signs) -> npt.NDArray[np.bool_]:
    """Whether weights have minus signs, (units, 32), from words (units,) of signs."""
    if signs == "seven":
        words = words & np.uint32(SEVEN) ^ words << np.uint32(4)
    places = 4 * np.arange(8, dtype=np.uint32) + np.arange(4, dtype=np.uint32)[:, None]
    minus: npt.NDArray[np.bool_] = (words[:, None, None] >> places & np.uint32(1)) != 0
    return minus.reshape(len(words), 32)


@dataclass(frozen=True, slots=True)
class Move:
    """Bits of word ``word`` of a plane's items: shifted left by ``distance`` (or right), then
    masked."""

    plane: Plane
    word: int
    distance: int
    mask: int


def moves(
    planes: tuple[Plane, ...], number: Numbers, i: int, unit: int = 0, to: int = 0
) -> Iterator[Move]:
    """The moves of number ``i`` of a unit to bit ``to`` of a word. The items of ``unit`` 1 follow
    those of unit 0, if it has its own."""
    found: dict[tuple[Plane, int, int], int] = {}
    for plane, part in parts(planes, number):
        position = 8 * plane.nbytes * unit if plane.units == 1 else 0
        position += part.target.position(i + (part.count // plane.units) * (unit % plane.units))
        word, at = divmod(position, 32)
        up = to + part.shift
        key = plane, word, up - at
        found[key] = found.get(key, 0) | part.target.mask << up
    for (plane, word, distance), mask in found.items():
        yield Move(plane, word, distance, mask)


def parts(planes: tuple[Plane, ...], number: str) -> Iterator[tuple[Plane, Part]]:
    """The parts of a number, each with its plane."""
    return ((plane, part) for plane in planes for part in plane.parts if part.number == number)


@dataclass(frozen=True, slots=True)
class Upper:
    """The bits of a unit's indices from the eighth on: ``width`` of index i from bit ``start`` +
    i * ``stride`` of a plane's item on. ``paired``: as addresses need them (`Grid.fields`). A byte
    has three bits of two indices, those of the first one at 1, 2 and 7, of the other one at 5, 6
    and 3. Bits 0 and 4 are left: whether levels are below, of a unit or of these two entries."""

    plane: Plane
    start: int
    stride: int
    width: int
    paired: bool


def upper(planes: tuple[Plane, ...]) -> Upper | None:
    """Those of a type with these planes, if it has any."""
    found = [(plane, part) for plane, part in parts(planes, "index") if part.shift]
    if not found:
        return None
    (plane, first), width = found[0], sum(part.target.width for _, part in found)
    paired = any(stride < 0 for _, part in found for stride in part.target.strides)
    return Upper(plane, first.target.start, first.target.strides[0], width, paired)


class HasGrid(Protocol):
    """A type, perhaps with a codebook."""

    @property
    def grid(self) -> Grid | None:
        """The codebook, if there is one."""


def entries_nbytes(formats: Iterable[HasGrid], entries: int = ENTRIES) -> int:
    """Bytes of all that is kept of the different codebooks of these types (`Grid.kept`)."""
    return 4 * sum(grid.kept(entries) for grid in {fmt.grid for fmt in formats} if grid)


@dataclass(frozen=True, slots=True)
class SharedGrids:
    """The codebooks of ``formats`` in a CTA's shared memory, after ``others`` bytes: up to
    ``entries`` of each (`Grid.kept`). Values of codes may be ``biased``."""

    formats: tuple[HasGrid, ...]
    others: int
    entries: int = ENTRIES
    biased: bool = False

    @classmethod
    def of(cls, formats: Iterable[HasGrid], *fields: Any, **named: Any) -> Self:
        """Those of the types that have one."""
        return cls(tuple(fmt for fmt in formats if fmt.grid), *fields, **named)

    @property
    def has_fields(self) -> bool:
        """Whether entries have two bits for a weight (`Grid.fields`)."""
        return any(fmt.grid and fmt.grid.has_fields(self.entries) for fmt in self.formats)

    @property
    def at(self) -> int:
        """Where they begin."""
        return self.others + 15 & -16

    @property
    def end(self) -> int:
        """Bytes of all shared memory."""
        nbytes = entries_nbytes(self.formats, self.entries)
        return self.at + nbytes if self.formats else self.others


def recode(blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Blocks of TQ1_0 (count, bytes) in the order of weights, as many bytes: a byte for five of
    each eight weights, four bits for the other three, one more bit for these, ``d``.

    In GGUF the digits of 32 bytes are weights 0 ... 159, of 16 bytes 80 more, of 4 bytes the last
    16: first digits of all, then second ones. A byte is a fraction of 256.
    """
    powers = np.array([1, 3, 9, 27, 81], np.uint8)

    def digits(part: npt.NDArray[np.uint8], count: int) -> npt.NDArray[np.uint16]:
        fractions = part[:, None, :] * powers[:count, None]
        found: npt.NDArray[np.uint16] = fractions.astype(np.uint16) * np.uint16(3) >> np.uint16(8)
        return found.reshape(len(part), -1)

    first, middle, last, d = np.hsplit(blocks, [32, 48, 52])
    eights = np.hstack([digits(first, 5), digits(middle, 5), digits(last, 4)])
    eights = eights.reshape(len(blocks), 32, 8) * powers.astype(np.uint16)[[0, 1, 2, 3, 4, 0, 1, 2]]
    five, three = eights[:, :, :5].sum(axis=2), eights[:, :, 5:].sum(axis=2)
    nibbles = (three[:, ::2] & 15 | (three[:, 1::2] & 15) << 4).astype(np.uint8)
    highest = np.packbits((three >> 4).astype(np.uint8), axis=1, bitorder="little")
    return np.hstack([five.astype(np.uint8), nibbles, highest, d])
