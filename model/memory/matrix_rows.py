"""The bytes of a matrix's rows, where they are not a tensor's as they lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from urdir.model.families.stored import StoredMatrix
from urdir.ptxgen.weights.formats import FORMATS, Bytes, Format, format_of
from urdir.ptxgen.weights.layout import Layout

if TYPE_CHECKING:
    from urdir.model.files.gguf import Tensor


def format_in(of: StoredMatrix, tensor: Tensor) -> Format:
    """The type that a matrix has here: the tensor's, or f32 where its groups of values would lie
    across the rows."""
    return FORMATS["F32"] if of.transposed else format_of(tensor.type_id)


def source_rows(of: StoredMatrix, tensor: Tensor) -> Any:
    """The bytes of a matrix in its type, which are read in whole rows."""
    if of.is_whole:
        return tensor.data
    fmt = format_of(tensor.type_id)
    start, stop = of.columns or (0, of.shape[-1])
    bounds = (start, stop, of.shape[-1])
    at, end, whole = (Layout(fmt, 1, n).source_row_nbytes if n else 0 for n in bounds)
    taken = Rows(tensor.data, of, whole, at, end - at)
    return Transposed(taken, of, fmt) if of.transposed else taken


@dataclass(frozen=True, slots=True)
class Rows:
    """The bytes of some rows of every period of a tensor, put together as they are read: of each
    row, which has ``row_nbytes``, ``taken_nbytes`` from ``at`` on."""

    data: Any
    of: StoredMatrix
    row_nbytes: int
    at: int
    taken_nbytes: int

    def __getitem__(self, part: slice) -> Bytes:
        return self.read(part.start // self.taken_nbytes, part.stop // self.taken_nbytes)

    def read(self, row: int, last: int) -> Bytes:
        """The taken rows from number ``row`` to ``last``."""
        of, pieces = self.of, []
        while row < last:
            period, within = divmod(row, of.each)
            count = min(of.each - within, last - row)
            first = period * of.period + of.first + within
            pieces.append(self.data[first * self.row_nbytes : (first + count) * self.row_nbytes])
            row += count
        rows: Bytes = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        if self.taken_nbytes == self.row_nbytes:
            return rows
        columns = slice(self.at, self.at + self.taken_nbytes)
        return np.ascontiguousarray(rows.reshape(-1, self.row_nbytes)[:, columns]).reshape(-1)


@dataclass(frozen=True, slots=True)
class Transposed:
    """The taken rows of every period as columns, f32."""

    taken: Rows
    of: StoredMatrix
    format: Format

    def __getitem__(self, part: slice) -> Bytes:
        row_nbytes, height, width = 4 * self.of.cols, self.of.shape[-1], self.of.each
        row, last = part.start // row_nbytes, part.stop // row_nbytes
        first, end = row // height, -(-last // height)  # periods
        layout = Layout(self.format, (end - first) * width, height)
        values = layout.unpack(layout.pack(self.taken.read(first * width, end * width)))
        rows = values.reshape(-1, width, height).swapaxes(1, 2).reshape(-1, width)
        wanted = rows[row - first * height : last - first * height].astype(np.float32)
        return np.ascontiguousarray(wanted).reshape(-1).view(np.uint8)
