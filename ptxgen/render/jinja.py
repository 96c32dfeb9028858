"""The one Jinja environment of all templates: how they are found, compiled and called.

The build of a wheel imports this file, to compile the templates by the same options: it needs
Jinja, but neither numpy nor the kernels.
"""

from __future__ import annotations

import functools
import importlib.resources
import shutil
import struct
from collections.abc import Callable, Hashable, MutableMapping
from pathlib import Path
from types import CodeType
from typing import Any

import jinja2
from jinja2.runtime import Context

from urdir.ptxgen.render.compiled import COMPILED, TemplateModules
from urdir.ptxgen.render.sources import TemplateName, module_digest, read_template

_TEMPLATES = "urdir.templates"


def f32(value: float) -> str:
    """A float constant as PTX writes it exactly: ``0f3F800000`` (PTX ISA 4.5.2)."""
    return "0f" + struct.pack(">f", value).hex().upper()


@functools.lru_cache(maxsize=1 << 12)
def once(macro: Callable[..., str], *args: Hashable) -> str:
    """What a macro makes of ``args``, rendered once for all texts: for macros of files that are
    imported without context, and for texts that many kernels have in common."""
    return macro(*args)


def identity() -> str:
    """Stands for all options of the environment: a digest of this file, which has them."""
    return module_digest(__name__)


@functools.cache
def environment() -> jinja2.Environment:
    """The Jinja environment of all templates: undefined names are errors."""
    env = _Environment(
        loader=_PackageLoader(TemplateModules(COMPILED, identity())),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        extensions=["jinja2.ext.do", "jinja2.ext.loopcontrols"],
    )
    env.globals |= {"f32": f32, "once": once}
    return env


def write_modules(folder: Path = COMPILED) -> int:
    """Compile all templates of urdir into ``folder``, a package of a wheel that is being built, in
    place of what it held. Returns their number.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "__init__.py").write_text('"""The templates as Jinja compiled them."""\n')
    modules, names = TemplateModules(folder, identity()), template_names()
    for file in names:
        text = read_template((_TEMPLATES, file))
        modules.write(file, text, _python(environment(), file, text))
    return len(names)


def template_names() -> list[str]:
    """The files of all templates of urdir, shared macros included."""
    files = importlib.resources.files(_TEMPLATES).iterdir()
    return sorted(file.name for file in files if file.name.endswith(".j2"))


def _python(env: jinja2.Environment, file: str, text: str) -> str:
    """The Python source that Jinja makes of a template of urdir."""
    # defer_init: the source does not need the environment to be there when it is run
    return env.compile(text, f"{_TEMPLATES}/{file}", raw=True, defer_init=True)


class _PackageLoader(jinja2.BaseLoader):
    """Finds ``package/file``; a bare name is a shared macro file of ``urdir.templates``.

    Code of urdir's own templates comes from ``modules`` and goes there; that of other packages is
    made by every process that needs it.
    """

    def __init__(self, modules: TemplateModules) -> None:
        self._modules = modules

    def get_source(
        self, environment: jinja2.Environment, template: str
    ) -> tuple[str, str | None, None]:
        return read_template(_split(template)), None, None

    def load(
        self,
        environment: jinja2.Environment,
        name: str,
        globals: MutableMapping[str, Any] | None = None,
    ) -> jinja2.Template:
        """See `jinja2.BaseLoader.load`."""
        package, file = _split(name)
        if package != _TEMPLATES:
            return super().load(environment, name, globals)
        code = self._modules.code(file, lambda: read_template((package, file)))
        code = code or self._make(environment, file)
        globals = {} if globals is None else globals
        return environment.template_class.from_code(environment, code, globals)

    def _make(self, env: jinja2.Environment, file: str) -> CodeType:
        text = read_template((_TEMPLATES, file))
        return self._modules.add(file, text, _python(env, file, text))


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
