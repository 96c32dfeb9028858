"""Templates as modules of Python, which a wheel carries: compiled by Jinja when it was built."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

import jinja2

import urdir.templates

#: Where a wheel has its modules; in a checkout there is no such folder.
SHIPPED = Path(urdir.templates.__file__).with_name("compiled")


class TemplateModules:
    """One module a template in ``folder``: the source Jinja generated, then a digest in a comment.

    The digest is of that source and of all that it comes from: the template's text, the version of
    Jinja, whose runtime the source is made for, and ``environment``, which stands for the
    environment's options. A module with another one counts as missing, so that a damaged or
    outdated one is never run. Python keeps the modules' bytecode, as it does for any other module:
    installers make it, else the first use does.
    """

    def __init__(self, folder: Path, environment: str) -> None:
        self._folder = folder
        self._identity = f"{jinja2.__version__} {environment}"

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
        code = SourceFileLoader(path.stem, str(path)).get_code(path.stem)
        # In a traceback Jinja puts the template's line numbers beside this name.
        return code.replace(co_filename="<template>") if code else None

    def write(self, file: str, text: str, source: str) -> None:
        """Make the module of a template from its text and the source that Jinja generated."""
        data = source.encode()  # stays in front: it knows which of its lines are which of the text
        self._path(file).write_bytes(data + b"\n" + self._stamp(text, data))

    def _path(self, file: str) -> Path:
        return self._folder / (file.removesuffix(".j2").replace(".", "_") + ".py")

    def _stamp(self, text: str, source: bytes) -> bytes:
        origin = hashlib.sha256(text.encode()).hexdigest()
        digest = hashlib.sha256(f"{self._identity} {origin}\n".encode() + source)
        return b"# " + digest.hexdigest().encode()
