"""Weights and activations as signed bytes, for products whose sums are int32 over all columns.

A weight is ``scale[row] * byte``, an activation ``scale[vector] * byte``, bytes from -127 to 127.
A product is ``scale[row] * scale[vector] * sum``.

Weights become bytes in registers, from the f16 values that products in f16 take (`halves`): the
factors of a row are multiplied with 2^9 / scale, so that its weights are 2^-15 times their bytes.
One fused multiply-add brings them to 1536 + byte, a f16 whose bits end with the byte.

Activations lie in slices of 128 places. Of each slice, eight vectors after another, lie 8 matrices
of 8 vectors x 16 bytes (`_wgmma.j2`): (slices, groups of 8 vectors, 8, 8 vectors, 16). Column
32u + 4j + b of a tile of 256, with t = u % 4, is in slice u / 4, there in matrix j, at byte 4t + b.
Bytes beyond the last column are 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from urdir.ptxgen.spec import ceil_div
from urdir.ptxgen.weights import e4m3
from urdir.ptxgen.weights.format import Format
from urdir.ptxgen.weights.formats import UNIT
from urdir.ptxgen.weights.halves import Halves
from urdir.ptxgen.weights.layout import TILE_COLS, TILE_ROWS, Layout
from urdir.ptxgen.weights.packed import GROUP

#: The largest byte.
MOST = 127
#: Places of a slice, bytes of a matrix' row, slices of a tile of weights.
SLICE, PIECE = 128, 16
TILE_SLICES = TILE_COLS // SLICE
#: Weights in f16 are 2^-DEPTH times their bytes.
DEPTH = 15
#: The least scale of a row, whose inverse is finite.
LEAST = 2.0**-100
#: The most columns: this many products of bytes are within 31 bits.
MOST_COLS = (2**31 - 1) // MOST**2

Bytes = npt.NDArray[np.int8]
Floats = npt.NDArray[np.float32]


def can_be_bytes(fmt: Format) -> bool:
    """Whether kernels make bytes of weights of this type: of quants with factors."""
    return fmt.arithmetic == "integers"


def are_e4m3(fmt: Format) -> bool:
    """Whether quants are multiplied as they are with activations as E4M3 numbers: floats of eight
    bits with a scale a row (``of_rows``), or one for each slice of a row's columns."""
    return fmt.element == "e4m3" and (fmt.of_rows or fmt.block == SLICE)


# ---- weights ----


def row_power(fmt: Format) -> float:
    """What a row's factors are multiplied with, times the row's scale."""
    return float(2.0 ** (24 - DEPTH - fmt.halvings))


def row_scales(layout: Layout, packed: npt.NDArray[np.uint8]) -> Floats:
    """The scale of each row, and what its factors are multiplied with (`row_power` / scale),
    (2, bands * 16) f32.

    The scale is a 127th of the largest |weight|, or more where the factors would leave f16: by
    their power (`Layout.powers_of`)."""
    largest = np.zeros(layout.bands * TILE_ROWS, np.float32)
    largest[: layout.rows] = np.abs(layout.unpack(packed)).max(axis=1)
    least = np.float32(least_scale(layout.format)) / layout.powers_of(packed)
    scales = np.maximum(np.maximum(largest * np.float32(1 / MOST), least), np.float32(LEAST))
    return np.stack([scales, np.float32(row_power(layout.format)) / scales])


def row_scales_nbytes(layout: Layout) -> int:
    """Bytes of as many."""
    return 8 * layout.bands * TILE_ROWS


def least_scale(fmt: Format) -> float:
    """Times 1 / power of a row: its least scale. Factors times the power are below 2^15; as f16
    they are to be finite."""
    return 0.501 * row_power(fmt)


