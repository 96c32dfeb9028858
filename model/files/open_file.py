"""Files that are read on demand and must not change while open.

They are read with `pread`, not mapped: if a mapped file shrinks, the system kills the process
(SIGBUS). With a warm page cache that is as fast, see `memory.upload`.
"""

from __future__ import annotations

import os
import stat
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from urdir.model.errors import ModelError
from urdir.model.files.limits import Limit

Bytes = NDArray[np.uint8]

#: How a file begins that stands for a large one, and its size at most.
_POINTER, _POINTER_MOST = b"version https://git-lfs.github.com/spec/", 1024


class ByteSource(Protocol):
    """Bytes of a tensor: an array, or an object that makes slices on access."""

    def __len__(self) -> int: ...
    def __getitem__(self, part: slice, /) -> Bytes: ...


class OpenFile:
    """A regular, non-empty file; ``kind`` ("a GGUF file") is for messages.

    It is open as long as this object lives. All methods raise ``error`` if the file cannot be read,
    or was changed by another process (size or time) since it was opened.
    """

    def __init__(self, path: Path, kind: str, error: type[ModelError]) -> None:
        self.path = path
        self._error = error
        self._lock = threading.Lock()
        try:
            # NONBLOCK: refuse a pipe instead of waiting for it
            flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
            self._file = os.open(path, flags)
        except IsADirectoryError:
            raise error(f"{path}: a directory, not {kind}") from None
        except FileNotFoundError:
            raise error(f"{path}: {_absence(path)}") from None
        except (OSError, ValueError) as cause:  # ValueError: a NUL byte in the name
            raise error(f"{path}: cannot be read: {_reason(cause)}") from None
        weakref.finalize(self, os.close, self._file)
        status = os.fstat(self._file)
        if stat.S_ISDIR(status.st_mode):
            raise error(f"{path}: a directory, not {kind}")
        if not stat.S_ISREG(status.st_mode):
            raise error(f"{path}: not a regular file")
        if status.st_size == 0:
            raise error(f"{path}: the file is empty, not {kind}")
        self._size = status.st_size
        self._written = status.st_mtime_ns
        if self._size < _POINTER_MOST and self.read(0, self._size).tobytes().startswith(_POINTER):
            raise error(
                f"{path}: a Git LFS pointer, which a clone without Git LFS leaves in its place: "
                "run 'git lfs pull' there"
            )

    def __len__(self) -> int:
        return self._size

    def read(self, begin: int, end: int) -> Bytes:
        """The bytes [begin, end), which must lie within the file; read-only."""
        into = np.empty(end - begin, np.uint8)
        self.read_into(begin, into)
        into.flags.writeable = False
        return into

    def read_into(self, begin: int, into: Bytes) -> None:
        """Fill an array with the bytes from ``begin`` on. Thread-safe."""
        view, done = into.data, 0
        try:
            while done < len(view):
                count = self._read(view[done:], begin + done)
                if not count:
                    break
                done += count
            status = os.fstat(self._file)
        except OSError as cause:
            raise self._error(f"{self.path}: cannot be read: {_reason(cause)}") from None
        if done < len(view) or (status.st_size, status.st_mtime_ns) != (self._size, self._written):
            raise self._error(
                f"{self.path}: the file was changed while it was in use (it had {self._size:,} "
                f"bytes and has {status.st_size:,}); open it again"
            )

    def _read(self, view: memoryview, begin: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._file, [view], begin)
        with self._lock:  # Windows
            os.lseek(self._file, begin, os.SEEK_SET)
            data = os.read(self._file, len(view))
        view[: len(data)] = data
        return len(data)


@dataclass(frozen=True, slots=True)
class FileBytes:
    """The bytes [begin, end) of a file; a slice reads the file."""

    file: OpenFile
    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin

    def __getitem__(self, part: slice) -> Bytes:
        begin, end, step = part.indices(len(self))
        return self.file.read(self.begin + begin, self.begin + max(begin, end))[::step]

    def read_into(self, begin: int, into: Bytes) -> None:
        """Fill an array with the bytes from ``begin`` on."""
        self.file.read_into(self.begin + begin, into)


def read_whole(path: Path, kind: str, limit: Limit, error: type[ModelError]) -> bytes:
    """All bytes of a file; see `OpenFile`."""
    file = OpenFile(path, kind, error)
    limit.check(len(file), str(path), error)
    return file.read(0, len(file)).tobytes()


def _absence(path: Path) -> str:
    if path.is_symlink():
        return f"a link to {os.readlink(path)}, which does not exist"
    return "no such file"


def _reason(cause: OSError | ValueError) -> str:
    return getattr(cause, "strerror", None) or str(cause)
