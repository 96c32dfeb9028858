"""The one Jinja environment of all templates: how they are found, compiled and called."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
from jinja2.runtime import Context

from urdir.ptxgen.sources import TemplateName, module_digest, read_template
from urdir.ptxgen.template_cache import TemplateCache

_TEMPLATES = "urdir.templates"


def f32(value: float) -> str:
    """A float constant as PTX writes it exactly: ``0f3F800000`` (PTX ISA 4.5.2)."""
    return "0f" + struct.pack(">f", value).hex().upper()


def identity() -> str:
    """Stands for all options of the environment: a digest of this file, which has them."""
    return module_digest(__name__)


@functools.cache
def environment(compiled: Path | None = None) -> jinja2.Environment:
    """The Jinja environment of all templates: undefined names are errors.

    ``compiled`` is a folder for compiled templates.
    """
    env = _Environment(
        loader=_PackageLoader(),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        extensions=["jinja2.ext.do", "jinja2.ext.loopcontrols"],
        bytecode_cache=TemplateCache(compiled, identity()) if compiled else None,
    )
    env.globals["f32"] = f32
    return env


class _PackageLoader(jinja2.BaseLoader):
    """Finds ``package/file``; a bare name is a shared macro file of ``urdir.templates``."""

    def get_source(
        self, environment: jinja2.Environment, template: str
    ) -> tuple[str, str | None, None]:
        return read_template(_split(template)), None, None


def _split(template: str) -> TemplateName:
    package, _, file = template.rpartition("/")
    return package or _TEMPLATES, file


class _Context(Context):
    """Calls what is called as it is, without asking what else it wants to be passed: macros,
    methods of specs and `f32` want nothing, and there are thousands of calls in a text.
    """

    def call(
        self,
        function: Callable[..., Any],
        /,
        *args: Any,
        _loop_vars: object = None,
        _block_vars: object = None,
        **kwargs: Any,
    ) -> Any:
        """See `jinja2.runtime.Context.call`."""
        return function(*args, **kwargs)


class _Environment(jinja2.Environment):
    context_class = _Context