def weight_bytes(layout: Layout, packed: npt.NDArray[np.uint8], scales: Floats) -> Bytes:
    """The weights (rows, cols) as kernels round them, with these `row_scales`: factors, scales,
    minimums and weights to f16, then to bytes."""
    fmt, groups = layout.format, layout.format.unit_groups
    power = scales[1, : layout.rows].repeat(layout.row_units)
    factor = _half(layout.factors(packed, "d") * power[:, None])
    if fmt.has("scale"):
        numbers = layout.numbers(packed, "scale", groups).astype(np.float64)
        factor = _half(factor * (numbers - fmt.scale_offset))
    offset = Halves(fmt).offset
    minimum = _half(factor * (-offset * 2.0**-24))
    if fmt.has_minimums:
        least = _half(fmt.min_sign * layout.factors(packed, "m") * power[:, None])
        numbers = np.ones((1, 1))
        if fmt.has("minimum"):
            numbers = layout.numbers(packed, "minimum", groups).astype(np.float64)
        minimum = _half(least * (numbers * 2.0**-24))
    q = layout.numbers(packed, "q", UNIT).astype(np.float64)
    if fmt.digits == 2:
        halves = _half(np.array(fmt.table) * 2.0**-24)[q.astype(np.uint8)]
        values = _half(halves.reshape(len(q), groups, -1) * factor[:, :, None])
        return np.rint(values * 2.0**DEPTH).astype(np.int8).reshape(layout.rows, layout.cols)
    if fmt.table:
        q = np.array(fmt.table, np.float64)[q.astype(np.uint8)] + offset
    elif fmt.grid:
        q = q + offset
    q = q.reshape(len(q), groups, -1) * 2.0**-24
    values = _half(q * factor[:, :, None] + minimum[:, :, None])
    return np.rint(values * 2.0**DEPTH).astype(np.int8).reshape(layout.rows, layout.cols)


def _half(x: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Rounded to f16."""
    rounded: npt.NDArray[np.float64] = x.astype(np.float16).astype(np.float64)
    return rounded


# ---- activations ----


def bytes_shape(vectors: int, cols: int) -> tuple[int, int, int, int, int]:
    """The shape of as many activation vectors of ``cols`` each."""
    slices = TILE_SLICES * ceil_div(cols, TILE_COLS)
    return slices, ceil_div(vectors, GROUP), SLICE // PIECE, GROUP, PIECE


def pack_bytes(x: npt.NDArray[Any]) -> tuple[Bytes, Floats]:
    """Activations (vectors, cols) f32 -> bytes of `bytes_shape`, and scales (vectors,)."""
    x = x.astype(np.float32)
    largest = np.abs(x).max(axis=1)
    # a vector of zeros, and of numbers whose inverse is beyond f32, is all zeros
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(MOST) / largest
    inverse[~np.isfinite(inverse)] = 0
    rounded = np.rint(x.astype(np.float64) * inverse[:, None].astype(np.float64)).astype(np.int8)
    return place_bytes(rounded), largest * np.float32(1 / MOST)


def pack_e4m3(x: npt.NDArray[Any]) -> tuple[npt.NDArray[np.uint8], Floats]:
    """Activations (vectors, cols) f32 -> E4M3 numbers of `bytes_shape`, and scales (vectors,): the
    largest number is the largest magnitude."""
    x = x.astype(np.float32)
    largest = np.abs(x).max(axis=1)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(e4m3.MOST) / largest
    inverse[~np.isfinite(inverse)] = 0
    numbers = e4m3.to_e4m3(x * inverse[:, None])
    placed = place_bytes(numbers.view(np.int8)).view(np.uint8)
    return placed, largest * np.float32(1 / e4m3.MOST)


def place_bytes(x: Bytes) -> Bytes:
    """Bytes (vectors, cols) -> `bytes_shape`."""
    slices, groups, pieces, _, _ = bytes_shape(*x.shape)
    padded = np.zeros((groups * GROUP, slices * SLICE), np.int8)
    padded[: x.shape[0], : x.shape[1]] = x
    # vector, slice, unit, quad, byte
    by_quad = padded.reshape(groups, GROUP, slices, SLICE // UNIT, pieces, 4)
    placed = by_quad.transpose(2, 0, 4, 1, 3, 5)
    return np.ascontiguousarray(placed).reshape(bytes_shape(*x.shape))


def unplace_bytes(packed: Bytes, vectors: int, cols: int) -> Bytes:
    """The other way, (vectors, cols)."""
    slices, groups, pieces = packed.shape[:3]
    by_piece = packed.reshape(slices, groups, pieces, GROUP, SLICE // UNIT, 4)
    rows = by_piece.transpose(1, 3, 0, 4, 2, 5).reshape(groups * GROUP, slices * SLICE)
    return np.ascontiguousarray(rows[:vectors, :cols])
