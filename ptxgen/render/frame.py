"""Rendering of a spec to PTX text: the template's body, and the frame around it.

A template is the body of a kernel, from its first ``.reg`` to its last ``ret``. The frame
(version, target, entry name, parameter list, launch bounds, loads of the parameters into registers
of the same name, ``dynamic_shared`` if the launch has dynamic shared memory) is generated here from
the spec, so that the two cannot disagree.
"""

from __future__ import annotations

import re
from typing import Any

import jinja2

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.ptx.architecture import CLUSTERS_SINCE
from urdir.ptxgen.ptx.launch import Param
from urdir.ptxgen.render.jinja import environment
from urdir.ptxgen.render.kernel import Kernel, text_fields
from urdir.ptxgen.target import Target

#: A table in global memory: a variable of the module, which templates declare in the kernel.
_TABLE = re.compile(r"^\.global [^;]*;\n", re.MULTILINE)


def render(spec: Kernel, target: Target) -> str:
    """PTX text of ``spec`` for ``target``, one of its own.

    The body sees the spec's fields by name, ``spec``, ``target`` (its ``.sm`` is a number) and the
    functions `f32` and `once`. Raises PtxgenError if the target lacks an instruction of the body,
    and if the template, or what it calls, fails or is missing.
    """
    try:
        body = render_body(environment(), spec, target)
    except PtxgenError:
        raise
    except jinja2.TemplateSyntaxError as exc:
        where = f"{exc.name or spec.template[1]} line {exc.lineno}"  # perhaps of a macro file
        hint = "; '{%' begins a tag: a vector is { %a, %b }" if "unknown tag" in str(exc) else ""
        raise PtxgenError(f"template {where}, kernel {spec.name}: {exc}{hint}") from exc
    except Exception as exc:
        kind = "" if isinstance(exc, jinja2.TemplateError) else f"{type(exc).__name__}: "
        where = _failing_line(spec, exc)
        raise PtxgenError(f"template {where}, kernel {spec.name}: {kind}{exc}") from exc
    return _frame(spec, target, body)


def _failing_line(spec: Kernel, error: Exception) -> str:
    """The template and the line that raised an error, from the frames that Jinja has rewritten."""
    where, trace = spec.template[1], error.__traceback__
    while trace is not None:
        if "__jinja_exception__" in trace.tb_frame.f_globals:
            file = trace.tb_frame.f_code.co_filename
            where = f"{spec.template[1] if file.startswith('<') else file} line {trace.tb_lineno}"
        trace = trace.tb_next
    return where


def render_body(env: jinja2.Environment, spec: Kernel, target: Target) -> str:
    """The text of a kernel's template. Raises jinja2.TemplateError."""
    template = env.get_template("/".join(spec.template))
    return template.render(**text_fields(spec), spec=spec, target=target)


def body_lines(body: str) -> list[int]:
    """The lines of ``body``, counted from 0, that become the last lines in the braces."""
    rest = _split_contract(body)[1]
    contract = len(body) - len(rest)
    tables = [range(contract + m.start(), contract + m.end()) for m in _TABLE.finditer(rest)]
    kept, at = [], 0
    for number, line in enumerate(body.rstrip().split("\n")):
        if at >= contract and not any(at in table for table in tables):
            kept.append(number)
        at += len(line) + 1
    return kept


def _frame(spec: Kernel, target: Target, body: str) -> str:
    contract, body = _split_contract(body)
    tables = dict.fromkeys(_TABLE.findall(body))
    body = _TABLE.sub("", body)
    major, minor = target.version_for(body)
    shape, resident = spec.launch_shape, spec.resident_on(target)
    grid = "of the launch" if spec.launch_fields else shape.grid
    fields = ", ".join(f"{k}={v!r}" for k, v in text_fields(spec).items())
    parts = [
        contract,
        f"// {type(spec).__name__}({fields})",
        f"// grid {grid}  block {shape.block}  cluster {shape.cluster}"
        f"  dynamic shared {shape.shared_bytes} bytes",
        "",
        f".version {major}.{minor}",
        f".target {target.name}",
        ".address_size 64",
        "",
        *([".extern .shared .align 256 .b8 dynamic_shared[];", ""] if shape.shared_bytes else []),
        *tables,
        f".visible .entry {spec.name}(",
        ",\n".join(_declare(p) for p in spec.params),
        ")",
        f".maxntid {', '.join(map(str, shape.block))}",
        *([f".minnctapersm {resident}"] if resident else []),
        "{",
        *(_load(p) for p in spec.params),
        *_wait(spec, target, body),
        body.rstrip(),
        "}",
        "",
    ]
    return "\n".join(parts)


def _wait(spec: Kernel, target: Target, body: str) -> tuple[str, ...]:
    """The wait at the start of a kernel after a programmatic edge, unless its body has its own.

    The next kernel may start once all CTAs of this one are past this point, but not before the
    kernels that this one waits for are complete: at most one kernel is early.
    """
    if (
        not spec.waits_for_dependencies
        or target.sm < CLUSTERS_SINCE
        or "griddepcontrol.wait" in body
    ):
        return ()
    return ("    griddepcontrol.wait;", "    griddepcontrol.launch_dependents;")


def _split_contract(body: str) -> tuple[str, str]:
    """The template's first comment (its contract), and the rest."""
    body, end = body.lstrip("\n"), 0
    while body.startswith("//", end):
        end = body.find("\n", end) + 1 or len(body)
    return body[:end].rstrip("\n"), body[end:]


def _declare(p: Param) -> str:
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
