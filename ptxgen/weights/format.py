"""Description of a tensor type: `Format`; ``formats`` has one for each type."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterator
from typing import Literal

from urdir.ptxgen.weights.fields import Part, Plane
from urdir.ptxgen.weights.grids import Grid, Move, Numbers, Upper, moves, upper
from urdir.ptxgen.weights.numbers import GroupNumbers, Number

Arithmetic = Literal["integers", "floats", "e4m3"]

#: Weights of a *unit*: consecutive weights of a row that one thread handles at a time.
UNIT = 32
#: Floats of four bits (OCP's E2M1), doubled, by their codes.
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Format:
    """A tensor type: ``block`` weights in ``nbytes`` bytes, and its planes once repacked.

    ``ggml_type`` is its number in GGUF files, ``group`` how many weights share a scale. `formats`
    has what a weight is, of its quant, scale, minimum, factors, ``offset``, ``scale_offset`` and
    ``min_sign``.
    Fields after ``element`` are in the digest only of types that use them.
    """

    name: str
    ggml_type: int
    block: int
    nbytes: int
    planes: tuple[Plane, ...]
    offset: int = 0
    group: int = UNIT
    scale_offset: int = 0
    min_sign: int = 0
    #: PTX type of an unquantised weight ("f16", "bf16", "f32"), or of quants that are floats
    #: ("e4m3"); else None.
    element: str | None = None
    #: Values of quants: 8 or 16 signed bytes, or 16 numbers of two bytes, with ``offset`` 0. Empty:
    #: quants themselves.
    table: tuple[int, ...] = ()
    #: Weights are multiplied by ``2 ** -halvings``.
    halvings: int = 0
    #: Whether ``d`` is the same in all blocks of a row.
    of_rows: bool = False
    #: Whether planes describe blocks after `grids.recode`.
    recoded: bool = False
    #: The codebook of a type that has one: ``planes`` then describe what registers have, and
    #: ``stored`` the planes of tiles.
    grid: Grid | None = None
    stored: tuple[Plane, ...] = ()

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        """Name and digest of the description, so that a spec key changes when a layout does."""
        late = ("table", "halvings", "of_rows", "recoded", "grid", "stored")
        fields = [
            getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name not in late or getattr(self, f.name)
        ]
        return f"{self.name}#{hashlib.sha256(repr(fields).encode()).hexdigest()[:8]}"

    @property
    def tile_planes(self) -> tuple[Plane, ...]:
        """The planes of tiles."""
        return self.stored or self.planes

    @property
    def register_planes(self) -> tuple[Plane, ...]:
        """The planes whose items registers have: those of tiles, then those made of them."""
        stored = {plane.name for plane in self.stored}
        return (*self.stored, *(plane for plane in self.planes if plane.name not in stored))

    @property
    def number_planes(self) -> tuple[Plane, ...]:
        """The planes of tiles that have groups' scales and minimums, or steps."""
        return tuple(
            plane
            for plane in self.tile_planes
            if {part.number for part in plane.parts} & {"scale", "minimum", "step"}
        )

    @property
    def shares_bytes(self) -> bool:
        """Whether two units share bytes of a plane of tiles."""
        return any(plane.shares_bytes for plane in self.tile_planes)

    @property
    def signed(self) -> bool:
        """Whether quants stand for bytes with a sign."""
        return bool(self.table or self.grid)

    @property
    def digits(self) -> int:
        """Bytes of a table's values: 2 if one byte does not hold them."""
        return 1 if all(-128 <= value < 128 for value in self.table) else 2

    def digit(self, number: int) -> tuple[int, ...]:
        """Byte ``number`` of a table's values, with a sign: a value is the sum of byte n times
        256 ** n."""
        if self.digits == 1:
            return self.table
        lower = tuple((value + 128) % 256 - 128 for value in self.table)
        if number == 0:
            return lower
        return tuple((value - low) // 256 for value, low in zip(self.table, lower, strict=True))

    def table_bytes(self, number: int, biased: bool) -> tuple[int, ...]:
        """What a look-up gives for byte ``number``: that `digit`, or the byte of values that are
        ``biased``, by `bias`."""
        if not biased:
            return tuple(value % 256 for value in self.digit(number))
        return tuple((value + self.bias) >> 8 * number & 255 for value in self.table)

    def halves_of_table(self, number: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """A `digit` of a table of 16 as two that are looked up apart and added: of codes 0 to 7,
        and of the complements of 8 to 15. Where one is not meant and its entry is negative, it
        gives -1."""
        lower, upper = self.digit(number)[:8], self.digit(number)[8:]
        pairs = tuple(zip(lower, upper, strict=True))
        return tuple(a + (b < 0) for a, b in pairs), tuple(b + (a < 0) for a, b in pairs)[::-1]

    @property
    def bias(self) -> int:
        """What is subtracted of numbers without a sign: the offset, or half of what the bytes of
        one with a sign hold."""
        return 128 * 256 ** (self.digits - 1) if self.signed else self.offset

    @property
    def is_float(self) -> bool:
        """Whether it is F32, F16 or BF16: one plane of values, rows of any width."""
        return self.element is not None and self.element != "e4m3"

    @property
    def arithmetic(self) -> Arithmetic:
        """What activations are multiplied with: integers, floats, or quants that are floats. A
        launch has matrices of one kind."""
        return "floats" if self.is_float else "e4m3" if self.element else "integers"

    @property
    def half(self) -> str:
        """PTX type of weights as 16-bit operands."""
        return "bf16" if self.element == "bf16" else "f16"

    @property
    def has_minimums(self) -> bool:
        """Whether a group of weights has an additive term."""
        return self.min_sign != 0

    @property
    def has_powers(self) -> bool:
        """Whether a repacked matrix has a power of two for each row: f16 weights need none."""
        return self.element != "f16"

    @property
    def largest_numbers(self) -> tuple[tuple[str, int], ...]:
        """("d", the largest |scale - scale_offset| or factor), and ("m", the largest minimum) if it
        has one: the maxima of the bit fields, 1 if the type has none.
        """
        if self.has("factor"):
            return (("d", 448),)
        found = [("d", "scale", self.scale_offset)] + [("m", "minimum", 0)] * self.has_minimums
        return tuple((of, self._largest(number, offset)) for of, number, offset in found)

    def _largest(self, number: str, offset: int) -> int:
        bits = sum(part.source.width for _, part in self.parts(number))
        return max(offset, (1 << bits) - 1 - offset) if bits else 1

    @property
    def factors(self) -> Plane:
        """The plane that bounds the weights: of ``d``, or the weights themselves."""
        return next((plane for plane, _ in self.parts("d")), self.planes[0])

    @property
    def has_numbers(self) -> bool:
        """Whether its groups have scales or minimums."""
        return self.has("scale") or self.has("minimum")

    @property
    def has_exponents(self) -> bool:
        """Whether ``d`` is a power of two, stored as an exponent byte (E8M0)."""
        return any(plane.name == "exponents" for plane in self.planes)

    @property
    def has_singles(self) -> bool:
        """Whether ``d`` is an f32 number."""
        return self.factors.name == "singles"

    @property
    def has_e4m3_factors(self) -> bool:
        """Whether every group has a factor of eight bits (E4M3)."""
        return any(plane.name == "factors_e4m3" for plane in self.planes)

    @property
    def e4m3_power(self) -> int:
        """The power of two by which an E4M3 factor is more than its bits where those of an f32
        are. A GGUF factor is for a table that is not doubled."""
        return 120 if self.has_singles else 119

    @property
    def has_group_factors(self) -> bool:
        """Whether every group has its own ``d``, or a factor of it, and no scale."""
        of_groups = any(len(part.target.strides) > 1 for _, part in self.parts("d"))
        return self.has_e4m3_factors or (of_groups and not self.has_singles)

    @property
    def needs_sums(self) -> bool:
        """Whether a product needs the sums of activations: for offsets of quants, or minimums."""
        return self.offset != 0 or self.has_minimums

    @property
    def ones(self) -> int:
        """Bit 0 of the fields of four neighbouring quants in a word: one per byte, or per four bits
        if they are looked up.
        """
        return 0x1111 if self.table else 0x01010101

    @property
    def is_bytes(self) -> bool:
        """Whether a weight's quant is a byte."""
        return [part.source.width for _, part in self.parts("q")] == [8]

    @property
    def lift(self) -> int:
        """How far quants in upper halves of bytes stay shifted left when unpacked: as far as a byte
        allows, at most 4.
        """
        if self.table:
            return 0
        return min(4, 8 - sum(part.source.width for _, part in self.parts("q")))

    def quads(self, group: int, lifted: bool) -> list[int]:
        """A group's quads (quad j: quants 4j ... 4j + 3 of the unit) in the upper halves of bytes,
        if ``lifted``, or the others: even ones first; of types with a codebook those of 16 weights
        first.
        """
        _, lowest = next(self.parts("q"))
        count = self.group // 4
        quads = range(count * group, count * (group + 1))
        return [
            j
            for j in sorted(quads, key=lambda j: (self.grid is not None and j // 4, j % 2))
            if lifted == (not self.table and lowest.target.position(4 * j) % 8 >= 4)
        ]

    @property
    def mixes_lifts(self) -> bool:
        """Whether a group has quads of both kinds."""
        return self.lift > 0 and all(self.quads(0, lifted) for lifted in (False, True))

    @property
    def block_units(self) -> int:
        """Units per block; an unquantised type counts in units."""
        return max(1, self.block // UNIT)

    @property
    def unit_groups(self) -> int:
        """Groups per unit, each with its scale: 1 or 2."""
        return UNIT // self.group

    @property
    def upper_index(self) -> Upper | None:
        """Where the upper bits of indices are, if they have more than eight."""
        return upper(self.stored)

    def grid_moves(self, number: Numbers, i: int, unit: int, to: int) -> list[Move]:
        """Of a type with a codebook: see `grids.moves`."""
        return [*moves(self.stored, number, i, unit, to)]

    def parts(self, number: str) -> Iterator[tuple[Plane, Part]]:
        """The parts of a number, each with its plane; none for a number that the type lacks."""
        for plane in self.planes:
            for part in plane.parts:
                if part.number == number:
                    yield plane, part

    def has(self, number: str) -> bool:
        """Whether the type stores this number."""
        return any(True for _ in self.parts(number))

    def numbers(self, number: Number) -> GroupNumbers | None:
        """The places of the groups' scales or minimums, if the type has them."""
        return _group_numbers(self, number)


@functools.cache
def _group_numbers(fmt: Format, number: Number) -> GroupNumbers | None:
    parts = tuple(fmt.parts(number))
    offset = fmt.scale_offset if number == "scale" else 0
    return GroupNumbers(parts, fmt.unit_groups, offset) if parts else None
