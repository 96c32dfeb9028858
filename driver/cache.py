"""Disk cache of compiled kernels: spec key -> PTX hash, and cubin key -> cubin.

A private folder of small files: ``specs/<spec key>`` holds a PTX hash, ``cubins/<cubin key>.cubin``
a cubin (ELF tools ignore what follows it). Each is followed by the SHA-256 of its key and contents,
so an entry is valid only under its own name. File names end in the format's number: entries of
another version are never read, and are evicted as the oldest. Entries are written under a temporary
name and renamed, so that processes may share the folder without seeing partial entries. Code that
another user could have written is never loaded (`PrivateFolder`). A disk error costs a warning and
a compilation, and never ends the run.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import time
import warnings
from pathlib import Path

from urdir.driver.private_folder import NEW, PrivateFolder

#: Default limit of the cubins' total size in bytes.
DEFAULT_LIMIT = 1 << 30

# Temporary files older than this are abandoned; newer ones belong to a process that is writing.
_ABANDONED_SECONDS = 3600

_DIGEST_BYTES = hashlib.sha256().digest_size

#: Format version of stored entries (`_sealed`); increase it when their contents change.
FORMAT = 2


class CacheWarning(UserWarning):
    """The kernel cache could not be used; kernels are compiled instead."""


class CubinCache:
    """The cache in ``folder`` (created if missing), with at most ``limit`` bytes of cubins.

    Raises OSError when the folder cannot be used, see `PrivateFolder`.
    """

    def __init__(self, folder: Path, limit: int = DEFAULT_LIMIT) -> None:
        self.limit = limit
        self.folder = PrivateFolder(folder).path
        self._specs = PrivateFolder(self.folder / "specs")
        self._cubins = PrivateFolder(self.folder / "cubins")
        self._has_warned = False
        #: Bytes that this object may write before it looks at the folder again.
        self._room = 0

    @classmethod
    def open(cls, folder: Path, limit: int = DEFAULT_LIMIT) -> CubinCache | None:
        """The cache in ``folder``; None, with a warning, if it cannot be used."""
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

    @property
    def is_empty(self) -> bool:
        """Whether no kernel was compiled yet."""
        return next(iter(self._specs.entries()), None) is None

    def ptx_hash(self, spec_key: str) -> str | None:
        """The hash of the PTX rendered from this spec; None if unknown."""
        data = self._read(self._specs, _file_name(spec_key))
        found = None if data is None else _unsealed(spec_key, data)
        return found.decode() if found and re.fullmatch(rb"[0-9a-f]{64}", found) else None

    def remember(self, spec_key: str, ptx_hash: str) -> None:
        """Store the hash of a spec's PTX."""
        self._write(self._specs, _file_name(spec_key), _sealed(spec_key, ptx_hash.encode()))

    def get(self, cubin_key: str) -> bytes | None:
        """The cubin, or None; a damaged entry is deleted with a warning."""
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
        """Store a cubin, and evict the least recently used ones above the size limit.

        The folder is listed only now and then, since it may have thousands of entries: again once
        half of what was free has been written. Others may write meanwhile.
        """
        data = _sealed(cubin_key, cubin)
        self._write(self._cubins, _cubin_name(cubin_key), data)
        self._room -= len(data)
        if self._room <= 0:
            self._trim()

    def discard(self, cubin_key: str, why: str) -> None:
        """Delete an unusable cubin with a warning."""
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
        """Warn about the disk once, since hundreds of entries may fail."""
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(f"kernel cache: {what}", CacheWarning, stacklevel=4)

    def _trim(self) -> None:
        self._room = 0
        entries, is_listed = [], False
        abandoned = time.time() - _ABANDONED_SECONDS
        with contextlib.suppress(OSError):
            for name, found in self._cubins.entries():
                if not (name.startswith(NEW) and found.st_mtime > abandoned):
                    entries.append((found.st_mtime_ns, found.st_size, name))
            is_listed = True
        total = sum(size for _, size, _ in entries)
        self._room = (self.limit - total) // 2 if is_listed else 0
        for _, size, name in sorted(entries)[:-1]:  # the newest stays, even above the limit
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
    """A key as a file name: readable if possible, always unique."""
    if not re.fullmatch(r"\w[\w.\-]{0,160}", key):
        key = hashlib.sha256(key.encode()).hexdigest()
    return f"{key}.{FORMAT}"
