"""The tensor types of GGUF and of quantised folders, one description each.

A quantised type is a sequence of *blocks* (32 or 256 consecutive weights of a row, with their
scales). Its numbers are cut into bit fields scattered over the block; a ``Field`` gives their
position, which is linear in the binary digits of the weight's (or group's) index. Everything else
follows from these descriptions: the planes of the repacked matrix (``layout.Layout``), the repack
kernel, and the unpacking in every kernel that reads weights, and in numpy.

The value of a weight is ``d * (scale - scale_offset) * (q - offset) + min_sign * m * minimum``,
``d`` and ``m`` (f16) per block, ``scale`` and ``minimum`` per group of 16 or 32 weights; a type
without group scales has ``scale = minimum = 1``. Types with a ``table`` use ``table[q]`` instead of
``q - offset``. MXFP4's ``d`` is a power of two, whose exponent is in the block; NVFP4 has a ``d``
of eight bits (E4M3) for each group. Types with a codebook: `grid_formats`. Types of folders have
blocks of our own: what belongs to a group, side by side (`_integer`, `_e4m3`, `_e2m1`, `_codes`).

Source of the block layouts: ggml's ``block_q4_K`` and its relatives, as the ``gguf`` package's
``quants`` module decodes them; type numbers: ``gguf.GGMLQuantizationType``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.weights.e4m3 import MOST, to_e4m3
from urdir.ptxgen.weights.fields import Field, Part, Plane
from urdir.ptxgen.weights.format import E2M1, UNIT, Format
from urdir.ptxgen.weights.grid_formats import grid_types
from urdir.ptxgen.weights.grids import parts
from urdir.ptxgen.weights.planes import Numbers, code_plane, quant_plane, scale_plane

__all__ = ["FORMATS", "UNIT", "Bytes", "Format", "format_of", "random_blocks"]

Bytes = npt.NDArray[np.uint8]


def _quantised(
    name: str,
    ggml_type: int,
    block: int,
    nbytes: int,
    *factors: Plane,
    quants: Sequence[Field],
    numbers: Sequence[Sequence[Numbers]] = (),
    **values: Any,
) -> Format:
    """A quantised type; ``factors`` are the planes of what whole blocks or groups are multiplied
    by, ``numbers`` those of its groups' scales and minimums."""
    planes, shift, group = [], 0, values.get("group", UNIT)
    for plane_name, source in zip(("low", "high"), quants, strict=False):
        plane_of = code_plane if "table" in values else quant_plane
        planes.append(plane_of(plane_name, shift, source, group))
        shift += source.width
    for plane_name, fields in zip(("scales", "scales_high"), numbers, strict=False):
        planes.append(scale_plane(plane_name, group, fields))
    return Format(name, ggml_type, block, nbytes, (*planes, *factors), **values)


