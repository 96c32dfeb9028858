"""GGUF reader, versions 2 and 3, one file or several; treats all bytes as untrusted.

The header is read when a file is opened (`gguf_header`), a tensor's data when needed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from urdir.model.errors import GgufError, UnsupportedError
from urdir.model.files.gguf_header import Header, TensorInfo, read_header
from urdir.model.files.metadata import FOLDER, OWN, TOKENIZER, Metadata
from urdir.model.files.open_file import FileBytes, OpenFile
from urdir.model.files.opened import OpenedModel, Tensor
from urdir.model.files.split import join, part_paths
from urdir.model.files.tensor_types import TENSOR_TYPES


class Gguf(OpenedModel):
    """An open GGUF file: `metadata`, `tensors` by name, both in file order.

    Any part of a split model opens all of them: `path` and `metadata` are the first part's, and the
    tensors of all parts follow each other.

    If another process changes the file meanwhile, reading a tensor raises GgufError.
    """

    version: int
    alignment: int

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Read the header of `path`.

        Raises GgufError for an unreadable or malformed file, UnsupportedError for a valid file that
        this reader does not support (big endian, an unknown tensor type).
        """
        named = _read_file(Path(path))
        paths = part_paths(named.path, named.metadata)
        parts = [named if part == named.path else _read_file(part) for part in paths]
        first = parts[0]
        self.path, self.version, self.alignment = first.path, first.version, first.alignment
        self.nbytes = sum(part.nbytes for part in parts)
        self.metadata = _with_usual_names(first.metadata)
        self.tensors = join(parts)

    @property
    def format(self) -> str:
        """The file format and version."""
        return f"GGUF version {self.version}"


@dataclass(frozen=True, slots=True)
class _File:
    """The contents of one file."""

    path: Path
    version: int
    alignment: int
    nbytes: int
    metadata: Metadata
    tensors: dict[str, Tensor]


def _with_usual_names(metadata: Metadata) -> Metadata:
    """Metadata in which the tokeniser of a file made of a folder has its usual name; see `OWN`."""
    kind = metadata.get(TOKENIZER)
    is_own = isinstance(kind, str) and kind.startswith(OWN) and metadata.get(FOLDER) is True
    return metadata.replaced(TOKENIZER, str(kind).removeprefix(OWN)) if is_own else metadata


def _read_file(path: Path) -> _File:
    file = OpenFile(path, "a GGUF file", GgufError)
    header = read_header(file)
    tensors = {tensor.name: tensor for tensor in _locate(file, header)}
    return _File(path, header.version, header.alignment, len(file), header.metadata, tensors)


def _locate(file: OpenFile, header: Header) -> Iterable[Tensor]:
    """The tensors; each must begin where the previous one ends, as all writers lay them out.

    llama.cpp requires it too. Overlapping tensors would expand a small file.
    """
    names: set[str] = set()
    expected = 0
    for info in header.tensors:
        where = f"{file.path}: tensor '{info.name}'"
        if info.name in names:
            raise GgufError(f"{where} occurs twice: corrupt file")
        names.add(info.name)
        nbytes = _nbytes(info, where)
        if info.offset != expected:
            raise GgufError(
                f"{where} starts at offset {info.offset:,}, expected {expected:,}, the end of "
                f"the previous tensor aligned to {header.alignment}: corrupt file"
            )
        start = header.data_start + expected
        if start + nbytes > len(file):
            raise GgufError(
                f"{where} ends at byte {start + nbytes:,}, the file at {len(file):,}: truncated "
                "or corrupt"
            )
        expected += -(-nbytes // header.alignment) * header.alignment
        data = FileBytes(file, start, start + nbytes)
        yield Tensor(info.name, info.type_id, info.dims[::-1], start, nbytes, data)


def _nbytes(info: TensorInfo, where: str) -> int:
    """The size of a tensor, by its type."""
    if (kind := TENSOR_TYPES.get(info.type_id)) is None:
        raise UnsupportedError(f"{where} has unknown type {info.type_id}")
    if info.dims[0] % kind.block:
        raise GgufError(
            f"{where} has rows of {info.dims[0]}, not a multiple of its type's {kind.block}"
        )
    return math.prod(info.dims) // kind.block * kind.nbytes
