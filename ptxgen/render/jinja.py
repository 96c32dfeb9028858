"""The Jinja environment of all templates: lookup, compilation and functions.

The build of a wheel imports this file to compile the templates with the same options: it needs
Jinja, but neither numpy nor the kernels.
"""

from __future__ import annotations

import functools
import itertools
import re
import shutil
import struct
from collections.abc import Callable, Hashable, Iterable, Iterator, MutableMapping
from pathlib import Path
from types import CodeType
from typing import Any

import jinja2
from jinja2.ext import Extension
from jinja2.runtime import Context

from urdir.ptxgen.render.compiled import COMPILED, SOURCES, TemplateModules
from urdir.ptxgen.render.sources import (
    TEMPLATES,
    macro_files,
    module_digest,
    named_in,
    read_template,
    split_name,
)


def f32(value: float) -> str:
    """A float constant in PTX's exact form: ``0f3F800000`` (PTX ISA 4.5.2)."""
    return "0f" + struct.pack(">f", float(value)).hex().upper()


def f16x2(value: float) -> str:
    """The bits of a number as f16, twice: ``0x3C003C00``."""
    return "0x" + 2 * struct.pack(">e", float(value)).hex().upper()


def consecutive(name: str, first: int, count: int) -> str:
    """``count`` registers of an array, as vector operands: ``%v4, %v5``."""
    return ", ".join([f"{name}{number}" for number in range(first, first + count)])


def grid(*extents: int | Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """All combinations, the last varying fastest, as nested loops; a number n means range(n)."""
    return itertools.product(*(range(e) if isinstance(e, int) else e for e in extents))


@functools.lru_cache(maxsize=1 << 12)
def once(macro: Callable[..., str], *args: Hashable) -> str:
    """The text of a macro for ``args``, rendered once per process, for text shared by many kernels.

    The macro's file must be imported without context."""
    return macro(*args)


def identity() -> str:
    """Identifies the environment's options: a digest of this file, where they are set."""
    return module_digest(__name__)


@functools.cache
def environment() -> jinja2.Environment:
    """The Jinja environment of all templates, with a cache of compiled ones."""
    return make_environment(_PackageLoader(TemplateModules(COMPILED, identity())))


def make_environment(loader: jinja2.BaseLoader | None) -> jinja2.Environment:
    """A Jinja environment with the options of all templates: undefined names are errors."""
    env = _Environment(
        loader=loader,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        extensions=["jinja2.ext.do", "jinja2.ext.loopcontrols", _OneLineBlocks],
    )
    env.globals |= {
        "consecutive": consecutive,
        "f16x2": f16x2,
        "f32": f32,
        "grid": grid,
        "macros_in": functools.partial(_macros_in, env),
        "once": once,
    }
    return env


def _macros_in(env: jinja2.Environment, folder: str) -> dict[str, Any]:
    """The macros of all files in a folder of urdir's templates, imported: ``_bias.j2`` as "bias".

    A template names the folder as a literal, from which `source_digest` knows the files."""
    return {
        Path(file).stem.removeprefix("_"): env.get_template(f"{TEMPLATES}/{file}").module
        for file in macro_files(folder)
    }


def write_modules(folder: Path = COMPILED) -> int:
    """Compile all templates of urdir into ``folder``, a package of the wheel that is being built.

    Deletes the folder's previous contents. Returns the number of templates.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "__init__.py").write_text('"""The templates as Jinja compiled them."""\n')
    modules, names = TemplateModules(folder, identity()), template_names()
    for file in names:
        text = read_template((TEMPLATES, file))
        modules.write(file, text, _python(environment(), file, text))
    return len(names)


def template_names() -> list[str]:
    """The paths of all templates in ``urdir.templates``, macro files included."""
    return sorted(path.relative_to(SOURCES).as_posix() for path in SOURCES.rglob("*.j2"))


def _python(env: jinja2.Environment, file: str, text: str) -> str:
    """Jinja's Python source of a urdir template."""
    # defer_init: the source does not need the environment at run time
    return env.compile(text, f"{TEMPLATES}/{file}", raw=True, defer_init=True)


class _PackageLoader(jinja2.BaseLoader):
    """Finds ``package/path``.

    urdir's own templates are read from and written to ``modules`` in compiled form. Those of other
    packages are compiled in every process that needs them.
    """

    def __init__(self, modules: TemplateModules) -> None:
        self._modules = modules

    def get_source(
        self, environment: jinja2.Environment, template: str
    ) -> tuple[str, str | None, None]:
        return read_template(split_name(template)), template, None  # the file that errors name

    def load(
        self,
        environment: jinja2.Environment,
        name: str,
        globals: MutableMapping[str, Any] | None = None,
    ) -> jinja2.Template:
        """See `jinja2.BaseLoader.load`."""
        package, file = split_name(name)
        if package != TEMPLATES:
            return super().load(environment, name, globals)
        code = self._modules.code(file, lambda: read_template((package, file)))
        code = code or self._make(environment, file)
        globals = {} if globals is None else globals
        return environment.template_class.from_code(environment, code, globals)

    def _make(self, env: jinja2.Environment, file: str) -> CodeType:
        text = read_template((TEMPLATES, file))
        return self._modules.add(file, text, _python(env, file, text))


class _OneLineBlocks(Extension):
    """A block on one line, ``{% if a %}add.u32 %x, %x, {{ a }};{% endif %}``, means the same as on
    three: its body ends with a newline, which Jinja would drop with that of the tag. A single macro
    call, ``{% if a %}{{ load(a) }}{% endif %}``, brings its own. ``{%-`` leaves a block unchanged.
    """

    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
        """See `jinja2.ext.Extension.preprocess`. The template's lines keep their numbers."""
        return _ONE_LINE_BLOCK.sub(_with_newlines, source)


_EXPRESSION = re.compile(r"\{\{((?!\{\{).)*\}\}")
_ONE_LINE_BLOCK = re.compile(
    r"^( *)(\{% (?:if|for) [^\n]*?%\})([^\n]*)(\{% end(?:if|for) %\})$", re.MULTILINE
)


def _with_newlines(block: re.Match[str]) -> str:
    indent, begin, body, end = block.groups()
    parts = (
        part if _EXPRESSION.fullmatch(part) else indent + part + '{{ "\\n" }}'
        for part in body.split("{% else %}")
    )
    return begin + "{% else %}".join(parts) + end


class _Context(Context):
    """Calls functions directly. Jinja would first check whether each wants the context; none does
    here (macros, methods of specs, `f32`), and a text has thousands of calls.
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

    def join_path(self, template: str, parent: str) -> str:
        """The full name of an import in ``parent``: see `named_in`."""
        return "/".join(named_in(split_name(parent)[0], template))
