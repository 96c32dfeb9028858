"""Blocks of the types that kernels read, made of rows of quants and scales."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from urdir.ptxgen.weights.formats import CODED, CODES, FORMATS, INTEGERS, Format

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


def e4m3_type(cols: int, block_cols: int | None = None) -> Format | None:
    """The type for rows of ``cols`` E4M3 numbers with a scale for each ``block_cols`` of them, or
    for all; None if there is none."""
    if block_cols is None and cols % 256 == 0:
        return FORMATS["E4M3R256"]
    for group in (128, 32):
        if cols % group == 0 and (block_cols is None or block_cols % group == 0):
            return FORMATS[f"E4M3G{group}"]
    return None


def e2m1_type(cols: int) -> Format | None:
    """The type for rows of ``cols`` E2M1 numbers with factors for each 16; None if there is
    none."""
    return next((FORMATS[f"E2M1G{n}"] for n in (256, 64) if cols % n == 0), None)


def integer_type(bits: int, cols: int, group: int) -> Format | None:
    """The type for rows of ``cols`` integers with scales for each ``group``; None if there is
    none."""
    for size in (128, 64, 32):
        if cols % size == 0 and group % size == 0:
            return INTEGERS[bits, size]
    return None


def code_type(kind: str, cols: int, group: int) -> Format | None:
    """The type for rows of ``cols`` codes of ``kind`` ("NF4", "FP4") with a scale for each
    ``group`` of a matrix' weights, row after row; None if there is none."""
    fits = (size for size in (64, 32) if cols % size == 0 and group % size == 0)
    return next((CODED[kind, size] for size in fits), None)


def e4m3_blocks(fmt: Format, quants: Bytes, scales: Floats) -> Bytes:
    """Quants (rows, cols) as stored, scales (rows, cols / block) f32 -> (rows, bytes)."""
    return _joined(fmt, scales.astype(np.float32), quants)


def e2m1_blocks(fmt: Format, codes: Bytes, factors: Bytes, scale: Floats) -> Bytes:
    """Codes (rows, cols / 2), the first in the lower half of a byte, factors (rows, cols / 16)
    E4M3, a scale of each row -> (rows, bytes)."""
    count = codes.shape[1] * 2 // fmt.block
    singles = np.repeat(scale[:, None] / np.float32(2), count, axis=1)
    return _joined(fmt, singles, factors, codes)


def code_blocks(fmt: Format, codes: Bytes, scales: Floats) -> Bytes:
    """Codes (rows, cols / 2), the first in the lower half of a byte, scales (rows, cols / block)
    f32: what the table's 1 stands for -> (rows, bytes)."""
    whole = np.float32(CODES[fmt.name.partition("G")[0]])
    return _joined(fmt, scales / whole, codes)


def mxfp4_blocks(codes: Bytes, exponents: Bytes) -> Bytes:
    """Codes (rows, cols / 2), the first in the lower half of a byte, exponents (rows, cols / 32) ->
    GGUF's blocks, whose bytes have codes 16 apart, (rows, bytes)."""
    pairs = codes.reshape(len(codes), -1, 16)
    values = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*pairs.shape[:2], 32)
    halves = values[..., :16] | values[..., 16:] << np.uint8(4)
    blocks: Bytes = np.concatenate([exponents[..., None], halves], axis=-1)
    return blocks.reshape(len(codes), -1)


def ternary_blocks(codes: Bytes, scale: float) -> Bytes:
    """Codes (rows, cols) of weights plus 1, a scale of all -> TQ2_0's blocks, whose bytes have
    codes 32 apart, (rows, bytes)."""
    digits = codes.reshape(len(codes), -1, 2, 4, 32) << np.array([0, 2, 4, 6], np.uint8)[:, None]
    quants = np.bitwise_or.reduce(digits, axis=3).reshape(len(codes), -1, 64)
    halves = np.full((*quants.shape[:2], 1), scale, np.float16).view(np.uint8)
    return np.concatenate([quants, halves], axis=2).reshape(len(codes), -1)


def integer_blocks(
    fmt: Format, bits: int, packed: Bytes, scales: Floats, zeros: NDArray[np.integer[Any]]
) -> Bytes:
    """``packed`` (rows, cols * bits / 8): a row's quants as consecutive bits, lowest first; scales
    and zero points (rows, cols / block), up to 2^bits -> (rows, bytes).

    A zero point that four bits do not hold is halved, and its factor doubled.
    """
    large = zeros > (255 if fmt.block == 32 or bits == 8 else 15)
    factors = np.stack([scales, np.where(large, 2 * scales, scales)], axis=-1).astype(np.float16)
    zeros = np.where(large, zeros // 2, zeros).astype(np.uint8)
    planes = (packed,) if bits != 3 else split_planes(packed)
    return _joined(fmt, factors, zeros, *planes)


def split_planes(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Rows of three-bit numbers as rows of their two lower bits, and of the upper ones."""
    digits = np.unpackbits(packed, axis=1, bitorder="little").reshape(len(packed), -1, 3)
    low = np.packbits(digits[..., :2].reshape(len(packed), -1), axis=1, bitorder="little")
    return low, np.packbits(digits[..., 2], axis=1, bitorder="little")


def pack_bits(values: Bytes, bits: int) -> Bytes:
    """Numbers (rows, cols) as consecutive bits, lowest first, (rows, cols * bits / 8)."""
    if bits == 8:
        return values
    if bits == 4:
        pairs: Bytes = values[:, ::2] | values[:, 1::2] << np.uint8(4)
        return pairs
    digits = values[..., None] >> np.arange(bits, dtype=np.uint8) & 1
    return np.packbits(digits.reshape(len(values), -1), axis=1, bitorder="little")


def unpack_bits(packed: Bytes, bits: int) -> Bytes:
    """The other way, (rows, cols) u8."""
    if bits == 8:
        return packed
    if bits == 4:
        return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
    digits = np.unpackbits(packed, axis=1, bitorder="little").reshape(len(packed), -1, bits)
    values: Bytes = (digits << np.arange(bits, dtype=np.uint8)).sum(axis=2, dtype=np.uint8)
    return values


def _joined(fmt: Format, *fields: NDArray[Any]) -> Bytes:
    """Fields of a row's blocks, one after the other in each block, (rows, bytes of a row)."""
    rows = len(fields[0])
    count = sum(field.nbytes for field in fields) // (rows * fmt.nbytes)
    parts = [
        np.ascontiguousarray(field).view(np.uint8).reshape(rows, count, -1) for field in fields
    ]
    return np.concatenate(parts, axis=2).reshape(rows, -1)
