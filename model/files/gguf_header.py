"""GGUF header: metadata and tensor list; treats all bytes as untrusted.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Little endian:

    "GGUF"  u32 version  u64 n_tensors  u64 n_kv
    n_kv      x (string key, u32 type, value)           string = u64 length, bytes
    n_tensors x (string name, u32 n_dims, u64 dims[n_dims], u32 type, u64 offset)
    padding to general.alignment, tensor data (offsets count from here)

The reader of the `gguf` package takes seconds for a large vocabulary; this one milliseconds.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from urdir.model.errors import GgufError, UnsupportedError
from urdir.model.files import limits
from urdir.model.files.limits import Limit
from urdir.model.files.metadata import Metadata, StringArray, Value
from urdir.model.files.open_file import OpenFile

_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_ALIGNMENT = "general.alignment"
_STRING, _ARRAY, _UINT32 = 8, 9, 4
#: Bytes read at first, and the growth factor if the header is longer.
_FIRST_READ, _GROWTH = 1 << 20, 4

# Value type id -> dtype; 7 is a boolean, one byte. The two others are _STRING and _ARRAY.
_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_STRUCTS = {type_id: struct.Struct("<" + dtype.char) for type_id, dtype in _SCALARS.items()}
_STRUCTS[10], _STRUCTS[11] = struct.Struct("<Q"), struct.Struct("<q")  # numpy's char is 'L' / 'l'
_U32, _U64 = _STRUCTS[4], _STRUCTS[10]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's entry in the header; `offset` counts from the start of the data."""

    name: str
    dims: tuple[int, ...]
    type_id: int
    offset: int


@dataclass(frozen=True, slots=True)
class Header:
    """All of the file before the tensors' data."""

    version: int
    alignment: int
    metadata: Metadata
    tensors: tuple[TensorInfo, ...]
    data_start: int  # bytes from the start of the file


