"""Matrices converted row by row while they are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from urdir.model.files.quantised import quantizer
from urdir.model.files.safetensors import ITEM_NBYTES, StoredTensor
from urdir.model.files.tensor_types import tensor_type, type_number
from urdir.ptxgen.weights.formats import format_of
from urdir.ptxgen.weights.layout import Layout

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

#: Stored types that can be converted, with their ggml numbers.
GGML_TYPES = {"F32": 0, "F16": 1, "BF16": 30}
_CHUNK_VALUES = 1 << 20  # converted at once: 4 MiB as f32


@dataclass(frozen=True)
class Rows:
    """The rows of one or more stored tensors of equal shape, one after the other, reordered.

    The last two dimensions of ``transposed`` tensors are exchanged first.
    """

    parts: tuple[StoredTensor, ...]
    order: NDArray[np.intp] | None = None  # row i of each part's result is its row order[i]
    transposed: bool = False

    @property
    def dtype(self) -> str:
        """Stored element type."""
        return self.parts[0].dtype

    @property
    def width(self) -> int:
        """Elements per row."""
        shape = self.parts[0].shape
        return shape[-2] if self.transposed else shape[-1] if shape else 1

    @property
    def count(self) -> int:
        """Number of rows of all parts."""
        return len(self.parts) * (self.rows_each if self.order is None else len(self.order))

    @property
    def row_nbytes(self) -> int:
        """Bytes per stored row."""
        if self.dtype in ITEM_NBYTES:
            return self.width * ITEM_NBYTES[self.dtype]
        of = tensor_type(type_number(self.dtype))
        return self.width // of.block * of.nbytes

    @property
    def rows_each(self) -> int:
        """Number of rows of a part before they are reordered."""
        return len(self.parts[0].data) // self.row_nbytes

    def values(self) -> Floats:
        """All rows, (count, width) f32."""
        return self.floats(0, self.count)

    def raw(self, first: int, last: int) -> Bytes:
        """Rows [first, last) as stored, (last - first, row_nbytes)."""
        each = self.count // len(self.parts)
        pieces = []
        for part in range(first // each, -(-last // each)):
            within = slice(max(first - part * each, 0), min(last - part * each, each))
            if self.order is None:
                pieces.append(self._read(part, within.start, within.stop))
                continue
            wanted = self.order[within]  # within a few heads, so close together
            begin, end = int(wanted.min()), int(wanted.max()) + 1
            pieces.append(self._read(part, begin, end)[wanted - begin])
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _read(self, part: int, first: int, last: int) -> Bytes:
        """Rows [first, last) of a part, in stored order."""
        if self.transposed:
            return self._turned(part, first, last)
        read = self.parts[part].data[first * self.row_nbytes : last * self.row_nbytes]
        return read.reshape(last - first, self.row_nbytes)

    def _turned(self, part: int, first: int, last: int) -> Bytes:
        """Rows of a part whose matrices are stored transposed."""
        height = self.parts[part].shape[-1]
        pieces = []
        for number in range(first // height, -(-last // height)):
            matrix = self._matrix(part, number)
            start, stop = max(first - number * height, 0), min(last - number * height, height)
            pieces.append(np.ascontiguousarray(matrix[:, start:stop].swapaxes(0, 1)))
        return np.concatenate(pieces).reshape(last - first, self.row_nbytes)

    def _matrix(self, part: int, number: int) -> Bytes:
        """A stored matrix, (width, height, item) u8; the last one read is kept."""
        kept = self._kept.get("last")
        if kept is not None and kept[0] == (part, number):
            return kept[1]
        height, item = self.parts[part].shape[-1], ITEM_NBYTES[self.dtype]
        nbytes = self.width * height * item
        read = self.parts[part].data[number * nbytes : (number + 1) * nbytes]
        matrix = read.reshape(self.width, height, item)
        self._kept["last"] = ((part, number), matrix)
        return matrix

    @cached_property
    def _kept(self) -> dict[str, tuple[tuple[int, int], Bytes]]:
        return {}

    def floats(self, first: int, last: int) -> Floats:
        """Rows [first, last), (last - first, width) f32. Exact."""
        raw = np.ascontiguousarray(self.raw(first, last))
        if self.dtype == "BF16":
            return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
        if self.dtype not in GGML_TYPES:
            layout = Layout(format_of(type_number(self.dtype)), last - first, self.width)
            return layout.unpack(layout.pack(raw))
        return raw.view({"F32": "<f4", "F16": "<f2"}[self.dtype]).astype(np.float32)


@dataclass(frozen=True, slots=True)
class RowBytes:
    """Bytes of a tensor, converted when a slice is read; replaces an array. Thread-safe."""

    make: Callable[[int, int], Bytes]  # rows [first, last) -> (last - first, row_nbytes)
    rows: int
    row_nbytes: int
    rows_at_once: int
    #: The ggml type and the bytes of the float rows that ``make`` quantises; None: it does not.
    floats: tuple[int, Any] | None = None

    def __len__(self) -> int:
        return self.rows * self.row_nbytes

    def __getitem__(self, part: slice) -> Bytes:
        begin, end, step = part.indices(len(self))
        if end <= begin:
            return np.empty(0, np.uint8)
        first, last = begin // self.row_nbytes, -(-end // self.row_nbytes)
        made = np.empty((last - first, self.row_nbytes), np.uint8)
        for at in range(first, last, self.rows_at_once):
            to = min(at + self.rows_at_once, last)
            made[at - first : to - first] = self.make(at, to)
        skip = first * self.row_nbytes
        return made.reshape(-1)[begin - skip : end - skip : step]


def rows_at_once(width: int) -> int:
    """Rows of this many values that are converted at once."""
    return max(1, _CHUNK_VALUES // width)


def row_bytes(rows: Rows, type_id: int) -> Any:
    """The bytes of ``rows`` as the ggml type ``type_id``: a view of the file if no conversion is
    needed, else a ``RowBytes``.
    """
    of = tensor_type(type_id)
    row_nbytes = rows.width // of.block * of.nbytes
    at_once = rows_at_once(rows.width)
    if type_id == type_number(rows.dtype):
        if rows.order is None and len(rows.parts) == 1 and not rows.transposed:
            return rows.parts[0].data
        return RowBytes(rows.raw, rows.count, row_nbytes, at_once)
    make, stored, floats = quantizer(type_id), type_number(rows.dtype), None
    if rows.dtype in GGML_TYPES:
        floats = stored, row_bytes(rows, stored)
    return RowBytes(
        lambda first, last: make(rows.floats(first, last)), rows.count, row_nbytes, at_once, floats
    )
