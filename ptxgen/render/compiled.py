"""Compiled templates: Jinja's Python modules, in a folder beside the templates."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

import jinja2

import urdir.templates

#: The folder of urdir's templates.
SOURCES = Path(urdir.templates.__file__).resolve().parent
#: Part of a wheel, created in a checkout; compiled templates are stored nowhere else.
COMPILED = SOURCES / "compiled"


class TemplateModules:
    """One module per template in ``folder``, with the same path: the source that Jinja generated,
    then a digest.

    The digest, in a comment, covers that source and everything it depends on: the template's text,
    the version of Jinja, and ``environment``, which identifies the environment's options. A module
    with another digest counts as missing, so that a damaged or outdated one is never run.

    The folder is as safe as the sources beside it: write access to a module implies write access to
    the sources. A wheel's modules are created when it is built and do not change; Python caches
    their bytecode, as for any module. In a checkout, processes write missing or outdated modules.
    They use no bytecode there: Python would keep stale bytecode if a module were written twice
    within a second.
    """

    def __init__(self, folder: Path, environment: str) -> None:
        self._folder = folder
        self._identity = f"{jinja2.__version__} {environment}"
        self._in_checkout = (folder.parent.parent / "pyproject.toml").is_file()

    def code(self, file: str, text: Callable[[], str]) -> CodeType | None:
        """The code of a template; None without a valid module. ``text`` reads its source, and is
        called only if there is a module.
        """
        path = self._path(file)
        try:
            source, _, stamp = path.read_bytes().rpartition(b"\n")
        except OSError:
            return None
        if stamp != self._stamp(text(), source):
            return None
        if self._in_checkout:
            return _compile(source)
        code = SourceFileLoader(path.stem, str(path)).get_code(path.stem)
        return code.replace(co_filename=_FILE_NAME) if code else None

    def add(self, file: str, text: str, source: str) -> CodeType:
        """The code of a template without a valid module, from the source that Jinja generated.

        In this user's checkout the module is also written, if possible.
        """
        if self._in_checkout and _is_own(self._folder.parent):
            with contextlib.suppress(OSError):
                self.write(file, text, source)
        return _compile(source.encode())

    def write(self, file: str, text: str, source: str) -> None:
        """Write the module of a template atomically."""
        data = source.encode()  # first: its line numbers map to those of the text
        path = self._path(file)
        folders = [path.parent, *path.parent.parents]
        for folder in reversed(folders[: folders.index(self._folder) + 1]):
            folder.mkdir(mode=0o755, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(data + b"\n" + self._stamp(text, data))
            os.chmod(temporary, 0o644)  # readable like the templates
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    def _path(self, file: str) -> Path:
        path = self._folder / file.removesuffix(".j2")
        return path.with_name(path.name.replace(".", "_") + ".py")

    def _stamp(self, text: str, source: bytes) -> bytes:
        origin = hashlib.sha256(text.encode()).hexdigest()
        digest = hashlib.sha256(f"{self._identity} {origin}\n".encode() + source)
        return b"# " + digest.hexdigest().encode()


# In a traceback Jinja puts the template's line numbers beside this name.
_FILE_NAME = "<template>"


def _compile(source: bytes) -> CodeType:
    return compile(source, _FILE_NAME, "exec", dont_inherit=True)


def _is_own(folder: Path) -> bool:
    """Whether a folder belongs to this user: root could also write to another user's checkout."""
    return not hasattr(os, "geteuid") or folder.stat().st_uid == os.geteuid()