def read_header(file: OpenFile) -> Header:
    """Read the header. Raises GgufError if malformed, UnsupportedError if not supported."""
    cursor = _Cursor(file)
    version = _read_version(cursor)
    n_tensors = cursor.count(limits.TENSORS, min_size=8 + 4 + 4 + 8)
    n_values = cursor.count(limits.METADATA_KEYS, min_size=8 + 4 + 1)
    metadata = Metadata(_read_metadata(cursor, n_values), cursor.path)
    alignment = _read_alignment(metadata, cursor)
    tensors = tuple(_read_info(cursor) for _ in range(n_tensors))
    data_start = -(-cursor.position // alignment) * alignment
    return Header(version, alignment, metadata, tensors, data_start)


class _Cursor:
    """A position in the header; every read is checked against the file's end.

    `buffer` holds the part of the file that was needed so far.
    """

    __slots__ = ("_file", "buffer", "file_nbytes", "nested_arrays", "path", "position", "reading")

    def __init__(self, file: OpenFile) -> None:
        self._file = file
        self.file_nbytes = len(file)
        self.path = str(file.path)
        self.buffer = file.read(0, min(_FIRST_READ, len(file))).data
        self.position = 0
        self.nested_arrays = 0  # so far
        self.reading = "the header"  # what the error message names

    def fail(self, what: str) -> NoReturn:
        raise GgufError(f"{self.path}: {what}")

    def limit(self, limit: Limit, found: int) -> None:
        """Fail if ``found`` exceeds the limit."""
        limit.check(found, f"{self.path}: {self.reading}", GgufError)

    def ends(self) -> NoReturn:
        """Fail because the file ends too early."""
        size = f"{self.file_nbytes:,} bytes"
        self.fail(f"the file ends within {self.reading} ({size}): truncated or corrupt")

    def reach(self, end: int) -> None:
        """Extend the buffer to `end`; fail if the file is shorter, or the header too long."""
        if end > self.file_nbytes:
            self.ends()
        self.limit(limits.HEADER_NBYTES, end)
        nbytes = len(self.buffer)
        while nbytes < end:
            nbytes *= _GROWTH
        self.buffer = self._file.read(0, min(nbytes, self.file_nbytes)).data

    def take(self, nbytes: int) -> int:
        """Advance by `nbytes`; returns where they start."""
        start, end = self.position, self.position + nbytes
        if end > len(self.buffer):
            self.reach(end)
        self.position = end
        return start

    def scalar(self, kind: struct.Struct) -> Any:
        start = self.take(kind.size)
        return kind.unpack_from(self.buffer, start)[0]

    def string(self, limit: Limit) -> bytes:
        length = self.scalar(_U64)
        if length > self.file_nbytes - self.position:
            self.ends()
        self.limit(limit, length)
        start = self.take(length)
        return bytes(self.buffer[start : start + length])

    def name(self, what: str, limit: Limit) -> str:
        """A key or tensor name: non-empty and printable."""
        raw = self.string(limit)
        try:
            name = raw.decode()
        except UnicodeDecodeError:
            self.fail(f"{what} {raw[:40]!r} is not UTF-8: corrupt file")
        if not name:
            self.fail(f"an empty {what}: corrupt file")
        if not name.isprintable():  # it is printed in error messages
            self.fail(f"{what} {name[:40]!r} has unprintable characters: corrupt file")
        return name

    def count(self, limit: Limit, min_size: int, what: str | None = None) -> int:
        """A u64 number of items of at least `min_size` bytes each."""
        count: int = self.scalar(_U64)
        if count * min_size > self.file_nbytes - self.position:
            self.fail(
                f"claims {count:,} {what or limit.what}, more than {self.file_nbytes:,} bytes can "
                "hold: truncated or corrupt"
            )
        self.limit(limit, count)
        return count


def _read_version(cursor: _Cursor) -> int:
    """Check magic and version."""
    magic = bytes(cursor.buffer[:4])
    if magic != b"GGUF":
        cursor.fail(f"not a GGUF file (starts with {magic!r})")
    cursor.position = 4
    version: int = cursor.scalar(_U32)
    if version and version & 0xFFFF == 0:
        raise UnsupportedError(
            f"{cursor.path}: a big-endian GGUF file; convert it to little endian"
        )
    if version not in _VERSIONS:
        raise UnsupportedError(
            f"{cursor.path}: GGUF version {version}; versions 2 and 3 are supported"
        )
    return version


def _read_metadata(cursor: _Cursor, n_values: int) -> dict[str, Value]:
    values: dict[str, Value] = {}
    for _ in range(n_values):
        cursor.reading = "the metadata"
        key = cursor.name("metadata key", limits.KEY_NBYTES)
        if key in values:
            cursor.fail(f"metadata key '{key}' occurs twice: corrupt file")
        cursor.reading = f"metadata key '{key}'"
        type_id: int = cursor.scalar(_U32)
        if key == _ALIGNMENT and type_id != _UINT32:
            cursor.fail(f"{_ALIGNMENT} has value type {type_id}, expected {_UINT32} (a u32)")
        values[key] = _read_value(cursor, type_id)
    return values


def _read_value(cursor: _Cursor, type_id: int, depth: int = 0) -> Value:
    if type_id in _STRUCTS:
        value: Value = cursor.scalar(_STRUCTS[type_id])
        return value
    if type_id == _STRING:
        return cursor.string(limits.STRING_NBYTES).decode(errors="replace")
    if type_id == _ARRAY:
        return _read_array(cursor, depth + 1)
    cursor.fail(f"{cursor.reading} has value type {type_id}, which GGUF does not define")


def _read_array(cursor: _Cursor, depth: int) -> Value:
    cursor.limit(limits.NESTING, depth)
    cursor.nested_arrays += depth > 1
    cursor.limit(limits.NESTED_ARRAYS, cursor.nested_arrays)
    item_type: int = cursor.scalar(_U32)
    what = f"items in {cursor.reading}"
    if item_type in _SCALARS:
        dtype = _SCALARS[item_type]
        count = cursor.count(limits.ARRAY_ITEMS, dtype.itemsize, what)
        start = cursor.take(count * dtype.itemsize)
        if dtype == np.bool_:  # any non-zero byte is true; numpy needs 0 or 1
            return np.not_equal(np.frombuffer(cursor.buffer, np.uint8, count, start), 0)
        numbers: NDArray[Any] = np.frombuffer(cursor.buffer, dtype, count, start)
        return numbers
    if item_type == _STRING:
        return _read_strings(cursor, cursor.count(limits.ARRAY_ITEMS, 8, what))
    if item_type != _ARRAY:
        cursor.fail(f"{cursor.reading} has items of type {item_type}, which GGUF does not define")
    count = cursor.count(limits.NESTED_ARRAYS, 12, what)
    return [_read_value(cursor, item_type, depth) for _ in range(count)]


def _read_strings(cursor: _Cursor, count: int) -> StringArray:
    """Skip `count` strings by their lengths: the slow loop for a large vocabulary."""
    start = position = cursor.position
    length, ends = _U64.unpack_from, array("Q")
    append: Callable[[int], None] = ends.append
    while len(ends) < count:
        buffer = cursor.buffer
        try:
            for _ in range(count - len(ends)):
                position += 8 + length(buffer, position)[0]
                append(position)
        except (struct.error, OverflowError):  # the next length is not in the buffer yet
            cursor.reach(position + 8)
    cursor.take(position - start)
    return StringArray(cursor.buffer, start, ends)


def _read_alignment(metadata: Metadata, cursor: _Cursor) -> int:
    alignment = metadata.optional(_ALIGNMENT, int, _DEFAULT_ALIGNMENT)
    if alignment <= 0 or alignment & (alignment - 1):
        cursor.fail(f"general.alignment is {alignment}, not a power of two")
    limits.TENSOR_PADDING.check(alignment, f"{cursor.path}: {_ALIGNMENT}", GgufError)
    return alignment


def _read_info(cursor: _Cursor) -> TensorInfo:
    cursor.reading = "the tensor list"
    name = cursor.name("tensor name", limits.TENSOR_NAME_NBYTES)
    cursor.reading = f"the header of tensor '{name}'"
    n_dims: int = cursor.scalar(_U32)
    if not 1 <= n_dims <= limits.TENSOR_DIMS.most:
        most = limits.TENSOR_DIMS.most
        cursor.fail(f"tensor '{name}' has {n_dims} dimensions, expected 1 to {most}")
    dims = tuple(cursor.scalar(_U64) for _ in range(n_dims))
    if 0 in dims:
        cursor.fail(f"tensor '{name}' has an empty dimension: {list(dims)}")
    return TensorInfo(name, dims, cursor.scalar(_U32), cursor.scalar(_U64))