def _f16_factors(block: int, d: int, m: int | None = None) -> Plane:
    """``d`` and ``m`` as f16 numbers, at these bytes of a block."""
    parts = tuple(
        Part(number, 0, Field(8, 8 * at, (8,)), Field(8, 16 * place, (8,)))
        for place, (number, at) in enumerate((("d", d), ("m", m)))
        if at is not None
    )
    return Plane("factors", block // UNIT, 2 * len(parts), parts)


def _exponent(at: int) -> Plane:
    """The exponent of ``d``, a power of two, at this byte of a block."""
    return Plane("exponents", 1, 1, (Part("d", 0, Field(8, 8 * at), Field(8, 0)),))


def _f32_factors(block: int) -> Plane:
    """``d`` as an f32 number, with which a block begins."""
    part = Part("d", 0, Field(8, 0, (8, 16)), Field(8, 0, (8, 16)))
    return Plane("singles", block // UNIT, 4, (part,))


def _e4m3_factors(number: str, source: Field) -> Plane:
    """E4M3 numbers of groups of 16: their ``d``, or a ``factor`` beside it."""
    return Plane("factors_e4m3", 1, 2, (Part(number, 0, source, Field(8, 0, (8,))),))


def _integer(bits: int, group: int) -> Format:
    """Integers of ``bits`` bits with a zero point, groups of ``group``: d * (q - z), as GPTQ, AWQ
    and compressed-tensors store them. A block is a group: d and m as f16, z, quants in order of
    columns: of 8 bits; else a byte of two quants, or four bits, two bits and one bit apart.

    m is d, or a multiple of it if z / m is too large for its four bits.
    """
    quants, at = [], 5
    for width in {2: (2,), 3: (2, 1), 4: (4,), 8: (8,)}[bits]:
        quants.append(
            Field(width, _at(at), tuple(width << k for k in range(group.bit_length() - 1)))
        )
        at += width * group // 8
    zero = Field(8 if bits == 8 or group == UNIT else 4, _at(4))
    made = _quantised(
        f"W{bits}G{group}", OWN_TYPES + 16 * bits + group // UNIT, group, at,
        _f16_factors(group, 0, 2), quants=quants, min_sign=-1, numbers=[[("minimum", 0, zero)]],
    )  # fmt: skip
    # planes of less than a copy are the last ones of a tile (`tiles.Tile.rest`)
    planes = sorted(made.planes, key=lambda plane: -plane.nbytes / plane.units)
    return replace(made, planes=tuple(planes))


def _e4m3(group: int, of_rows: bool = False) -> Format:
    """Floats of eight bits, ``group`` of them with a factor: d as f32, quants in order of columns.
    ``of_rows``: a row's factors are all the same.

    Read as the upper bits of f16 numbers, they are 2^-8 of what they should be, which is 2^-24
    times an integer: that integer is the quant (`halves`).
    """
    quants = Field(8, _at(4), tuple(8 << k for k in range(group.bit_length() - 1)))
    return _quantised(
        f"E4M3{'R' if of_rows else 'G'}{group}", OWN_TYPES + group // UNIT, group, 4 + group,
        _f32_factors(group), quants=[quants], element="e4m3", halvings=16, of_rows=of_rows,
    )  # fmt: skip


def _e2m1(block: int) -> Format:
    """NVFP4 of folders: floats of four bits, groups of 16 with a factor of eight (E4M3), times d of
    the row, f32: d, factors, codes in order of columns. The table is doubled: d is half of it."""
    factors = Field(8, _at(4), tuple(8 << k for k in range(block.bit_length() - 5)))
    at = 4 + block // 16
    codes = Field(4, _at(at), tuple(4 << k for k in range(block.bit_length() - 1)))
    return _quantised(
        f"E2M1G{block}", OWN_TYPES + 256 + block // UNIT, block, at + block // 2,
        _e4m3_factors("factor", factors), _f32_factors(block),
        quants=[codes], table=E2M1, group=16, of_rows=True,
    )  # fmt: skip


def _codes(kind: str, group: int) -> Format:
    """bitsandbytes' codes of four bits for 16 floats, groups of ``group`` with a factor: d as f32,
    codes in order of columns. The floats are integers here, `CODES` of them in 1."""
    codes = Field(4, _at(4), tuple(4 << k for k in range(group.bit_length() - 1)))
    number = OWN_TYPES + 512 + 16 * list(CODES).index(kind) + group // UNIT
    table = tuple(round(value * CODES[kind]) for value in CODE_VALUES[kind])
    return _quantised(
        f"{kind}G{group}", number, group, 4 + group // 2,
        _f32_factors(group), quants=[codes], table=table,
    )  # fmt: skip


def _float(name: str, ggml_type: int, nbytes: int, element: str) -> Format:
    return Format(name, ggml_type, 1, nbytes, (Plane("values", 1, UNIT * nbytes),), element=element)


def _at(byte: int, shift: int = 0) -> int:
    return 8 * byte + shift


#: The first number of types that GGUF lacks.
OWN_TYPES = 1 << 20

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

# The steps of IQ4_NL and IQ4_XS.
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

#: The floats of bitsandbytes' codes (its functional.py): NF4's are means of sixteenths of a normal
#: distribution (QLoRA, arXiv 2305.14314), FP4 has a sign and 0, 1/192, 2/3, 1, 1/3, 1/2, 1/6, 1/4.
CODE_VALUES: Mapping[str, tuple[float, ...]] = {
    "NF4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    "FP4": tuple(sign * of / 192 for sign in (1, -1) for of in (0, 1, 128, 192, 64, 96, 32, 48)),
}
#: What 1 is as an integer. FP4 is exact; NF4's values are off by at most 8e-6 (RMS 4e-6), a quarter
#: of the usual error of 16 bits.
CODES: Mapping[str, int] = {"NF4": 31908, "FP4": 192}

_ALL = (
    _float("F32", 0, 4, "f32"),
    _float("F16", 1, 2, "f16"),
    _float("BF16", 30, 2, "bf16"),
    _quantised(
        "Q4_0", 2, 32, 18, _f16_factors(32, 0), offset=8,
        quants=[Field(4, _at(2), _HALVES)],
    ),
    _quantised(
        "Q4_1", 3, 32, 20, _f16_factors(32, 0, 2), min_sign=1,
        quants=[Field(4, _at(4), _HALVES)],
    ),
    _quantised(
        "Q5_0", 6, 32, 22, _f16_factors(32, 0), offset=16,
        quants=[Field(4, _at(6), _HALVES), Field(1, _at(2), _BITS)],
    ),
    _quantised(
        "Q5_1", 7, 32, 24, _f16_factors(32, 0, 2), min_sign=1,
        quants=[Field(4, _at(8), _HALVES), Field(1, _at(4), _BITS)],
    ),
    _quantised(
        "Q8_0", 8, 32, 34, _f16_factors(32, 0), offset=128,
        quants=[Field(8, _at(2), _BYTES, signed=True)],
    ),
    _quantised(
        "Q2_K", 10, 256, 84, _f16_factors(256, 80, 82), group=16, min_sign=-1,
        quants=[Field(2, _at(16), (*_BYTES, 2, 4, _at(32)))],
        numbers=[
            [
                ("scale", 0, Field(4, 0, (8, 16, 32, 64))),
                ("minimum", 0, Field(4, 4, (8, 16, 32, 64))),
            ]
        ],
    ),
    _quantised(
        "Q3_K", 11, 256, 110, _f16_factors(256, 108), group=16, offset=4, scale_offset=32,
        quants=[Field(2, _at(32), (*_BYTES, 2, 4, _at(32))), Field(1, 0, (*_BYTES, 1, 2, 4))],
        numbers=[
            [("scale", 0, Field(4, _at(96), (8, 16, 32, 4)))],
            [("scale", 4, Field(2, _at(104), (8, 16, 2, 4)))],
        ],
    ),
    _quantised(
        "Q4_K", 12, 256, 144, _f16_factors(256, 0, 2), min_sign=-1,
        quants=[Field(4, _at(16), (*_BYTES, 4, _at(32), _at(64)))],
        numbers=_K_NUMBERS,
    ),
    _quantised(
        "Q5_K", 13, 256, 176, _f16_factors(256, 0, 2), min_sign=-1,
        quants=[
            Field(4, _at(48), (*_BYTES, 4, _at(32), _at(64))),
            Field(1, _at(16), (*_BYTES, 1, 2, 4)),
        ],
        numbers=_K_NUMBERS,
    ),
    _quantised(
        "Q6_K", 14, 256, 210, _f16_factors(256, 208), group=16, offset=32, scale_offset=128,
        quants=[
            Field(4, 0, (*_BYTES, _at(32), 4, _at(64))),
            Field(2, _at(128), (*_BYTES, 2, 4, _at(32))),
        ],
        numbers=[[("scale", 0, Field(8, _at(192), (8, 16, 32, 64), signed=True))]],
    ),
    _quantised(
        "MXFP4", 39, 32, 17, _exponent(0), table=E2M1,
        quants=[Field(4, _at(1), _HALVES)],
    ),
    _quantised(
        "NVFP4", 40, 64, 36, _e4m3_factors("d", Field(8, 0, (8, 16), nan=0x7F)),
        group=16, table=E2M1, quants=[Field(4, _at(4), (8, 16, 32, 4, _at(8), _at(16)))],
    ),
    _quantised(
        "IQ4_NL", 20, 32, 18, _f16_factors(32, 0), table=_IQ4,
        quants=[Field(4, _at(2), _HALVES)],
    ),
    # A byte instead of six bits for a group's scale: 4.3125 bits a weight, 4.25 in GGUF.
    _quantised(
        "IQ4_XS", 23, 256, 136, _f16_factors(256, 0), scale_offset=32, table=_IQ4,
        quants=[Field(4, _at(8), (*_HALVES, _at(16), _at(32), _at(64)))],
        numbers=[
            [
                ("scale", 0, Field(4, _at(4), (4, 8, 16))),
                ("scale", 4, Field(2, _at(2), (2, 4, 8))),
            ]
        ],
    ),
    _quantised(
        "TQ2_0", 35, 256, 66, _f16_factors(256, 64), offset=1,
        quants=[Field(2, 0, (*_BYTES, 2, 4, _at(32)))],
    ),
    *grid_types(),
    *(_integer(bits, group) for bits, group in ((4, 128), (3, 64), (8, 32))),
    _e4m3(128),
    _e4m3(32),
    _e2m1(256),
    _e2m1(64),
    _e4m3(256, of_rows=True),
    _codes("NF4", 64),
    _codes("FP4", 32),
)  # fmt: skip

#: Every supported type by its GGUF name, and those of quantised folders that have kernels of their
#: own.
FORMATS: Mapping[str, Format] = {f.name: f for f in _ALL}

#: Integers with zero points of folders, by (bits, group).
INTEGERS: Mapping[tuple[int, int], Format] = {
    (bits, group): _integer(bits, group) for bits in (2, 3, 4, 8) for group in (32, 64, 128)
}

#: bitsandbytes' codes of four bits, by (kind, group).
CODED: Mapping[tuple[str, int], Format] = {
    (kind, group): _codes(kind, group) for kind in CODES for group in (32, 64)
}
#: Every type by its name, also those of the same making that have no kernels of their own to test.
EVERY: Mapping[str, Format] = {
    **FORMATS,
    **{fmt.name: fmt for fmt in (*INTEGERS.values(), *CODED.values())},
}

_BY_TYPE = {f.ggml_type: f for f in EVERY.values()}


def format_of(ggml_type: int) -> Format:
    """The type with this GGUF number; raises PtxgenError for one that is not supported."""
    if ggml_type not in _BY_TYPE:
        raise PtxgenError(
            f"GGUF tensor type {ggml_type} is not supported: one of {', '.join(FORMATS)}"
        )
    return _BY_TYPE[ggml_type]


def random_blocks(fmt: Format, count: int, rng: np.random.Generator, scale: float = 1.0) -> Bytes:
    """Random valid GGUF blocks, (count, nbytes) u8: any quants and scales, finite factors.

    Weights have magnitudes of about 0.1 to 10, unquantised ones are standard normal, all times
    ``scale``.
    """
    if fmt.is_float:
        values = (scale * rng.standard_normal(count)).astype(np.float32)
        if fmt.element == "bf16":
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(-1, 2)
        dtype = np.float16 if fmt.element == "f16" else np.float32
        return values.astype(dtype).view(np.uint8).reshape(count, fmt.nbytes)
    blocks = rng.integers(0, 256, (count, fmt.nbytes), dtype=np.uint8)
    if fmt.grid:
        factors = scale * rng.uniform(0.01, 0.1, count) * rng.choice([-1.0, 1.0], count)
        _, part = next(parts(fmt.stored, "d"))
        _write(blocks, part, factors.astype(np.float16))
        return blocks
    if fmt.has_e4m3_factors and not fmt.has_singles:
        sizes = scale * rng.uniform(0.01, 0.1, count)[:, None] * np.array([1, 0.5, 2, 0.75])
        blocks[:, :4] = to_e4m3(np.minimum(2 * sizes, MOST))
        return blocks
    for number in ("d", "m"):
        for _, part in fmt.parts(number):
            at = part.source.start // 8
            if fmt.has_exponents:
                middle = 125 + round(math.log2(scale))
                blocks[:, at] = np.clip(rng.integers(middle - 2, middle + 2, count), 0, 254)
                continue
            factors = scale * rng.uniform(0.01, 0.1, count) * rng.choice([-1.0, 1.0], count)
            if fmt.digits == 2:
                factors *= 127 / max(fmt.table)
            elif fmt.has_singles:  # quants or factors are E4M3: no NaN
                blocks[blocks & 0x7F == 0x7F] = 0
                factors = np.full(count, factors[0]) if fmt.of_rows else factors
                factors /= 16
            halves = factors.astype(np.float32 if fmt.has_singles else np.float16)
            blocks[:, at : at + halves.itemsize] = halves.view(np.uint8).reshape(count, -1)
    return blocks


def _write(blocks: Bytes, part: Part, values: npt.NDArray[np.float16]) -> None:
    """Write a number of 16 bits (count,) to the fields of blocks (count, bytes)."""
    for index in range(part.count):
        at, shift = divmod(part.source.position(index), 8)
        field = values.view(np.uint16) >> part.target.position(index) & part.source.mask
        blocks[:, at] &= 0xFF ^ part.source.mask << shift
        blocks[:, at] |= (field << shift).astype(np.uint8)
