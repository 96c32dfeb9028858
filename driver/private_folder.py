"""A folder that no other user of the machine can change."""

from __future__ import annotations

import contextlib
import os
import stat
import weakref
from collections.abc import Iterator
from pathlib import Path

#: Prefix of temporary files, each of a process that is writing.
NEW = ".new-"

_MAX_LINKS = 40
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

# If the system has them. NONBLOCK: refuse a pipe instead of waiting for it.
_SAFE = sum(getattr(os, name, 0) for name in ("O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))


class PrivateFolder:
    """``path``, created if missing, private to this user (mode 0700).

    It is refused if another user could write to it or replace it: it must be this user's folder,
    not a link, without write permission for others. Every folder above it must belong to this user
    or root, and be writable only by its owner unless it is sticky, as /tmp is. Links above it are
    followed if they and their targets satisfy the same. Files in it are opened relative to its
    descriptor, and must be regular files of this user without write permission for others. On
    systems without user ids (Windows) the folder is only created.

    All methods raise OSError that names the refused path and the reason.
    """

    def __init__(self, path: Path) -> None:
        self.path = _absolute(path)
        self._descriptor: int | None = None
        if not hasattr(os, "geteuid"):
            self.path.mkdir(parents=True, exist_ok=True)
            return
        _check_way(self.path.parent)
        _make(self.path)
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | _SAFE)
        weakref.finalize(self, os.close, descriptor)
        self._descriptor = descriptor
        mode = _check_own(self.path, os.fstat(descriptor)).st_mode
        if mode & 0o077:
            with contextlib.suppress(OSError):  # read permission of others is harmless
                os.fchmod(descriptor, mode & 0o700)

    def read(self, name: str) -> bytes:
        """The contents of a file."""
        file = os.open(self._at(name), os.O_RDONLY | _SAFE, dir_fd=self._descriptor)
        with os.fdopen(file, "rb") as stream:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode):
                raise PermissionError(f"{self.path / name} is not a regular file")
            _check_own(self.path / name, found)
            return stream.read()

    def write(self, name: str, data: bytes) -> None:
        """Create or replace a file atomically."""
        temporary = NEW + os.urandom(8).hex()  # `secrets` takes 10 ms to import
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE
        file = os.open(self._at(temporary), flags, 0o600, dir_fd=self._descriptor)
        try:
            with os.fdopen(file, "wb") as stream:
                stream.write(data)
            folder = self._descriptor
            os.replace(self._at(temporary), self._at(name), src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(OSError):
                self.remove(temporary)
            raise

    def touch(self, name: str) -> None:
        """Update a file's time."""
        os.utime(self._at(name), dir_fd=self._descriptor)

    def remove(self, name: str) -> None:
        """Delete a file."""
        os.unlink(self._at(name), dir_fd=self._descriptor)

    def entries(self) -> Iterator[tuple[str, os.stat_result]]:
        """Names and attributes of the entries, without those that vanish meanwhile."""
        # By path: threads that list one descriptor would share its position.
        for entry in list(os.scandir(self.path)):
            with contextlib.suppress(FileNotFoundError):
                yield entry.name, entry.stat(follow_symlinks=False)

    def _at(self, name: str) -> str:
        """``name`` for functions that also take the folder's descriptor, if any."""
        return name if self._descriptor is not None else str(self.path / name)


def _absolute(path: Path) -> Path:
    try:
        return path.expanduser().absolute()
    except RuntimeError as exc:  # "~", with neither HOME nor a passwd entry
        raise FileNotFoundError(f"{path}: there is no home folder; set HOME") from exc


def _make(path: Path) -> None:
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)


def _check_way(path: Path, links: int = 0) -> None:
    """Create ``path`` if missing; PermissionError if another user could replace it.

    Works from the root, so that each folder is looked up in one that is known to be safe and cannot
    be replaced between check and use.
    """
    for part in (*reversed(path.parents), path):
        if not os.path.lexists(part):
            _make(part)
        found = part.lstat()
        _check_owner(part, found, os.geteuid(), 0)
        if stat.S_ISLNK(found.st_mode):
            if links >= _MAX_LINKS:
                raise PermissionError(f"{part} leads through too many links")
            _check_way(part.parent / part.readlink(), links + 1)
        elif found.st_mode & _OTHERS_WRITE and not found.st_mode & stat.S_ISVTX:
            raise PermissionError(f"{part} is writable by other users")


def _check_own(path: Path, found: os.stat_result) -> os.stat_result:
    """``found``, the attributes of ``path``; PermissionError if another user could change it."""
    if hasattr(os, "geteuid"):
        _check_owner(path, found, os.geteuid())
        if found.st_mode & _OTHERS_WRITE:
            raise PermissionError(f"{path} is writable by other users")
    return found


def _check_owner(path: Path, found: os.stat_result, *owners: int) -> None:
    if found.st_uid not in owners:
        raise PermissionError(f"{path} belongs to another user")
