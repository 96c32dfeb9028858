"""Packed integers: GPTQ, AWQ, and those of compressed-tensors."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from urdir.model.files.pretrained.quantised.blocks import (
    Bytes,
    Floats,
    integer_blocks,
    integer_type,
    pack_bits,
    unpack_bits,
)
from urdir.model.files.pretrained.quantised.parts import SCALES, Parts, Whole, floats, rows_of
from urdir.model.files.pretrained.quantised.scheme import Scheme
from urdir.model.files.safetensors import StoredTensor

#: AWQ: which of eight neighbouring numbers each four bits of a word are.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
#: Blocks may have twice a scale, as f16 (`integer_blocks`).
_MOST_SCALE = float(np.finfo(np.float16).max) / 2


def by_inputs(parts: Parts, scheme: Scheme) -> StoredTensor:
    """GPTQ and AWQ: qweight with a row for each input (or for several), scales (groups, rows),
    qzeros (groups, rows * bits / 32), g_idx (inputs).

    GPTQ packs along the inputs, AWQ along the rows. Columns in order of activations (g_idx) are
    sorted by group: see `SHARED_ORDERS`.
    """
    bits = _bits(parts, scheme)
    scales = parts.take_of_module("scales", SCALES, (None, None))
    groups, rows = scales.shape
    words = rows * bits // 32
    if rows * bits % 32:
        raise parts.refuse(f"has {rows} rows of {bits} bits, expected whole words")
    stored_zeros = parts.take_of_module("qzeros", ("I32",), (groups, words))

    def zeros_of() -> NDArray[np.uint16]:
        return _zeros(stored_zeros, bits, scheme)

    if scheme.interleaved:
        stored = parts.take_of_module("qweight", ("I32",), (None, words))
        cols = stored.shape[0]
    else:
        stored = parts.take_of_module("qweight", ("I32",), (None, rows))
        cols = stored.shape[0] * 32 // bits
    whole = Whole(stored, rows)

    def packed(first: int, last: int) -> Bytes:
        raw = whole.take(first, last).view("<u4").reshape(stored.shape)
        if not scheme.interleaved:
            return np.ascontiguousarray(raw[:, first:last].T).view(np.uint8)
        begin, end = first // 8, -(-last // 8)
        values = _uninterleaved(np.ascontiguousarray(raw[:, begin:end]))
        return pack_bits(np.ascontiguousarray(values[:, first - 8 * begin : last - 8 * begin].T), 4)

    order = None
    if parts.module_has("g_idx"):
        order = _order(parts, parts.take_of_module("g_idx", ("I32",), (cols,)), groups)
    return _made(
        parts, bits, (rows, cols, groups), packed, lambda: (floats(scales).T, zeros_of().T), order
    )


def by_outputs(parts: Parts, scheme: Scheme) -> StoredTensor:
    """compressed-tensors: N_packed (rows, cols * bits / 32), N_scale (rows, groups), N_zero_point
    (rows * bits / 32, groups), all with half of the range added; N_shape, N_g_idx."""
    bits = _bits(parts, scheme)
    stored = parts.take("packed", ("I32",), (None, None))
    rows, cols = stored.shape[0], stored.shape[1] * 32 // bits
    parts.drop("shape")  # that of the packed tensor, if columns are whole groups
    scales = parts.take("scale", SCALES, (rows, None))
    groups = scales.shape[1]
    along = None
    if parts.has("zero_point"):
        if rows * bits % 32:
            raise parts.refuse(
                f"has zero points of {rows} rows of {bits} bits, expected whole words"
            )
        along = parts.take("zero_point", ("I32",), (rows * bits // 32, groups))
    order = None
    if parts.has("g_idx"):
        order = _order(parts, parts.take("g_idx", ("I32",), (cols,)), groups)

    def packed(first: int, last: int) -> Bytes:
        return rows_of(stored, first, last)

    def numbers() -> tuple[Floats, Bytes]:
        if along is None:
            return floats(scales), np.full((rows, groups), 1 << (bits - 1), np.uint8)
        raw = _words(along)
        return floats(scales), unpack_bits(np.ascontiguousarray(raw.T).view(np.uint8), bits).T

    return _made(parts, bits, (rows, cols, groups), packed, numbers, order)


def whole(parts: Parts) -> StoredTensor:
    """N (rows, cols) I8, symmetric, N_scale of rows or the matrix."""
    stored = parts.take("", ("I8",), (None, None))
    rows = stored.shape[0]
    scales = floats(parts.take("scale", SCALES, (rows, 1), (rows,), (1,), ())).reshape(-1, 1)
    return rows_of_eight(parts, stored, np.broadcast_to(scales, (rows, 1)))


def rows_of_eight(parts: Parts, stored: StoredTensor, scales: Floats) -> StoredTensor:
    """A matrix of signed bytes (rows, cols) with ``scales`` (rows, 1)."""
    rows, cols = stored.shape

    def packed(first: int, last: int) -> Bytes:
        return rows_of(stored, first, last) ^ np.uint8(128)

    def numbers() -> tuple[Floats, Bytes]:
        return scales, np.full((rows, 1), 128, np.uint8)

    return _made(parts, 8, (rows, cols, 1), packed, numbers, None)


def _bits(parts: Parts, scheme: Scheme) -> int:
    if scheme.bits is None:
        raise parts.refuse("is packed, and quantization_config says no number of bits")
    return scheme.bits


def _made(
    parts: Parts,
    bits: int,
    shape: tuple[int, int, int],
    packed: Callable[[int, int], Bytes],
    numbers: Callable[[], tuple[Floats, NDArray[Any]]],
    order: NDArray[np.intp] | None,
) -> StoredTensor:
    """The matrix of ``shape``, rows, columns and groups of a row, of ``packed`` quants, (rows,
    bytes) for some rows, and of ``numbers``, the scales and zero points (rows, groups), after its
    columns were brought into an order."""
    rows, cols, groups = shape
    fmt = integer_type(bits, cols, cols // groups) if cols % groups == 0 else None
    if fmt is None:
        raise parts.refuse(
            f"has {cols} columns in {groups} groups; supported are groups of 32, 64 and multiples "
            "of 128"
        )
    each = cols // groups // fmt.block
    scaled = f"groups of {cols // groups}" if groups > 1 else "scales of rows"
    in_order = ", columns in order of activations" if order is not None else ""

    @functools.cache
    def checked() -> tuple[Floats, NDArray[Any]]:
        scales, zeros = numbers()
        if not np.all(np.abs(scales) <= _MOST_SCALE):  # NaN is not, either
            raise parts.refuse("has scales beyond f16")
        if np.any(scales.astype(np.float16).astype(np.float32) != scales):
            warnings.warn(
                f"{parts.path}: scales of '{parts.base}' are rounded to f16", stacklevel=2
            )
        return scales, zeros

    def make(first: int, last: int) -> Bytes:
        quants = packed(first, last)
        if order is not None:
            quants = pack_bits(unpack_bits(quants, bits)[:, order], bits)
        of_rows = (np.repeat(x[first:last], each, axis=1) for x in checked())
        return integer_blocks(fmt, bits, quants, *of_rows)

    made = parts.make(fmt, (rows, cols), make, f"integers of {bits} bits, {scaled}{in_order}")
    return replace(made, order=order)


def _zeros(stored: StoredTensor, bits: int, scheme: Scheme) -> NDArray[np.uint16]:
    """Zero points (groups, rows) of words (groups, rows * bits / 32)."""
    raw = _words(stored)
    values = _uninterleaved(raw) if scheme.interleaved else unpack_bits(raw.view(np.uint8), bits)
    return values.astype(np.uint16) + np.uint16(scheme.zero_added)


def _words(stored: StoredTensor) -> NDArray[np.uint32]:
    raw = np.ascontiguousarray(stored.data[: len(stored.data)])
    return raw.view("<u4").reshape(stored.shape)


def _uninterleaved(words: NDArray[np.uint32]) -> Bytes:
    """Words (rows, n) as AWQ packs them -> (rows, 8n) u8 in order."""
    halves = unpack_bits(words.view(np.uint8), 4).reshape(len(words), -1, 8)
    return halves[..., np.argsort(_AWQ_ORDER)].reshape(len(words), -1)


def _order(parts: Parts, stored: StoredTensor, groups: int) -> NDArray[np.intp] | None:
    """The columns by group, None if they are in order."""
    of = np.ascontiguousarray(stored.data[: len(stored.data)]).view("<i4")
    cols = len(of)
    wanted = np.arange(cols) // (cols // groups if cols % groups == 0 else cols)
    if np.array_equal(of, wanted):
        return None
    order = np.argsort(of, kind="stable")
    if not np.array_equal(of[order], wanted):
        raise parts.refuse(f"has groups (g_idx) that are not {groups} of equal size")
    return order
