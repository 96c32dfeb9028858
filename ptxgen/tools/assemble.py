"""Assemble PTX to machine code without a GPU, a driver or a toolkit, by nvJitLink's wheel.

The library is optional (``pip install 'urdir[assemble]'``). It is the assembler that the driver
uses too, so a kernel that assembles here loads there, and its log reports a kernel's resources.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.ptx.excerpt import excerpt

OPTIONS = ("-O3", "-verbose")


class AssembleError(PtxgenError):
    """The assembler refused a PTX text; the message quotes the offending lines."""


class AssemblerMissingError(PtxgenError):
    """The nvJitLink library is not installed."""


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources of one entry: registers and barriers by count, the rest in bytes.

    ``stack``, ``spill_stores`` and ``spill_loads`` are per thread; ``shared`` is static, per CTA.
    """

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int
    barriers: int

    @property
    def spills(self) -> bool:
        """Whether registers were spilled to local memory."""
        return bool(self.spill_stores or self.spill_loads)


@dataclass(frozen=True, slots=True)
class Assembly:
    """Machine code of one PTX text: the cubin, the resources of every entry by name, the full
    log."""

    target: str
    cubin: bytes
    entries: Mapping[str, Resources]
    log: str


def assemble(
    ptx: str, target: str, *, name: str = "kernel", options: Sequence[str] = OPTIONS
) -> Assembly:
    """Machine code of ``ptx`` for ``target`` ("sm_90"); ``name`` is for messages.

    Raises AssemblerMissingError without the nvJitLink wheel, and AssembleError with the assembler's
    messages and the PTX around the lines that they name. It is also an error if the assembler
    serialises wgmma, or inserts waits for them: it only warns, and the code is slow.
    """
    nj = _library()
    source = ptx.encode() + b"\0"
    with _linker(nj, target, options) as handle:
        try:
            nj.add_data(handle, nj.InputType.PTX, source, len(source), name)
            nj.complete(handle)
        except nj.nvJitLinkError as exc:
            log = _text(nj.get_error_log, nj.get_error_log_size(handle), handle) or str(exc)
            raise AssembleError(
                f"{name} does not assemble for {target}:\n{annotate(ptx, log)}"
            ) from exc
        cubin = bytearray(nj.get_linked_cubin_size(handle))
        nj.get_linked_cubin(handle, cubin)
        log = _text(nj.get_info_log, nj.get_info_log_size(handle), handle)
    advice = "\n".join(line for line in log.splitlines() if _SERIALISED.search(line))
    if advice and "-O0" not in options:  # without optimisation nothing is asynchronous
        raise AssembleError(
            f"{name} assembles for {target}, but its wgmma are serialised:\n{annotate(ptx, advice)}"
        )
    return Assembly(target, bytes(cubin), MappingProxyType(parse_resources(log)), log)


def is_available() -> bool:
    """Whether nvJitLink is installed, so that ``assemble`` works."""
    try:
        _library()
    except AssemblerMissingError:
        return False
    return True


def assembler_version() -> str:
    """ "nvJitLink 13.0". Raises AssemblerMissingError."""
    return "nvJitLink " + ".".join(map(str, _library().version()))


def _library() -> Any:
    try:
        from cuda.bindings import nvjitlink

        nvjitlink.version()  # the wheel's library is found at the first call, not at import
    except (ImportError, RuntimeError) as exc:
        why = " ".join(str(exc).split())  # the message has line ends of its own
        raise AssemblerMissingError(
            f"assembling PTX offline needs nvJitLink: pip install 'urdir[assemble]' ({why})"
        ) from exc
    return nvjitlink


@contextmanager
def _linker(nj: Any, target: str, options: Sequence[str]) -> Iterator[int]:
    arguments = [f"-arch={target}", *options]
    try:
        handle = nj.create(len(arguments), arguments)
    except nj.nvJitLinkError as exc:
        version = ".".join(map(str, nj.version()))
        raise AssembleError(
            f"nvJitLink {version} does not take {' '.join(arguments)}: {exc}"
        ) from exc
    try:
        yield handle
    finally:
        nj.destroy(handle)


def _text(fetch: Any, size: int, handle: int) -> str:
    buffer = bytearray(size)
    if size:
        fetch(handle, buffer)
    return buffer.rstrip(b"\0").decode(errors="replace").strip()


# "(C7513) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...",
# "(C7517) wgmma.wait_group is injected in around line 22 by compiler ..."
_SERIALISED = re.compile(r"\(C\d+\).*\bwgmma\b")
_ENTRY = re.compile(r"^ptxas info\s*: Function properties for (?P<entry>\S+)$")
_STACK = re.compile(
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads"
)
_USED = re.compile(r"^ptxas info\s*: Used (?P<registers>\d+) registers(?P<rest>.*)$")


def parse_resources(log: str) -> dict[str, Resources]:
    """The resources of each entry, from the log of ``-verbose`` (ptxas' own lines)."""
    found: dict[str, Resources] = {}
    entry, stack = "", (0, 0, 0)
    for line in log.splitlines():
        if m := _ENTRY.match(line):
            entry, stack = m["entry"], (0, 0, 0)
        elif m := _STACK.search(line):
            stack = (int(m["stack"]), int(m["stores"]), int(m["loads"]))
        elif (m := _USED.match(line)) and entry:
            used = {what: int(n) for n, what in re.findall(r"(\d+) (?:bytes )?(\w+)", m["rest"])}
            found[entry] = Resources(
                int(m["registers"]), *stack, used.get("smem", 0), used.get("barriers", 0)
            )
    return found


#: Maximum lines of a log to show: one wrong word in a macro causes hundreds of errors.
_MOST_LINES = 40


def annotate(ptx: str, log: str, around: int = 2) -> str:
    """``log`` up to `_MOST_LINES`, and the lines of ``ptx`` that it names; see `excerpt`."""
    lines = log.splitlines()
    shown, rest = lines[:_MOST_LINES], len(lines) - _MOST_LINES
    if rest > 0:
        shown.append(f"... and {rest:,} lines more")
    return "\n".join([*shown, *excerpt(ptx, "\n".join(shown), around)])


_TARGET = re.compile(r"^\s*\.target\s+(\w+)", re.MULTILINE)


def declared_target(ptx: str) -> str | None:
    """The ``.target`` of a text, which need not parse; None if there is none."""
    found = _TARGET.search(ptx)
    return found[1] if found else None
