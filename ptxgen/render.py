"""From a spec to PTX text: the one Jinja environment, and the frame around every kernel body.

A template is the body of a kernel, from its first ``.reg`` to its last ``ret``. The frame
(version, target, entry name, parameter list, launch bounds, loads of the parameters into registers
of the same name, ``dynamic_shared`` where the launch gives shared memory) is made here from the
spec, so that it cannot disagree with it.
"""

from __future__ import annotations

import functools
import struct
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from jinja2.runtime import Context

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.sources import compiled_folder, module_digest, read_template
from urdir.ptxgen.target import Target
from urdir.ptxgen.template_cache import TemplateCache

if TYPE_CHECKING:
    from urdir.ptxgen.spec import KernelSpec, Param


def f32(value: float) -> str:
    """A float constant as PTX writes it exactly: ``0f3F800000`` (PTX ISA 4.5.2)."""
    return "0f" + struct.pack(">f", value).hex().upper()


class _PackageLoader(jinja2.BaseLoader):
    """Finds ``package/file``; a bare name is a shared macro file of ``urdir.templates``."""

    def get_source(
        self, environment: jinja2.Environment, template: str
    ) -> tuple[str, str | None, None]:
        package, _, file = template.rpartition("/")
        return read_template((package or "urdir.templates", file)), None, None


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
        bytecode_cache=TemplateCache(compiled, module_digest(__name__)) if compiled else None,
    )
    env.globals["f32"] = f32
    return env


def render(spec: KernelSpec, target: str) -> str:
    """PTX text of ``spec`` for ``target``.

    The body sees the spec's fields by name, ``spec``, ``target`` (its ``.sm`` is a number) and
    the function ``f32``. Raises PtxgenError when the target is older than the spec's
    ``minimum_sm`` or lacks an instruction of the body, and when the template fails or is missing.
    """
    parsed = Target.parse(target)
    if parsed.sm < spec.minimum_sm:
        raise PtxgenError(f"kernel {spec.name} needs sm_{spec.minimum_sm}, the target is {target}")
    try:
        template = environment(compiled_folder()).get_template("/".join(spec.template))
        body = template.render(**spec.fields(), spec=spec, target=parsed)
    except jinja2.TemplateError as exc:
        where = spec.template[1]
        if isinstance(exc, jinja2.TemplateSyntaxError):
            where = f"{exc.name or where} line {exc.lineno}"  # perhaps of an imported macro file
        raise PtxgenError(f"template {where}, kernel {spec.name}: {exc}") from exc
    return _frame(spec, parsed, body)


def _frame(spec: KernelSpec, target: Target, body: str) -> str:
    contract, body = _split_contract(body)
    major, minor = target.version_for(body)
    shape = spec.launch_shape
    fields = ", ".join(f"{k}={v!r}" for k, v in spec.fields().items())
    parts = [
        contract,
        f"// {type(spec).__name__}({fields})",
        f"// grid {shape.grid}  block {shape.block}  cluster {shape.cluster}"
        f"  dynamic shared {shape.shared_bytes} bytes",
        "",
        f".version {major}.{minor}",
        f".target {target.name}",
        ".address_size 64",
        "",
        *([".extern .shared .align 256 .b8 dynamic_shared[];", ""] if shape.shared_bytes else []),
        *(_table(name, *table) for name, table in spec.tables.items()),
        f".visible .entry {spec.name}(",
        ",\n".join(_declare(spec, p) for p in spec.params),
        ")",
        f".maxntid {', '.join(map(str, shape.block))}",
        *([f".minnctapersm {shape.resident}"] if shape.resident else []),
        "{",
        *(_load(p) for p in spec.params),
        *_wait(spec, target, body),
        body.rstrip(),
        "}",
        "",
    ]
    return "\n".join(parts)


def _wait(spec: KernelSpec, target: Target, body: str) -> tuple[str, ...]:
    """What starts a kernel behind a programmatic edge, unless its body does that itself.

    The next kernel may start as soon as all CTAs of this one are past this point, but not before
    the kernels that this one waits for are complete: at most one kernel is early.
    """
    if not spec.waits_for_dependencies or target.sm < 90 or "griddepcontrol.wait" in body:
        return ()
    return ("    griddepcontrol.wait;", "    griddepcontrol.launch_dependents;")


def _split_contract(body: str) -> tuple[str, str]:
    """The template's first comment (its contract), and the rest."""
    lines = body.lstrip("\n").split("\n")
    end = next((i for i, line in enumerate(lines) if not line.startswith("//")), len(lines))
    return "\n".join(lines[:end]), "\n".join(lines[end:])


def _table(name: str, dtype: str, values: Sequence[int]) -> str:
    """An array with its values (PTX ISA 5.4.4), in global memory."""
    numbers = textwrap.fill(
        ", ".join(map(str, values)), 100, initial_indent=" ", subsequent_indent=" "
    )
    return f".global .align 16 .{dtype} {name}[{len(values)}] = {{\n{numbers}\n}};\n"


def _declare(spec: KernelSpec, p: Param) -> str:
    if not p.is_pointer:
        return f"    .param .{p.dtype} {p.name}"
    return f"    .param .u64 .ptr .global .align 16 {p.name}"


def _load(p: Param) -> str:
    if not p.is_pointer:
        return (
            f"    .reg .{_register_type(p.dtype)} %{p.name};\n"
            f"    ld.param.{p.dtype} %{p.name}, [{p.name}];"
        )
    shape = ", ".join(map(str, p.shape))
    assert p.access is not None
    return (
        f"    .reg .b64 %{p.name};  // ({shape}) {p.dtype}, {p.access.value}\n"
        f"    ld.param.u64 %{p.name}, [{p.name}];\n"
        f"    cvta.to.global.u64 %{p.name}, %{p.name};"
    )


def _register_type(dtype: str) -> Any:
    return dtype if dtype in ("f32", "f64") else "b" + dtype.lstrip("usfb")
