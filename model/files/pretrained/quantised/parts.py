"""The stored tensors of one quantised matrix, checked as they are taken."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from urdir.model.errors import SafetensorsError, UnsupportedError
from urdir.model.files.pretrained.rows import RowBytes, rows_at_once
from urdir.model.files.safetensors import ITEM_NBYTES, StoredTensor
from urdir.ptxgen.weights.e4m3 import e4m3
from urdir.ptxgen.weights.formats import Format

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Shape = tuple[int | None, ...]

#: Types that scales may have.
SCALES = ("F32", "BF16", "F16")


@dataclass(slots=True)
class Parts:
    """The tensors of matrix ``base`` among ``stored``; ``taken``: their names, as they are used."""

    base: str
    stored: Mapping[str, StoredTensor]
    path: Path
    taken: list[str] = field(default_factory=list)

    def has(self, end: str) -> bool:
        """Whether there is a tensor ``base``_``end``."""
        return self._name(end) in self.stored

    def module_has(self, name: str) -> bool:
        """Whether the matrix's module has a tensor ``name``."""
        return self._in_module(name) in self.stored

    def dtype(self, end: str) -> str:
        """The type of a tensor that there must be."""
        return self._found(self._name(end)).dtype

    def take(self, end: str, dtypes: tuple[str, ...], *shapes: Shape) -> StoredTensor:
        """Tensor ``base``_``end``, or ``base``: of one of these types and shapes (None: any
        size)."""
        return self._take(self._name(end), dtypes, shapes)

    def take_of_module(self, name: str, dtypes: tuple[str, ...], *shapes: Shape) -> StoredTensor:
        """The same of tensor ``name`` of the matrix's module."""
        return self._take(self._in_module(name), dtypes, shapes)

    def drop(self, end: str) -> None:
        """Take a tensor that is not needed, if there is one."""
        if self.has(end):
            self.taken.append(self._name(end))

    def refuse(self, why: str) -> UnsupportedError:
        """For a matrix that no type fits."""
        return UnsupportedError(f"{self.path}: tensor '{self.base}' {why}")

    def make(
        self,
        fmt: Format,
        shape: tuple[int, ...],
        rows_of: Callable[[int, int], Bytes],
        quants: str,
    ) -> StoredTensor:
        """The matrix: ``rows_of`` gives the blocks of rows [first, last), counted over all leading
        dimensions of ``shape``; ``quants`` says in words how it is stored."""
        rows, cols = int(np.prod(shape[:-1])), shape[-1]
        data = RowBytes(rows_of, rows, cols // fmt.block * fmt.nbytes, rows_at_once(cols))
        file = self.stored[self.taken[0]].file
        return StoredTensor(self.base, fmt.name, shape, data, file, quants=quants)

    def _take(self, name: str, dtypes: tuple[str, ...], shapes: tuple[Shape, ...]) -> StoredTensor:
        tensor = self._found(name)
        fits = not shapes or any(_fits(tensor.shape, shape) for shape in shapes)
        if tensor.dtype not in dtypes or not fits:
            wanted = " or ".join(str(shape).replace("None", "any") for shape in shapes)
            raise SafetensorsError(
                f"{self.path}: tensor '{name}' is {tensor.dtype} {tensor.shape}, expected "
                f"{' or '.join(dtypes)} {wanted}"
            )
        self.taken.append(name)
        return tensor

    def _found(self, name: str) -> StoredTensor:
        if name not in self.stored:
            raise SafetensorsError(f"{self.path}: tensor '{name}' is missing")
        return self.stored[name]

    def _name(self, end: str) -> str:
        return f"{self.base}_{end}" if end else self.base

    def _in_module(self, name: str) -> str:
        return f"{self.base.rpartition('.')[0]}.{name}"


def _fits(shape: tuple[int, ...], wanted: Shape) -> bool:
    return len(shape) == len(wanted) and all(
        size is None or size == own for own, size in zip(shape, wanted, strict=True)
    )


def floats(tensor: StoredTensor) -> Floats:
    """All values of a tensor of scales, in its shape, f32. Exact."""
    return _floats(tensor.data[: len(tensor.data)], tensor.dtype).reshape(tensor.shape)


def floats_of(tensor: StoredTensor, first: int, last: int) -> Floats:
    """Rows [first, last) of a matrix of floats, (rows, cols) f32. Exact."""
    return _floats(rows_of(tensor, first, last), tensor.dtype).reshape(last - first, -1)


def _floats(data: Bytes, dtype: str) -> Floats:
    raw = np.ascontiguousarray(data).reshape(-1)
    if dtype == "BF16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype == "F8_E4M3":
        return e4m3()[raw]
    return raw.view({"F32": "<f4", "F16": "<f2"}[dtype]).astype(np.float32)


def rows_of(tensor: StoredTensor, first: int, last: int) -> Bytes:
    """Rows [first, last) of a tensor, counted over all leading dimensions, (rows, bytes)."""
    nbytes = tensor.shape[-1] * ITEM_NBYTES[tensor.dtype]
    return tensor.data[first * nbytes : last * nbytes].reshape(last - first, nbytes)


class Whole:
    """All of a tensor, of which ``rows`` rows are made: read when first needed, and forgotten with
    the last row, or once as many rows have been made, in any order (of several devices each makes
    some). Thread-safe."""

    def __init__(self, tensor: StoredTensor, rows: int) -> None:
        self._tensor = tensor
        self._rows = self._left = rows
        self._lock = threading.Lock()
        self._kept: Bytes | None = None

    def take(self, first: int, last: int) -> Bytes:
        """All bytes, for rows [first, last)."""
        with self._lock:
            if self._kept is None:
                self._kept = np.ascontiguousarray(self._tensor.data[: len(self._tensor.data)])
            found = self._kept
            self._left -= last - first
            if self._left <= 0 or last == self._rows:
                self._kept = None
            if self._left <= 0:
                self._left += self._rows
        return found
