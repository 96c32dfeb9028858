"""Integer arithmetic that numpy lacks: bit fields, wide products, byte dot products."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def divide_toward_zero(a: Array, b: Array) -> Array:
    """Signed division that truncates."""
    quotient: Array = np.floor_divide(np.subtract(a, np.fmod(a, b)), b)
    return quotient


def mul_hi_64(a: Array, b: Array) -> Array:
    """The high 64 bits of a 128-bit product, signed or unsigned by dtype."""
    x, y = a.view(np.uint64), np.broadcast_to(b, a.shape).astype(b.dtype).view(np.uint64)
    low = np.uint64(0xFFFFFFFF)
    s = np.uint64(32)
    x0, x1, y0, y1 = x & low, x >> s, y & low, y >> s
    middle = x1 * y0 + ((x0 * y0) >> s)
    other = x0 * y1 + (middle & low)
    high = x1 * y1 + (middle >> s) + (other >> s)
    if a.dtype.kind == "i":
        high -= np.where(a < 0, y, np.uint64(0)) + np.where(y.view(np.int64) < 0, x, np.uint64(0))
    result: Array = high.view(a.dtype)
    return result


def leading_zeros(x: Array) -> Array:
    """Count of leading zero bits."""
    v, bits = x.copy(), 8 * x.dtype.itemsize
    shift = 1
    while shift < bits:
        v |= v >> x.dtype.type(shift)
        shift *= 2
    return bits - np.bitwise_count(v)


def find_bit(x: Array, shift_amount: bool) -> Array:
    """bfind: the highest bit that is not a sign, or the shift that makes it the first; or all
    ones."""
    sizes = np.where(x < 0, ~x, x).view(f"u{x.dtype.itemsize}")
    zeros = leading_zeros(sizes).astype(np.uint32)
    last = np.uint32(8 * x.dtype.itemsize - 1)
    found: Array = np.where(
        sizes == 0, np.uint32(0xFFFFFFFF), zeros if shift_amount else last - zeros
    )
    return found


def reverse_bits(x: Array) -> Array:
    """brev."""
    bits = 8 * x.dtype.itemsize
    kind = x.dtype.type
    v = x.byteswap()
    for shift, mask in ((4, 0x0F), (2, 0x33), (1, 0x55)):
        m = kind(int.from_bytes(bytes([mask] * (bits // 8)), "little"))
        v = ((v >> kind(shift)) & m) | ((v & m) << kind(shift))
    return v


def extract_bits(a: Array, position: Array, length: Array) -> Array:
    """bfe (PTX ISA 9.7.1.19): fields that reach beyond the word are filled with zero or sign."""
    bits = 8 * a.dtype.itemsize
    unsigned = a.view(f"u{a.dtype.itemsize}")
    at, size = (np.broadcast_to(v & 0xFF, a.shape).astype(np.int64) for v in (position, length))
    last = np.minimum(at + size - 1, bits - 1)
    mask = _ones(np.minimum(size, bits), unsigned.dtype)
    field: Array = (unsigned >> at.astype(unsigned.dtype)) & mask
    if a.dtype.kind == "u":
        return field
    one = unsigned.dtype.type(1)
    sign = ((unsigned >> last.clip(0).astype(unsigned.dtype)) & one).astype(bool) & (size > 0)
    available = np.clip(bits - at, 0, size)
    fill = ~_ones(available, unsigned.dtype)
    result: Array = np.where(sign, field | fill, field).view(a.dtype)
    return result


def _ones(count: Array, dtype: np.dtype[Any]) -> Array:
    """``count`` (0 to the width) low bits set."""
    full = dtype.type(np.iinfo(dtype).max)
    bits = 8 * dtype.itemsize
    mask: Array = full >> (bits - count).astype(dtype)
    return mask


def insert_bits(a: Array, b: Array, position: Array, length: Array) -> Array:
    """bfi: ``length`` low bits of a into b at ``position``."""
    bits = 8 * a.dtype.itemsize
    at, size = (np.broadcast_to(v & 0xFF, a.shape).astype(np.int64) for v in (position, length))
    shift = at.astype(a.dtype)
    mask = _ones(np.minimum(size, bits), a.dtype) << shift
    result: Array = (b & ~mask) | ((a << shift) & mask)
    return result


def permute_bytes(a: Array, b: Array, selector: Array) -> Array:
    """prmt.b32, default mode."""
    pair = (b.astype(np.uint64) << np.uint64(32)) | a
    result = np.zeros(a.shape, np.uint32)
    for at in range(4):
        nibble = (selector >> np.uint32(4 * at)) & np.uint32(15)
        byte = (pair >> ((nibble & np.uint32(7)) * np.uint32(8)).astype(np.uint64)).astype(np.uint8)
        signs = ((byte >> 7) * np.uint8(255)).astype(np.uint8)
        byte = np.where(nibble & np.uint32(8), signs, byte)
        result |= byte.astype(np.uint32) << np.uint32(8 * at)
    return result


#: The bytes of prmt's modes as selectors of the default one, by c's last two bits (PTX ISA, prmt).
_SELECTORS = {
    "f4e": (0x3210, 0x4321, 0x5432, 0x6543), "b4e": (0x5670, 0x6701, 0x7012, 0x0123),
    "rc8": (0x0000, 0x1111, 0x2222, 0x3333), "ecl": (0x3210, 0x3211, 0x3222, 0x3333),
    "ecr": (0x0000, 0x1110, 0x2210, 0x3210), "rc16": (0x1010, 0x3232, 0x1010, 0x3232),
}  # fmt: skip


def selectors(mode: str, places: Array) -> Array:
    """The selectors that permute_bytes takes in place of a mode and c of prmt."""
    found: Array = np.array(_SELECTORS[mode], np.uint32)[places & 3]
    return found


def dot_4(a: Array, b: Array, left: type, right: type) -> Array:
    """dp4a without its addend: four byte products, as uint32."""
    x, y = a.view(left).astype(np.int32), b.view(right).astype(np.int32)
    np.multiply(x, y, x)
    total = np.add(x[0::4], x[1::4])
    np.add(total, x[2::4], total)
    np.add(total, x[3::4], total)
    return total.view(np.uint32)


def dot_2(a: Array, b: Array, left: type[Any], right: type, first: int) -> Array:
    """dp2a without its addend: two 16-bit values of a times bytes ``first``, ``first + 1`` of b."""
    wide: type[Any] = np.uint16 if left is np.uint8 else np.int16
    x, y = a.view(wide).astype(np.int32), b.view(right).astype(np.int32)
    total: Array = x[0::2] * y[first::4] + x[1::2] * y[first + 1 :: 4]
    return total.view(np.uint32)
