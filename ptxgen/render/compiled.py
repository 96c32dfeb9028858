"""Templates as modules of Python, as Jinja compiles them, in a folder beside the templates."""

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

#: Where urdir's templates are.
SOURCES = Path(urdir.templates.__file__).resolve().parent
#: A wheel brings it, a checkout makes it; code is kept nowhere else.
COMPILED = SOURCES / "compiled"


class TemplateModules:
    """One module a template in ``folder``, by the same path: the source that Jinja generated, then
    a digest.

    The digest, in a comment, is of that source and of all that it depends on: the template's text,
    the version of Jinja, and ``environment``, which identifies the environment's options. A module
    with another digest counts as missing, so that a damaged or outdated one is never run.

    The folder is as safe as the sources beside it: whoever can write a module there can change
    those, too. A wheel's modules are made when it is built and do not change; Python keeps their
    bytecode, as for any module. In a checkout, processes write the modules that are missing or
    outdated. They use no bytecode there: Python would take stale bytecode for good where a module
    is written twice in a second.
    """

    def __init__(self, folder: Path, environment: str) -> None:
        self._folder = folder
        self._identity = f"{jinja2.__version__} {environment}"
        self._in_checkout = (folder.parent.parent / "pyproject.toml").is_file()

    def code(self, file: str, text: Callable[[], str]) -> CodeType | None:
        """The code of a template; None where there is no good module. ``text`` reads its source,
        and is asked only where there is a module at all.
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
        """The code of a template that has no good module, from the source that Jinja generated.

        A checkout of this user's gets the module; where it cannot be written, it stays missing.
        """
        if self._in_checkout and _is_own(self._folder.parent):
            with contextlib.suppress(OSError):
                self.write(file, text, source)
        return _compile(source.encode())

    def write(self, file: str, text: str, source: str) -> None:
        """Make the module of a template; another process sees all of it or none."""
        data = source.encode()  # stays in front: it knows which of its lines are which of the text
        path = self._path(file)
        for folder in (self._folder, path.parent):
            folder.mkdir(mode=0o755, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(data + b"\n" + self._stamp(text, data))
            os.chmod(temporary, 0o644)  # who may read the templates may read this
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
    """False where a folder is another user's, into whose checkout root could write, too."""
    return not hasattr(os, "geteuid") or folder.stat().st_uid == os.geteuid()
