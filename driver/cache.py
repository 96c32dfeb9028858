"""Compiled kernels on disk: spec key -> PTX hash, and cubin key -> cubin.

A private folder of small files: ``specs/<spec key>`` holds a PTX hash, ``cubins/<cubin key>.cubin``
a cubin followed by its SHA-256 (tools that read ELF ignore what follows it). Entries are written
under a temporary name and renamed, so that processes may share the folder and none sees half an
entry. Whatever goes wrong with the disk costs a warning and a compilation, never the run.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
import time
import warnings
from pathlib import Path

from urdir.driver.errors import DriverError

#: Default bound of the cubins' size in bytes.
DEFAULT_LIMIT = 1 << 30

# Temporary files, which belong to a process that is writing, until they are as old as this.
_NEW = ".new-"
_ABANDONED_SECONDS = 3600

_DIGEST_BYTES = hashlib.sha256().digest_size


class CacheWarning(UserWarning):
    """The kernel cache could not be used as wanted; kernels are compiled instead."""


class CubinCache:
    """The cache in ``folder`` (made, for this user only, if need be), at most ``limit`` bytes.

    Raises DriverError when the folder belongs to somebody else.
    """

    def __init__(self, folder: Path, limit: int = DEFAULT_LIMIT) -> None:
        self.folder = folder
        self.limit = limit
        self._specs = folder / "specs"
        self._cubins = folder / "cubins"
        for part in (folder, self._specs, self._cubins):
            make_private(part)

    def ptx_hash(self, spec_key: str) -> str | None:
        """The hash of the PTX that this spec was rendered to, None when not known."""
        data = self._read(self._specs / _file_name(spec_key))
        found = None if data is None else re.fullmatch(rb"[0-9a-f]{64}", data)
        return found[0].decode() if found else None

    def remember(self, spec_key: str, ptx_hash: str) -> None:
        """Note the hash of a spec's PTX."""
        self._write(self._specs / _file_name(spec_key), ptx_hash.encode())

    def get(self, cubin_key: str) -> bytes | None:
        """The cubin, None when absent; a damaged one is deleted with a warning."""
        path = self._cubin_path(cubin_key)
        data = self._read(path)
        if data is None:
            return None
        cubin, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
        if not cubin or hashlib.sha256(cubin).digest() != digest:
            self.discard(cubin_key, "it is damaged")
            return None
        with contextlib.suppress(OSError):  # another process may have removed it
            os.utime(path)
        return cubin

    def put(self, cubin_key: str, cubin: bytes) -> None:
        """Keep a cubin, and remove the ones unused for longest while there are too many bytes."""
        self._write(self._cubin_path(cubin_key), cubin + hashlib.sha256(cubin).digest())
        self._trim()

    def discard(self, cubin_key: str, why: str) -> None:
        """Delete a cubin that is of no use, with a warning."""
        path = self._cubin_path(cubin_key)
        warnings.warn(f"cached kernel {path} is rebuilt: {why}", CacheWarning, stacklevel=3)
        with contextlib.suppress(OSError):
            path.unlink()

    def clear(self) -> None:
        """Delete every entry."""
        for folder in (self._specs, self._cubins):
            with contextlib.suppress(FileNotFoundError):
                for entry in list(folder.iterdir()):
                    entry.unlink(missing_ok=True)

    def _cubin_path(self, cubin_key: str) -> Path:
        return self._cubins / f"{_file_name(cubin_key)}.cubin"

    def _read(self, path: Path) -> bytes | None:
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as exc:
            warnings.warn(f"kernel cache: cannot read {path}: {exc}", CacheWarning, stacklevel=4)
            return None

    def _write(self, path: Path, data: bytes) -> None:
        try:
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=_NEW)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(data)
                os.replace(temporary, path)
            except BaseException:
                Path(temporary).unlink(missing_ok=True)
                raise
        except OSError as exc:
            warnings.warn(f"kernel cache: cannot write {path}: {exc}", CacheWarning, stacklevel=4)

    def _trim(self) -> None:
        entries = []
        abandoned = time.time() - _ABANDONED_SECONDS
        with contextlib.suppress(OSError):  # others remove entries (or the folder) meanwhile
            for entry in list(os.scandir(self._cubins)):
                with contextlib.suppress(FileNotFoundError):
                    found = entry.stat()
                    if not (entry.name.startswith(_NEW) and found.st_mtime > abandoned):
                        entries.append((found.st_mtime_ns, found.st_size, entry.path))
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries)[:-1]:  # the newest stays, whatever its size
            if total <= self.limit:
                return
            with contextlib.suppress(OSError):
                os.unlink(path)
            total -= size


def make_private(folder: Path) -> Path:
    """``folder``, made if need be, for this user only. Raises DriverError where it cannot be."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if hasattr(os, "getuid"):
            if folder.stat().st_uid != os.getuid():
                raise DriverError(f"kernel cache {folder} belongs to another user; use another one")
            folder.chmod(0o700)
    except OSError as exc:
        raise DriverError(f"kernel cache {folder} cannot be used: {exc}") from exc
    return folder


def _file_name(key: str) -> str:
    """A key as a file name: readable where it can be, unique always."""
    if re.fullmatch(r"\w[\w.\-]{0,160}", key):
        return key
    return hashlib.sha256(key.encode()).hexdigest()
