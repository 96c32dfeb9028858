"""Expansion at load of types whose numbers are not bit fields.

Weights of these types are indices of grids (8 or 4 weights at a time), signs and scales, or digits
to base 3. `expand` writes each weight's level and sign as a code of 2 to 4 bits, which the type's
table decodes, and each group's scale as a byte; every weight keeps exactly its value in GGUF. That
takes more memory; bits per weight:

| type | GGUF | here |
|---|---|---|
| NVFP4 | 4.5 | 5 |
| TQ1_0 | 1.6875 | 2.0625 |
| IQ1_S | 1.5625 | 3.3125 |
| IQ1_M | 1.75 | 3.5625 |
| IQ2_XXS | 2.0625 | 3.3125 |
| IQ2_XS | 2.3125 | 3.5625 |
| IQ2_S | 2.5625 | 3.5625 |
| IQ3_XXS | 3.0625 | 4.3125 |
| IQ3_S | 3.4375 | 4.3125 |

An expanded block of 256 weights: codes in order (two bits of each, then the third, or four bits),
scales, ``d``. A block of 64 weights of NVFP4: its four factors as f16, codes. TQ1_0 becomes a block
of TQ2_0. Source: ggml's blocks, as the ``gguf`` package's ``quants`` decodes them; its grids are
used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from urdir.ptxgen.weights.format import Format

Bytes = npt.NDArray[np.uint8]
Halves = npt.NDArray[np.uint16]


def expand(fmt: Format, blocks: Bytes) -> Bytes:
    """Convert GGUF blocks (bytes of any shape) to those that ``fmt.planes`` describe, (bytes,) u8;
    other types than the above are unchanged.
    """
    if not fmt.expanded:
        return blocks.reshape(-1)
    return _EXPANSIONS[fmt.name](blocks.reshape(-1, fmt.nbytes)).reshape(-1)


def write_factors(fmt: Format, blocks: Bytes, d: npt.NDArray[np.float16]) -> None:
    """Set ``d`` (count,) of GGUF blocks (count, bytes) of such a type; NVFP4's to about some
    multiples of it.
    """
    bits = d.view(np.uint16)
    if fmt.name == "NVFP4":
        sizes = abs(d.astype(np.float32))[:, None] * np.array([1, 0.5, 2, 0.75], np.float32)
        blocks[:, :4] = np.minimum(np.searchsorted(_e4m3()[:127], sizes), 126)
        return
    if fmt.name != "IQ1_M":
        at = 52 if fmt.name == "TQ1_0" else 0
        blocks[:, at : at + 2] = bits.view(np.uint8).reshape(-1, 2)
        return
    for k in range(4):  # half a byte of it in each of four
        byte = blocks[:, 49 + 2 * k]
        byte[:] = byte & 0x0F | (bits >> 4 * k & 0xF).astype(np.uint8) << 4


@functools.cache
def _grid(name: str) -> Halves:
    """The levels of the weights of each entry of a type's grid, side by side in 16 bits."""
    import gguf.quants  # rarely needed

    of: Any = getattr(gguf.quants, name)
    of.init_grid()
    values = of.grid.reshape(of.grid_shape)
    levels = np.searchsorted(np.array(of.grid_map, np.float32), values).astype(np.uint16)
    count = of.grid_shape[1]
    packed: Halves = (levels << (16 // count * np.arange(count, dtype=np.uint16))).sum(1, np.uint16)
    return packed


@functools.cache
def _signs() -> Bytes:
    """Signs of eight weights of which seven are stored: the number of minus signs is even."""
    seven = np.arange(128, dtype=np.uint8)
    odd: Bytes = np.bitwise_xor.reduce(seven[:, None] >> np.arange(7, dtype=np.uint8) & 1, axis=1)
    return seven | odd << np.uint8(7)


@functools.cache
def _spread() -> Halves:
    """Bits 0 to 3 of a number, each four bits further than the one before it, from bit 3 on."""
    bits = np.arange(16, dtype=np.uint16)[:, None] >> np.arange(4, dtype=np.uint16) & 1
    packed: Halves = (bits << np.array([3, 7, 11, 15], np.uint16)).sum(1, np.uint16)
    return packed


def _bytes(*parts: npt.NDArray[Any]) -> Bytes:
    """Parts of blocks (count, numbers) of any integers, side by side."""
    return np.hstack([np.ascontiguousarray(part).view(np.uint8) for part in parts])


def _odd(scales: npt.NDArray[Any]) -> Bytes:
    """A scale of s + 1/2, twice."""
    return (2 * scales + 1).astype(np.uint8)


def _half_bytes(packed: Bytes) -> Bytes:
    """(count, n) -> (count, 2n), lower halves first."""
    return np.stack([packed & 0xF, packed >> 4], axis=2).reshape(len(packed), -1)


def _four_bits(levels: Halves, signs: Bytes) -> Halves:
    """Codes of four weights each: three bits of their levels, and above them their signs."""
    return levels | _spread()[_half_bytes(signs)]


@functools.cache
def _e4m3() -> npt.NDArray[np.float16]:
    """Half of what each byte is as a float of four bits of exponent and three of mantissa, without
    a sign (halves: the values of the type's table are doubled); 0x7F is 0.
    """
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    whole = np.where(exponent, 8 + mantissa, mantissa)
    values = np.ldexp(whole.astype(np.float16), np.maximum(exponent, 1) - 11)
    return np.where(byte == 0x7F, np.float16(0), values)


def _nvfp4(blocks: Bytes) -> Bytes:
    return _bytes(_e4m3()[blocks[:, :4]], blocks[:, 4:])


@functools.cache
def _trits() -> Bytes:
    """The five digits to base 3 of each byte, which is a fraction of 256, (5, 256) u8."""
    powers = np.array([[1], [3], [9], [27], [81]], np.uint8)
    fractions = np.arange(256, dtype=np.uint8) * powers
    return (fractions.astype(np.uint16) * 3 >> 8).astype(np.uint8)


def _tq1_0(blocks: Bytes) -> Bytes:
    """Weights 0 ... 159 are digits of 32 bytes, then 80 of 16 bytes and 16 of 4; TQ2_0 has weights
    32 apart in a byte.
    """
    digits = _trits()
    most, middle, last, d = np.hsplit(blocks, [32, 48, 52])
    first_half = _pack_trits(*digits[:4])[most]
    second_half = _pack_trits(
        digits[4][most],
        np.hstack([digit[middle] for digit in digits[:2]]),
        np.hstack([digit[middle] for digit in digits[2:4]]),
        np.hstack([digits[4][middle], *(digit[last] for digit in digits[:4])]),
    )
    return _bytes(first_half, second_half, d)


def _pack_trits(a: Bytes, b: Bytes, c: Bytes, d: Bytes) -> Bytes:
    packed: Bytes = a | b << np.uint8(2) | c << np.uint8(4) | d << np.uint8(6)
    return packed


def _iq2_xxs(blocks: Bytes) -> Bytes:
    words = np.ascontiguousarray(blocks[:, 2:]).view(np.uint32).reshape(len(blocks), 8, 2)
    indices = np.ascontiguousarray(words[:, :, 0]).view(np.uint8)
    signs = _seven_bits(words[:, :, 1])
    return _bytes(_grid("IQ2_XXS")[indices], signs, _odd(words[:, :, 1] >> 28), blocks[:, :2])


def _seven_bits(words: npt.NDArray[np.uint32]) -> Bytes:
    """The signs of four times eight weights of each word, (count, words) -> (count, bytes)."""
    indices = words[:, :, None] >> np.array([0, 7, 14, 21], np.uint32) & 0x7F
    signs: Bytes = _signs()[indices]
    return signs.reshape(len(words), -1)


def _iq2_xs(blocks: Bytes) -> Bytes:
    words = np.ascontiguousarray(blocks[:, 2:66]).view(np.uint16)
    scales = _odd(_half_bytes(blocks[:, 66:]))
    return _bytes(_grid("IQ2_XS")[words & 511], _signs()[words >> 9], scales, blocks[:, :2])


def _iq2_s(blocks: Bytes) -> Bytes:
    indices, signs, high, scales = np.hsplit(blocks[:, 2:], [32, 64, 72])
    upper = (high[:, :, None] >> np.array([0, 2, 4, 6], np.uint8) & 3).reshape(len(blocks), -1)
    whole = indices | upper.astype(np.uint16) << 8
    return _bytes(_grid("IQ2_S")[whole], signs, _odd(_half_bytes(scales)), blocks[:, :2])


def _iq3_xxs(blocks: Bytes) -> Bytes:
    words = np.ascontiguousarray(blocks[:, 66:]).view(np.uint32)
    codes = _four_bits(_grid("IQ3_XXS")[blocks[:, 2:66]], _seven_bits(words))
    return _bytes(codes, _odd(words >> 28), blocks[:, :2])


def _iq3_s(blocks: Bytes) -> Bytes:
    indices, high, signs, scales = np.hsplit(blocks[:, 2:], [64, 72, 104])
    whole = indices | np.unpackbits(high, axis=1, bitorder="little").astype(np.uint16) << 8
    codes = _four_bits(_grid("IQ3_S")[whole], signs)
    return _bytes(codes, _odd(_half_bytes(scales)), blocks[:, :2])


def _iq1_s(blocks: Bytes) -> Bytes:
    high = np.ascontiguousarray(blocks[:, 34:]).view(np.uint16)
    upper = (high[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(len(blocks), -1)
    below = np.repeat(np.where(high >> 15, 0xFF, 0).astype(np.uint8), 4, axis=1)
    levels = _grid("IQ1_S")[blocks[:, 2:34] | upper << 8]
    return _bytes(levels, below, _odd(high >> 12 & 7), blocks[:, :2])


def _iq1_m(blocks: Bytes) -> Bytes:
    high = _half_bytes(blocks[:, 32:48])
    words = np.ascontiguousarray(blocks[:, 48:]).view(np.uint16)
    scales = (words[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(len(blocks), -1)
    d = np.bitwise_or.reduce(words >> 12 << np.array([0, 4, 8, 12], np.uint16), axis=1)
    levels = _grid("IQ1_S")[blocks[:, :32] | (high & 7).astype(np.uint16) << 8]
    below = np.where(high & 8, 0xFF, 0).astype(np.uint8)
    return _bytes(levels, below, _odd(scales), d[:, None])


_EXPANSIONS: Mapping[str, Callable[[Bytes], Bytes]] = {
    "NVFP4": _nvfp4,
    "TQ1_0": _tq1_0,
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
}
