"""The tensor types of GGUF, each described once.

A quantised type is a sequence of *blocks* (32 or 256 consecutive weights of a row, with their
scales). Its numbers are cut into bit fields that are scattered over the block; where they lie is a
``Field``: a bit position that is linear in the binary digits of the weight's (or group's) index.
Everything else follows from these descriptions: the planes of the repacked matrix
(``layout.Layout``), the repack kernel, the unpacking in every kernel that reads weights, numpy's.

The value of a weight is ``d * (scale - scale_offset) * (q - offset) + min_sign * m * minimum``,
``d`` and ``m`` (f16) per block, ``scale`` and ``minimum`` per group of 16 or 32 weights; a type
without group scales has ``scale = minimum = 1``.

Source of the block layouts: ggml's ``block_q4_K`` and its relatives, as the ``gguf`` package's
``quants`` module decodes them; type numbers: ``gguf.GGMLQuantizationType``.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.weights.fields import Field, Part, Plane
from urdir.ptxgen.weights.numbers import GroupNumbers, Number

Bytes = npt.NDArray[np.uint8]

#: Weights of a *unit*: consecutive weights of a row that one thread handles at a time.
UNIT = 32


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Format:
    """A GGUF tensor type: ``block`` weights in ``nbytes`` bytes, and its planes once repacked."""

    name: str
    ggml_type: int
    block: int
    nbytes: int
    planes: tuple[Plane, ...]
    offset: int = 0
    group: int = UNIT
    scale_offset: int = 0
    min_sign: int = 0
    #: PTX type of an unquantised weight ("f16", "bf16", "f32"), else None.
    element: str | None = None

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        """Name and digest of the description, so that a spec key changes when a layout does."""
        fields = [getattr(self, f.name) for f in dataclasses.fields(self)]
        return f"{self.name}#{hashlib.sha256(repr(fields).encode()).hexdigest()[:8]}"

    @property
    def is_float(self) -> bool:
        """True for F32, F16 and BF16: one plane of values, rows of any width."""
        return self.element is not None

    @property
    def has_minimums(self) -> bool:
        """True where a group of weights has an additive term."""
        return self.min_sign != 0

    @property
    def is_bytes(self) -> bool:
        """True where a weight's quant is a byte."""
        return [part.source.width for _, part in self.parts("q")] == [8]

    @property
    def lift(self) -> int:
        """How far left quants from upper halves of bytes stay when they are unpacked: as many bits
        as a byte has room for, 4 at most.
        """
        return min(4, 8 - sum(part.source.width for _, part in self.parts("q")))

    def quads(self, group: int, lifted: bool) -> list[int]:
        """A group's quads (quad j: quants 4j ... 4j + 3 of the unit) that lie in the upper halves
        of bytes, if ``lifted``, or the others: even ones first.
        """
        _, lowest = next(self.parts("q"))
        count = self.group // 4
        quads = range(count * group, count * (group + 1))
        return [
            j
            for j in sorted(quads, key=lambda j: j % 2)
            if lifted == (lowest.target.position(4 * j) % 8 >= 4)
        ]

    @property
    def mixes_lifts(self) -> bool:
        """Whether quads of both kinds are in a group."""
        return self.lift > 0 and all(self.quads(0, lifted) for lifted in (False, True))

    @property
    def block_units(self) -> int:
        """Units of a block; an unquantised type counts in units."""
        return max(1, self.block // UNIT)

    @property
    def unit_groups(self) -> int:
        """Groups of a unit, each with its scale: 1 or 2."""
        return UNIT // self.group

    def parts(self, number: str) -> Iterator[tuple[Plane, Part]]:
        """The parts that make up a number, each with its plane; none for a number it lacks."""
        for plane in self.planes:
            for part in plane.parts:
                if part.number == number:
                    yield plane, part

    def has(self, number: str) -> bool:
        """Whether the type stores this number."""
        return any(True for _ in self.parts(number))

    def numbers(self, number: Number) -> GroupNumbers | None:
        """Where the groups' scales or minimums are, if the type has them."""
        return _group_numbers(self, number)


@functools.cache
def _group_numbers(fmt: Format, number: Number) -> GroupNumbers | None:
    parts = tuple(fmt.parts(number))
    offset = fmt.scale_offset if number == "scale" else 0
    return GroupNumbers(parts, fmt.unit_groups, offset) if parts else None


#: Bits ``shift`` and up of the groups' "scale" or "minimum", and where a block has them.
_Numbers = tuple[str, int, Field]


def _digits(count: int) -> int:
    return count.bit_length() - 1


def _quant_plane(name: str, shift: int, source: Field, group: int) -> Plane:
    """32 fields: weight 4j + b in byte b of a 32-bit word, 8 / width values of j to a word.

    A shift and a mask then give four neighbouring weights, one a byte. The values of j in a word
    follow each other. Where a word has two and a unit has two groups, they are of both groups: each
    of the four lanes that share a row then finds its quads of both in a word of its own.
    """
    width, inside = source.width, _digits(8 // source.width)
    strides = [width << k for k in range(inside)] + [32 << k for k in range(3 - inside)]
    if inside == 1 and group < UNIT:
        strides = [*strides[1:], strides[0]]
    target = Field(width, 0, (8, 16, *strides))
    return Plane(name, 1, 4 * width, (Part("q", shift, source, target),))


def _scale_plane(name: str, group: int, fields: Sequence[_Numbers]) -> Plane:
    """Fields of each group side by side; half-bytes of two units share a byte."""
    group_bits = sum(source.width for _, _, source in fields)
    unit_bits = group_bits * (UNIT // group)
    units = max(1, 8 // unit_bits)
    strides = tuple(group_bits << k for k in range(_digits(units * UNIT // group)))
    parts, at = [], 0
    for number, shift, source in fields:
        parts.append(Part(number, shift, source, Field(source.width, at, strides)))
        at += source.width
    return Plane(name, units, max(1, unit_bits // 8), tuple(parts))


def _quantised(
    name: str,
    ggml_type: int,
    block: int,
    nbytes: int,
    *,
    quants: Sequence[Field],
    d: int,
    m: int | None = None,
    numbers: Sequence[Sequence[_Numbers]] = (),
    **values: Any,
) -> Format:
    """A quantised type; ``d`` and ``m`` are byte offsets of f16 numbers in the block, ``numbers``
    the planes of its groups' scales and minimums.
    """
    planes, shift = [], 0
    for plane_name, source in zip(("low", "high"), quants, strict=False):
        planes.append(_quant_plane(plane_name, shift, source, values.get("group", UNIT)))
        shift += source.width
    for plane_name, fields in zip(("scales", "scales_high"), numbers, strict=False):
        planes.append(_scale_plane(plane_name, values.get("group", UNIT), fields))
    halves = [("d", d)] + ([("m", m)] if m is not None else [])
    parts = tuple(
        Part(number, 0, Field(8, 8 * at, (8,)), Field(8, 16 * place, (8,)))
        for place, (number, at) in enumerate(halves)
    )
    planes.append(Plane("factors", block // UNIT, 2 * len(halves), parts))
    return Format(name, ggml_type, block, nbytes, tuple(planes), **values)


def _float(name: str, ggml_type: int, nbytes: int, element: str) -> Format:
    return Format(name, ggml_type, 1, nbytes, (Plane("values", 1, UNIT * nbytes),), element=element)


def _at(byte: int, shift: int = 0) -> int:
    return 8 * byte + shift


# Strides of the five digits of a weight's index in its unit: a byte each, or 16 bytes of two
# half-bytes, or 4 bytes of eight bits. The digits of a unit's index in its block follow.
_BYTES = (8, 16, 32, 64, 128)
_HALVES = (8, 16, 32, 64, 4)
_BITS = (1, 2, 4, 8, 16)

# Q4_K and Q5_K: twelve bytes at 4 hold eight scales and eight minimums of six bits each. A byte of
# a unit gets its scale, and above it the two upper bits of its minimum.
_K_NUMBERS = (
    (
        ("scale", 0, Field(4, _at(4), (8, 16, _at(8)))),
        ("scale", 4, Field(2, _at(4, 4), (8, 16, 2))),
        ("minimum", 4, Field(2, _at(8, 4), (8, 16, 2))),
    ),
    (("minimum", 0, Field(4, _at(8), (8, 16, _at(4, 4)))),),
)

_ALL = (
    _float("F32", 0, 4, "f32"),
    _float("F16", 1, 2, "f16"),
    _float("BF16", 30, 2, "bf16"),
    _quantised("Q4_0", 2, 32, 18, quants=[Field(4, _at(2), _HALVES)], d=0, offset=8),
    _quantised("Q4_1", 3, 32, 20, quants=[Field(4, _at(4), _HALVES)], d=0, m=2, min_sign=1),
    _quantised(
        "Q5_0", 6, 32, 22, d=0, offset=16,
        quants=[Field(4, _at(6), _HALVES), Field(1, _at(2), _BITS)],
    ),
    _quantised(
        "Q5_1", 7, 32, 24, d=0, m=2, min_sign=1,
        quants=[Field(4, _at(8), _HALVES), Field(1, _at(4), _BITS)],
    ),
    _quantised(
        "Q8_0", 8, 32, 34, d=0, offset=128,
        quants=[Field(8, _at(2), _BYTES, signed=True)],
    ),
    _quantised(
        "Q2_K", 10, 256, 84, d=80, m=82, group=16, min_sign=-1,
        quants=[Field(2, _at(16), (*_BYTES, 2, 4, _at(32)))],
        numbers=[
            [
                ("scale", 0, Field(4, 0, (8, 16, 32, 64))),
                ("minimum", 0, Field(4, 4, (8, 16, 32, 64))),
            ]
        ],
    ),
    _quantised(
        "Q3_K", 11, 256, 110, d=108, group=16, offset=4, scale_offset=32,
        quants=[Field(2, _at(32), (*_BYTES, 2, 4, _at(32))), Field(1, 0, (*_BYTES, 1, 2, 4))],
        numbers=[
            [("scale", 0, Field(4, _at(96), (8, 16, 32, 4)))],
            [("scale", 4, Field(2, _at(104), (8, 16, 2, 4)))],
        ],
    ),
    _quantised(
        "Q4_K", 12, 256, 144, d=0, m=2, min_sign=-1,
        quants=[Field(4, _at(16), (*_BYTES, 4, _at(32), _at(64)))],
        numbers=_K_NUMBERS,
    ),
    _quantised(
        "Q5_K", 13, 256, 176, d=0, m=2, min_sign=-1,
        quants=[
            Field(4, _at(48), (*_BYTES, 4, _at(32), _at(64))),
            Field(1, _at(16), (*_BYTES, 1, 2, 4)),
        ],
        numbers=_K_NUMBERS,
    ),
    _quantised(
        "Q6_K", 14, 256, 210, d=208, group=16, offset=32, scale_offset=128,
        quants=[
            Field(4, 0, (*_BYTES, _at(32), 4, _at(64))),
            Field(2, _at(128), (*_BYTES, 2, 4, _at(32))),
        ],
        numbers=[[("scale", 0, Field(8, _at(192), (8, 16, 32, 64), signed=True))]],
    ),
)  # fmt: skip

#: Every supported type by its GGUF name.
FORMATS: Mapping[str, Format] = {f.name: f for f in _ALL}

_BY_TYPE = {f.ggml_type: f for f in _ALL}


def format_of(ggml_type: int) -> Format:
    """The type with this GGUF number; raises PtxgenError for one that is not supported."""
    if ggml_type not in _BY_TYPE:
        raise PtxgenError(
            f"GGUF tensor type {ggml_type} is not supported: one of {', '.join(FORMATS)}"
        )
    return _BY_TYPE[ggml_type]


def random_blocks(fmt: Format, count: int, rng: np.random.Generator, scale: float = 1.0) -> Bytes:
    """Random valid GGUF blocks, (count, nbytes) u8: any quants and scales, finite f16 factors.

    Weights come out with magnitudes of about 0.1 to 10, unquantised ones standard normal, all of
    them times ``scale``.
    """
    if fmt.element is not None:
        values = (scale * rng.standard_normal(count)).astype(np.float32)
        if fmt.element == "bf16":
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(-1, 2)
        dtype = np.float16 if fmt.element == "f16" else np.float32
        return values.astype(dtype).view(np.uint8).reshape(count, fmt.nbytes)
    blocks = rng.integers(0, 256, (count, fmt.nbytes), dtype=np.uint8)
    for number in ("d", "m"):
        for _, part in fmt.parts(number):
            factors = scale * rng.uniform(0.01, 0.1, count) * rng.choice([-1.0, 1.0], count)
            at = part.source.start // 8
            blocks[:, at : at + 2] = factors.astype(np.float16).view(np.uint8).reshape(-1, 2)
    return blocks
