"""Compiled kernels on disk: spec key -> PTX hash, and cubin key -> cubin.

A private folder of small files: ``specs/<spec key>`` holds a PTX hash, ``cubins/<cubin key>.cubin``
a cubin (tools that read ELF ignore what follows it). Each is followed by the SHA-256 of its key and
of itself, so that an entry is of use under its own name alone. A name ends in the format's number:
entries of another version are not found, and removed when they are the oldest. Entries are written
under a temporary name and renamed, so that processes may share the folder and none sees half an
entry. Code that another user could have put there is never loaded (`PrivateFolder`). A fault
of the disk costs a warning and a compilation; it never ends the run.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import time
import warnings
from pathlib import Path

from urdir.driver.private_folder import NEW, PrivateFolder

#: Default bound of the cubins' size in bytes.
DEFAULT_LIMIT = 1 << 30

# Temporary files belong to a process that is writing, until they are as old as this.
_ABANDONED_SECONDS = 3600

_DIGEST_BYTES = hashlib.sha256().digest_size

#: Of the stored entries (`_sealed`). A change of what they hold takes the next number.
FORMAT = 2


class CacheWarning(UserWarning):
    """The kernel cache could not be used as wanted; kernels are compiled instead."""


class CubinCache:
    """The cache in ``folder`` (made if need be), of at most ``limit`` bytes of cubins.

    Raises OSError when the folder cannot be used, see `PrivateFolder`.
    """

    def __init__(self, folder: Path, limit: int = DEFAULT_LIMIT) -> None:
        self.limit = limit
        self.folder = PrivateFolder(folder).path
        self._specs = PrivateFolder(self.folder / "specs")
        self._cubins = PrivateFolder(self.folder / "cubins")
        self._has_warned = False

    @classmethod
    def open(cls, folder: Path, limit: int = DEFAULT_LIMIT) -> CubinCache | None:
        """The cache in ``folder``; None, with a warning, where that cannot be used."""
        try:
            return cls(folder, limit)
        except OSError as exc:
            warnings.warn(
                f"kernels are compiled without the cache {folder}: {exc}; use a folder that only "
                "you can write to",
                CacheWarning,
                stacklevel=2,
            )
            return None

    def ptx_hash(self, spec_key: str) -> str | None:
        """The hash of the PTX that this spec was rendered to, None when not known."""
        data = self._read(self._specs, _file_name(spec_key))
        found = None if data is None else _unsealed(spec_key, data)
        return found.decode() if found and re.fullmatch(rb"[0-9a-f]{64}", found) else None

    def remember(self, spec_key: str, ptx_hash: str) -> None:
        """Note the hash of a spec's PTX."""
        self._write(self._specs, _file_name(spec_key), _sealed(spec_key, ptx_hash.encode()))

    def get(self, cubin_key: str) -> bytes | None:
        """The cubin, None when absent; a damaged one is deleted with a warning."""
        name = _cubin_name(cubin_key)
        data = self._read(self._cubins, name)
        if data is None:
            return None
        cubin = _unsealed(cubin_key, data)
        if not cubin:
            self.discard(cubin_key, "it is damaged")
            return None
        with contextlib.suppress(OSError):  # another process may have removed it
            self._cubins.touch(name)
        return cubin

    def put(self, cubin_key: str, cubin: bytes) -> None:
        """Keep a cubin, and remove the ones unused for longest while there are too many bytes."""
        self._write(self._cubins, _cubin_name(cubin_key), _sealed(cubin_key, cubin))
        self._trim()

    def discard(self, cubin_key: str, why: str) -> None:
        """Delete a cubin that is of no use, with a warning."""
        name = _cubin_name(cubin_key)
        path = self._cubins.path / name
        warnings.warn(f"cached kernel {path} is rebuilt: {why}", CacheWarning, stacklevel=3)
        with contextlib.suppress(OSError):
            self._cubins.remove(name)

    def clear(self) -> None:
        """Delete every entry."""
        for folder in (self._specs, self._cubins):
            for name, _ in folder.entries():
                with contextlib.suppress(FileNotFoundError):
                    folder.remove(name)

    def _read(self, folder: PrivateFolder, name: str) -> bytes | None:
        try:
            return folder.read(name)
        except FileNotFoundError:
            return None
        except OSError as exc:
            self._warn(f"cannot read {folder.path / name}: {exc}")
            return None

    def _write(self, folder: PrivateFolder, name: str, data: bytes) -> None:
        try:
            folder.write(name, data)
        except OSError as exc:
            self._warn(f"cannot write {folder.path / name}: {exc}")

    def _warn(self, what: str) -> None:
        """Say what is wrong with the disk, once: it may be so with hundreds of entries."""
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(f"kernel cache: {what}", CacheWarning, stacklevel=4)

    def _trim(self) -> None:
        entries = []
        abandoned = time.time() - _ABANDONED_SECONDS
        with contextlib.suppress(OSError):
            for name, found in self._cubins.entries():
                if not (name.startswith(NEW) and found.st_mtime > abandoned):
                    entries.append((found.st_mtime_ns, found.st_size, name))
        total = sum(size for _, size, _ in entries)
        for _, size, name in sorted(entries)[:-1]:  # the newest stays, whatever its size
            if total <= self.limit:
                return
            with contextlib.suppress(OSError):
                self._cubins.remove(name)
            total -= size


def _sealed(key: str, content: bytes) -> bytes:
    """An entry as it is stored."""
    return content + _digest(key, content)


def _unsealed(key: str, data: bytes) -> bytes | None:
    """The content of a stored entry; None for a damaged one, or another key's."""
    content, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    return content if _digest(key, content) == digest else None


def _digest(key: str, content: bytes) -> bytes:
    return hashlib.sha256(hashlib.sha256(key.encode()).digest() + content).digest()


def _cubin_name(cubin_key: str) -> str:
    return f"{_file_name(cubin_key)}.cubin"


def _file_name(key: str) -> str:
    """A key as a file name: readable where it can be, unique always."""
    if not re.fullmatch(r"\w[\w.\-]{0,160}", key):
        key = hashlib.sha256(key.encode()).hexdigest()
    return f"{key}.{FORMAT}"
