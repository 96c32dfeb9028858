"""Matrix products of a warpgroup, wgmma (PTX ISA 9.7.15): fragments, operands in shared memory.

Products are exact; sums are taken in float64 and rounded once per instruction to the accumulators'
type (hardware truncates in between, in an undocumented way). Sums of integers are exact.

A warpgroup is four warps; its 128 lanes hold the fragments of A (64, K) and D (64, N). K is 16, of
bytes 32. Matrices in shared memory consist of rows of 16 bytes, eight or sixteen values each, which
a descriptor addresses. Bytes have K as their second dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from urdir.driver.emulator.machine.formats import bf16_to_f32, e4m3_to_f32

Array = npt.NDArray[Any]

#: Lanes of a warpgroup.
WARPGROUP = 128
M, K = 64, 16
#: Values of a 16-byte row. There are twice as many bytes, and of K.
ROW = 8

#: Accumulators: PTX type -> numpy type, and how many of them a register holds.
ACCUMULATORS: Mapping[str, tuple[np.dtype[Any], int]] = {
    "f32": (np.dtype(np.float32), 1),
    "f16": (np.dtype(np.float16), 2),
    "s32": (np.dtype(np.int32), 1),
}


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A matrix in shared memory (PTX ISA 9.7.15.5.1.2); addresses and offsets in bytes.

    ``swizzle`` is how many bytes its pattern is wide: 16 (none), 32, 64 or 128.
    """

    start: int
    leading: int
    stride: int
    base: int
    swizzle: int

    @staticmethod
    def decode(bits: int) -> Descriptor:
        """The descriptor that a 64-bit register holds."""
        start, leading, stride = ((bits >> at & 0x3FFF) << 4 for at in (0, 16, 32))
        return Descriptor(start, leading, stride, bits >> 49 & 7, (16, 128, 64, 32)[bits >> 62])

    def rows(self, extent: int, is_transposed: bool) -> Array:
        """The addresses of a matrix of ``extent`` x K values, as 16-byte rows: (extent, 2), or if
        transposed (K, extent / 8). uint64."""
        return self._swizzle(self.start + _offsets(self, extent, is_transposed)).astype(np.uint64)

    def _swizzle(self, address: Array) -> Array:
        """Swizzle: permute the 16-byte rows within each 128 bytes by XOR with the number of the
        128-byte row, counted from the start of the pattern."""
        if self.swizzle == 16:
            return address
        line = (address >> 7) - self.base
        swizzled: Array = address ^ ((line & (self.swizzle // 16 - 1)) << 4)
        return swizzled


def _offsets(d: Descriptor, extent: int, is_transposed: bool) -> Array:
    return _offsets_of(d.leading, d.stride, d.swizzle, extent, is_transposed)


@functools.lru_cache(maxsize=256)
def _offsets_of(leading: int, stride: int, swizzle: int, extent: int, is_transposed: bool) -> Array:
    """Positions of the 16-byte rows before swizzling (PTX ISA 9.7.15.5.1, "Canonical layouts")."""
    wide = swizzle // 16  # rows side by side in a pattern
    if is_transposed:
        k, at = np.arange(K)[:, None], np.arange(extent // ROW)
        far, near = (leading, stride) if wide == 1 else (stride, leading)
        return k % 8 * swizzle + k // 8 * far + at % wide * 16 + at // wide * near
    at, half = np.arange(extent)[:, None], np.arange(K // ROW)
    return at % 8 * swizzle + at // 8 * stride + half * (leading if wide == 1 else 16)


def from_rows(rows: Array, kind: str, extent: int, is_transposed: bool) -> Array:
    """16-byte rows (W * n,), as ``Descriptor.rows`` finds them, to matrices (W, extent, K)."""
    if is_transposed:
        return np.swapaxes(values(rows, kind).reshape(-1, K, extent), 1, 2)
    found = values(rows, kind)
    return found.reshape(-1, extent, K if kind in ("f16", "bf16") else 2 * K)


def values(bits: Array, kind: str) -> Array:
    """f16, bf16 and e4m3 (as f32) or s8 values, from memory of any element size."""
    if kind == "e4m3":
        return e4m3_to_f32(bits.view(np.uint8))
    if kind == "bf16":
        return bf16_to_f32(bits.view(np.uint16))
    return bits.view(np.int8 if kind == "s8" else np.float16)


def a_fragments(registers: Array, kind: str) -> Array:
    """A's registers (4, W * 128) uint32 to matrices (W, M, K)."""
    found = values(np.ascontiguousarray(registers), kind)
    per_register = found.shape[1] // registers.shape[1]
    split = found.reshape(2, 2, -1, 4, 8, 4, per_register)
    matrices: Array = split.transpose(2, 3, 1, 4, 0, 5, 6).reshape(-1, M, 8 * per_register)
    return matrices


def d_matrices(registers: Array, kind: str) -> Array:
    """D's registers (n, W * 128) uint32 to matrices (W, M, N) of the accumulators' type."""
    element, packed = ACCUMULATORS[kind]
    count = registers.shape[1] // WARPGROUP
    bits = np.ascontiguousarray(registers).view(element)
    if packed == 2:
        split = bits.reshape(-1, 2, count, 4, 8, 4, 2).transpose(2, 3, 1, 4, 0, 5, 6)
    else:
        split = bits.reshape(-1, 2, 2, count, 4, 8, 4).transpose(3, 4, 1, 5, 0, 6, 2)
    return split.reshape(count, M, -1)


def d_registers(matrices: Array) -> Array:
    """The inverse of ``d_matrices``: (W, M, N) to (n, W * 128) uint32."""
    split = matrices.reshape(matrices.shape[0], 4, 2, 8, -1, 4, 2)
    order = (4, 2, 0, 1, 3, 5, 6) if matrices.itemsize == 2 else (4, 2, 6, 0, 1, 3, 5)
    bits = np.ascontiguousarray(split.transpose(order)).view(np.uint32)
    return bits.reshape(-1, matrices.shape[0] * WARPGROUP)


def product(a: Array, b: Array) -> Array:
    """A (W, M, K) times B (W, N, K), transposed: (W, M, N) float64."""
    result: Array = np.matmul(a.astype(np.float64), np.swapaxes(b.astype(np.float64), 1, 2))
    return result
