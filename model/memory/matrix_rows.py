"""Bytes of matrix rows that differ from the tensor's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from urdir.model.families.stored import Run, StoredMatrix, length
from urdir.model.files.pretrained.rows import RowBytes
from urdir.model.memory.quantising import FloatRows, can_quantise
from urdir.ptxgen.weights.formats import FORMATS, Bytes, Format, format_of
from urdir.ptxgen.weights.layout import Layout

if TYPE_CHECKING:
    from urdir.model.files.opened import Tensor


def format_in(of: StoredMatrix, tensor: Tensor) -> Format:
    """The type of a matrix on the device: the tensor's, or f32 or f16 if its groups of values would
    span rows."""
    if of.transposed:
        return FORMATS["F16" if of.half else "F32"]
    return format_of(tensor.type_id)


def source_rows(of: StoredMatrix, tensor: Tensor) -> Any:
    """The bytes of a matrix in its type, read in whole rows."""
    if of.is_whole:
        return tensor.data
    fmt, width = format_of(tensor.type_id), of.shape[-1]

    def nbytes(columns: int) -> int:
        return Layout(fmt, 1, columns).source_row_nbytes if columns else 0

    columns = of.columns or ((0, width),)
    parts = tuple((nbytes(start), nbytes(stop)) for start, stop in columns)
    taken = Rows(tensor.data, of, nbytes(width), parts)
    return Transposed(taken, of, fmt) if of.transposed else taken


def float_rows(of: StoredMatrix, tensor: Tensor) -> FloatRows | None:
    """The stored rows of a matrix that the device quantises; None for others: stored as they are,
    of a type that the processor makes, or parts of rows whose scale is the whole row's."""
    fmt, data = format_of(tensor.type_id), tensor.data
    if not isinstance(data, RowBytes) or data.floats is None or of.transposed:
        return None
    if not can_quantise(fmt) or (of.columns is not None and fmt.element is not None):
        return None
    type_id, floats = data.floats
    stored = replace(tensor, type_id=type_id, data=floats)
    return FloatRows(format_of(type_id), source_rows(of, stored))


@dataclass(frozen=True, slots=True)
class Rows:
    """The bytes of a matrix's rows, assembled from a tensor as they are read: of each row of
    ``row_nbytes`` bytes, some ``parts``."""

    data: Any
    of: StoredMatrix
    row_nbytes: int
    parts: tuple[Run, ...]

    def __getitem__(self, part: slice) -> Bytes:
        taken = length(self.parts)
        return self.read(part.start // taken, part.stop // taken)

    def read(self, row: int, last: int) -> Bytes:
        """The selected rows from number ``row`` to ``last``."""
        pieces = []
        for first, stop in row_runs(self.of, row, last):
            pieces.append(self.data[first * self.row_nbytes : stop * self.row_nbytes])
        rows: Bytes = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        if length(self.parts) == self.row_nbytes:
            return rows
        whole = rows.reshape(-1, self.row_nbytes)
        return np.concatenate([whole[:, slice(*part)] for part in self.parts], axis=1).reshape(-1)


def row_runs(of: StoredMatrix, row: int = 0, last: int | None = None) -> Iterator[Run]:
    """The rows of a matrix from number ``row`` to ``last`` (None: all) as runs of the tensor's."""
    passed, last = 0, of.taken if last is None else last
    for start, stop in of.runs or ((0, of.taken),):
        at, end = start + max(0, row - passed), min(stop, start + last - passed)
        passed += stop - start
        while at < end:
            period, within = divmod(at, of.each)
            count = min(of.each - within, end - at)
            first = period * of.period + of.first + within
            yield first, first + count
            at += count


@dataclass(frozen=True, slots=True)
class Transposed:
    """The selected rows of every period as columns, f32 or f16."""

    taken: Rows
    of: StoredMatrix
    format: Format

    def __getitem__(self, part: slice) -> Bytes:
        dtype = np.dtype(np.float16 if self.of.half else np.float32)
        height, width = self.of.shape[-1], self.of.each
        row_nbytes = dtype.itemsize * width
        row, last = part.start // row_nbytes, part.stop // row_nbytes
        first, end = row // height, -(-last // height)  # periods
        layout = Layout(self.format, (end - first) * width, height)
        values = layout.unpack(layout.pack(self.taken.read(first * width, end * width)))
        rows = values.reshape(-1, width, height).swapaxes(1, 2).reshape(-1, width)
        wanted = rows[row - first * height : last - first * height].astype(dtype)
        return np.ascontiguousarray(wanted).reshape(-1).view(np.uint8)
