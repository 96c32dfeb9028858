"""The GGUF reader: memory-mapped, versions 2 and 3; it trusts no byte of the file.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Little endian:

    "GGUF"  u32 version  u64 n_tensors  u64 n_kv
    n_kv      x (string key, u32 type, value)           string = u64 length, bytes
    n_tensors x (string name, u32 n_dims, u64 dims[n_dims], u32 type, u64 offset)
    padding to general.alignment, tensor data (offsets count from here)

The reader of the `gguf` package takes seconds for a large vocabulary.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from urdir.model.errors import GgufError, UnsupportedError
from urdir.model.files.mapping import map_file
from urdir.model.files.metadata import Metadata, StringArray, Value
from urdir.model.files.split import join, part_paths
from urdir.model.files.tensor_types import TENSOR_TYPES

_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4  # GGML_MAX_DIMS
_MAX_NESTING = 4  # arrays of arrays occur nowhere today
_STRING, _ARRAY = 8, 9

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

Bytes: TypeAlias = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the file, as stored."""

    name: str
    type_id: int  # ggml type, see TENSOR_TYPES
    shape: tuple[int, ...]  # numpy order: rows first, the contiguous dimension (ne[0]) last
    offset: int  # bytes from the start of the file
    nbytes: int
    data: Bytes  # (nbytes,) view of the mapping, read-only, copies nothing

    @property
    def type_name(self) -> str:
        """The type as ggml spells it: "F32", "Q4_K"."""
        return TENSOR_TYPES[self.type_id].name


class Gguf:
    """An open GGUF file: `metadata`, `tensors` by name, both in file order.

    Any part of a split model opens all of them: `path` and `metadata` are the first part's, and the
    tensors of all parts follow each other.

    A context manager. The mapping lives as long as the last view of it, so closing early is safe;
    the file must not be truncated by others while it is in use (the system would raise SIGBUS).
    """

    path: Path
    version: int
    alignment: int
    nbytes: int
    metadata: Metadata
    tensors: dict[str, Tensor]

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Map and read `path`.

        Raises GgufError for a file that cannot be read or is not well formed, UnsupportedError for
        a good file that this reader does not take (big endian, an unknown tensor type).
        """
        named = _read_file(Path(path))
        paths = part_paths(named.path, named.metadata)
        parts = [named if part == named.path else _read_file(part) for part in paths]
        first = parts[0]
        self.path, self.version, self.alignment = first.path, first.version, first.alignment
        self.nbytes = sum(part.nbytes for part in parts)
        self.metadata = first.metadata
        self.tensors = join(parts)

    def __enter__(self) -> Gguf:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Forget the tensors and metadata; the mapping goes when the last view of it does."""
        self.tensors = {}
        self.metadata = Metadata({}, str(self.path))

    @property
    def format(self) -> str:
        """What kind of file it is."""
        return f"GGUF version {self.version}"

    @property
    def architecture(self) -> str:
        """general.architecture; ConfigError where it is missing."""
        return self.metadata.require("general.architecture", str)


@dataclass(frozen=True, slots=True)
class _File:
    """What is in one file."""

    path: Path
    version: int
    alignment: int
    nbytes: int
    metadata: Metadata
    tensors: dict[str, Tensor]


def _read_file(path: Path) -> _File:
    mapping = map_file(path, "a GGUF file", GgufError)
    cursor = _Cursor(mapping, str(path))
    version = _read_version(cursor)
    n_tensors = cursor.count("tensors", min_size=8 + 4 + 4 + 8)
    n_values = cursor.count("metadata keys", min_size=8 + 4 + 1)
    metadata = Metadata(_read_metadata(cursor, n_values), str(path))
    alignment = _read_alignment(metadata, cursor)
    tensors = _read_tensors(cursor, n_tensors, alignment)
    return _File(path, version, alignment, len(mapping), metadata, tensors)


class _Cursor:
    """A position in the file; every read is checked against its end."""

    __slots__ = ("buffer", "path", "position", "reading")

    def __init__(self, buffer: memoryview, path: str) -> None:
        self.buffer = buffer
        self.position = 0
        self.reading = "the header"  # what the error message names
        self.path = path

    def fail(self, what: str) -> NoReturn:
        raise GgufError(f"{self.path}: {what}")

    def truncated(self) -> NoReturn:
        size = f"{len(self.buffer):,} bytes"
        self.fail(f"the file ends within {self.reading} ({size}): truncated or corrupt")

    def take(self, nbytes: int) -> int:
        """Advance by `nbytes`; returns where they start."""
        start = self.position
        if nbytes > len(self.buffer) - start:
            self.truncated()
        self.position = start + nbytes
        return start

    def scalar(self, kind: struct.Struct) -> Any:
        return kind.unpack_from(self.buffer, self.take(kind.size))[0]

    def string(self) -> bytes:
        length = self.scalar(_U64)
        start = self.take(length)
        return bytes(self.buffer[start : start + length])

    def name(self, what: str) -> str:
        """A key or tensor name: printable, not empty."""
        raw = self.string()
        try:
            name = raw.decode()
        except UnicodeDecodeError:
            self.fail(f"{what} {raw[:40]!r} is not UTF-8: corrupt file")
        if not name:
            self.fail(f"an empty {what}: corrupt file")
        if not name.isprintable():  # it goes into error messages, and to terminals
            self.fail(f"{what} {name[:40]!r} has unprintable characters: corrupt file")
        return name

    def count(self, what: str, min_size: int) -> int:
        """A u64 number of items of at least `min_size` bytes each."""
        count: int = self.scalar(_U64)
        if count * min_size > len(self.buffer) - self.position:
            self.fail(
                f"claims {count:,} {what}, more than {len(self.buffer):,} bytes can hold: "
                "truncated or corrupt"
            )
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
        key = cursor.name("metadata key")
        if key in values:
            cursor.fail(f"metadata key '{key}' occurs twice: corrupt file")
        cursor.reading = f"metadata key '{key}'"
        values[key] = _read_value(cursor, cursor.scalar(_U32))
    return values


def _read_value(cursor: _Cursor, type_id: int, depth: int = 0) -> Value:
    if type_id in _STRUCTS:
        value: Value = cursor.scalar(_STRUCTS[type_id])
        return value
    if type_id == _STRING:
        return cursor.string().decode(errors="replace")
    if type_id == _ARRAY:
        return _read_array(cursor, depth + 1)
    cursor.fail(f"{cursor.reading} has value type {type_id}, which GGUF does not define")


def _read_array(cursor: _Cursor, depth: int) -> Value:
    if depth > _MAX_NESTING:
        cursor.fail(f"{cursor.reading} nests arrays deeper than {_MAX_NESTING}: corrupt file")
    item_type: int = cursor.scalar(_U32)
    what = f"items in {cursor.reading}"
    if item_type in _SCALARS:
        dtype = _SCALARS[item_type]
        count = cursor.count(what, dtype.itemsize)
        start = cursor.take(count * dtype.itemsize)
        if dtype == np.bool_:  # any byte but 0 is true; numpy wants 0 or 1
            return np.not_equal(np.frombuffer(cursor.buffer, np.uint8, count, start), 0)
        numbers: NDArray[Any] = np.frombuffer(cursor.buffer, dtype, count, start)
        return numbers
    if item_type == _STRING:
        return _read_strings(cursor, cursor.count(what, min_size=8))
    count = cursor.count(what, min_size=12)
    return [_read_value(cursor, item_type, depth) for _ in range(count)]


def _read_strings(cursor: _Cursor, count: int) -> StringArray:
    """Walk over the lengths of `count` strings: the loop that is slow for a large vocabulary."""
    start = position = cursor.position
    buffer, length = cursor.buffer, _U64.unpack_from
    ends = array("Q")
    append: Callable[[int], None] = ends.append
    try:
        for _ in range(count):
            position += 8 + length(buffer, position)[0]
            append(position)
    except (struct.error, OverflowError):  # a length led past the end
        cursor.truncated()
    cursor.take(position - start)
    return StringArray(buffer, start, ends)


def _read_alignment(metadata: Metadata, cursor: _Cursor) -> int:
    alignment = metadata.optional("general.alignment", int, _DEFAULT_ALIGNMENT)
    if alignment <= 0 or alignment & (alignment - 1):
        cursor.fail(f"general.alignment is {alignment}, not a power of two")
    return alignment


@dataclass(frozen=True, slots=True)
class _Info:
    """A tensor's entry in the header; `offset` counts from the start of the data."""

    name: str
    dims: tuple[int, ...]
    type_id: int
    offset: int


def _read_tensors(cursor: _Cursor, n_tensors: int, alignment: int) -> dict[str, Tensor]:
    infos: dict[str, _Info] = {}
    for _ in range(n_tensors):
        info = _read_info(cursor)
        if info.name in infos:
            cursor.fail(f"tensor '{info.name}' occurs twice: corrupt file")
        infos[info.name] = info
    data_start = -(-cursor.position // alignment) * alignment
    return {name: _locate(cursor, info, data_start, alignment) for name, info in infos.items()}


def _read_info(cursor: _Cursor) -> _Info:
    cursor.reading = "the tensor list"
    name = cursor.name("tensor name")
    cursor.reading = f"the header of tensor '{name}'"
    n_dims: int = cursor.scalar(_U32)
    if not 1 <= n_dims <= _MAX_DIMS:
        cursor.fail(f"tensor '{name}' has {n_dims} dimensions, expected 1 to {_MAX_DIMS}")
    dims = tuple(cursor.scalar(_U64) for _ in range(n_dims))
    if 0 in dims:
        cursor.fail(f"tensor '{name}' has an empty dimension: {list(dims)}")
    return _Info(name, dims, cursor.scalar(_U32), cursor.scalar(_U64))


def _locate(cursor: _Cursor, info: _Info, data_start: int, alignment: int) -> Tensor:
    """Size a tensor by its type and check that it lies within the file."""
    name, dims = info.name, info.dims
    if (kind := TENSOR_TYPES.get(info.type_id)) is None:
        raise UnsupportedError(f"{cursor.path}: tensor '{name}' has unknown type {info.type_id}")
    if dims[0] % kind.block:
        cursor.fail(
            f"tensor '{name}' has rows of {dims[0]}, no multiple of its type's {kind.block}"
        )
    n_elements = 1
    for dim in dims:
        n_elements *= dim
    nbytes = n_elements // kind.block * kind.nbytes
    if info.offset % alignment:
        cursor.fail(f"tensor '{name}' starts at offset {info.offset}, not aligned to {alignment}")
    start = data_start + info.offset
    if start + nbytes > len(cursor.buffer):
        cursor.fail(
            f"tensor '{name}' ends at byte {start + nbytes:,}, "
            f"the file at {len(cursor.buffer):,}: truncated or corrupt"
        )
    data = np.frombuffer(cursor.buffer, np.uint8, nbytes, start)
    return Tensor(name, info.type_id, dims[::-1], start, nbytes, data)
