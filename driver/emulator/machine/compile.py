"""Translation of an entry, block by block, to Python over numpy arrays.

Each block of straight-line code becomes a function. A group that is a range of whole warps runs
``block()``, whose names are views of the register file. Any other group runs ``block(L)``, the
same text over gathered copies of the registers that it reads, which are written back at its end.
Python compiles a text when a block with it first runs; many never do, and many blocks share one. A
function returns the next pc, ``~pc`` if the scheduler must look at the block's ``ending`` first, or
the mask of the lanes that take a branch.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from urdir.driver.emulator.machine import (  # noqa: F401 - they fill the table of operations
    ops_async,
    ops_bulk,
    ops_cluster,
    ops_compare,
    ops_convert,
    ops_float,
    ops_integer,
    ops_matrix,
    ops_memory,
    ops_warp,
    ops_wgmma,
)
from urdir.driver.emulator.machine.emitter import Emitter
from urdir.driver.emulator.machine.faults import UNSUPPORTED_PTX_VERSION, CompileError
from urdir.driver.emulator.machine.flow import BarrierForm, Block, Code, Ending, flatten, split
from urdir.driver.emulator.machine.layout import EntryLayout
from urdir.driver.emulator.machine.runs import join_runs
from urdir.driver.emulator.machine.stretches import stretches, touches
from urdir.ptxgen.ptx import Instruction, Module
from urdir.ptxgen.ptx.architecture import FIRST_VERSION, MAX_THREADS, number_of, runs_on

_ASYNCHRONOUS = re.compile(r"\s*(?:v = )?(?:asynchronous|bulk|mbarriers)\.")

#: The newest PTX ISA that the emulated driver takes.
NEWEST_VERSION = (9, 0)


@dataclass(slots=True, eq=False)
class Function:
    """A block as a function of Python: its text, and the PTX line of each of its lines.

    ``names`` maps names of the text to those of the function's globals.
    """

    filename: str
    names: Mapping[str, str]
    parts: list[str] = field(default_factory=list)
    lines: list[int] = field(default_factory=lambda: [0])
    _code: CodeType | None = None

    def add(self, line: str, source: int = 0) -> None:
        """Append a line, and the PTX line of its origin."""
        self.parts.append(line)
        self.lines.append(source)

    @property
    def code(self) -> CodeType:
        """The compiled function; compiled at first use."""
        if self._code is None:
            shared = _compiled("\n".join(self.parts))
            names = tuple(self.names.get(name, name) for name in shared.co_names)
            self._code = shared.replace(co_filename=self.filename, co_names=names)
        return self._code


@functools.lru_cache(maxsize=1 << 14)
def _compiled(text: str) -> CodeType:
    """The only function of a text. Three fifths of the lines of blocks are another's text too."""
    module = compile(text, "<emulated>", "exec")
    (function,) = (each for each in module.co_consts if isinstance(each, CodeType))
    return function


@dataclass(slots=True, eq=False)
class Program:
    """An entry, ready to run on any number of lanes."""

    name: str
    layout: EntryLayout
    target: str
    blocks: list[Block]
    #: (offset, size) in bytes of each parameter.
    param_layout: tuple[tuple[int, int], ...]
    param_bytes: int
    static_shared_bytes: int
    max_threads: int
    required_threads: tuple[int, ...] | None
    register_count: int
    instructions: Mapping[int, str]
    #: Instructions of each pc's whole function.
    costs: list[int]
    #: The functions for whole warps by pc.
    whole: Mapping[int, Function]
    views: Mapping[int, frozenset[str]]
    temps: frozenset[str]
    specials: frozenset[str]
    #: The function of a pc for scattered groups.
    translate_scattered: Callable[[int], Function]
    compile_watched: Callable[[], Program]
    uses_dependencies: bool
    uses_asynchronous: bool
    uses_warpgroups: bool
    directives: Mapping[str, tuple[int, ...]]
    cluster: tuple[int, ...] | None
    _scattered: dict[int, Function] = field(default_factory=dict)
    _watched: Program | None = None
    #: Unused register files, see wave.py.
    idle: dict[object, list[Any]] = field(default_factory=dict)

    def scattered(self, pc: int) -> CodeType:
        """The function of a block for scattered groups."""
        if pc not in self._scattered:
            self._scattered[pc] = self.translate_scattered(pc)
        return self._scattered[pc].code

    @property
    def watched(self) -> Program:
        """The same program with a text that reports to a watcher (see watch.py)."""
        if self._watched is None:
            self._watched = self.compile_watched()
        return self._watched

    def line_tables(self) -> dict[str, list[int]]:
        """PTX line of each generated line, by the file name in tracebacks."""
        functions = (*self.whole.values(), *self._scattered.values())
        return {function.filename: function.lines for function in functions}

    @property
    def exit(self) -> int:
        """The pc of ended threads."""
        return len(self.blocks)


def compile_entry(module: Module, entry_name: str, target: str, watched: bool = False) -> Program:
    """Translate ``entry_name`` for a device that is ``target`` ("sm_90").

    The text of a ``watched`` translation reports to a watcher (see watch.py).

    Raises CompileError, with the driver's error name and the PTX line, for whatever ptxas would
    refuse and for what the emulator lacks.
    """
    check_target(module, target)
    entry = module.entries.get(entry_name)
    if entry is None:
        known = ", ".join(module.entries) or "none"
        raise CompileError(f"no entry {entry_name!r} in the module (it has: {known})")
    layout = EntryLayout(module, entry)
    blocks, codes = split(flatten(module, entry))
    whole = _translate_whole(layout, blocks, codes, watched)
    directives = entry.directives
    threads = 1
    for extent in directives.get("maxntid", directives.get("reqntid", (MAX_THREADS,))):
        threads *= extent
    return Program(
        entry_name,
        layout,
        target,
        blocks,
        tuple(layout.parameters[p.name] for p in entry.parameters),
        layout.param_bytes,
        layout.static_shared_bytes,
        min(threads, MAX_THREADS),
        directives.get("reqntid"),
        _register_estimate(layout),
        {i.line: i.text for i in entry.instructions},
        [block.whole_cost for block in blocks],
        whole.functions,
        {number: frozenset(elements) for number, elements in whole.views.items()},
        frozenset(whole.temps),
        frozenset(whole.specials),
        functools.partial(_translate_scattered, layout, blocks, codes, watched),
        functools.partial(compile_entry, module, entry_name, target, watched=True),
        any(b.ending is Ending.DEPENDENCIES for b in blocks),
        any(_ASYNCHRONOUS.match(line) for of in whole.functions.values() for line in of.parts),
        any(b.is_for_warpgroups for b in blocks),
        directives,
        directives.get("reqnctapercluster"),
    )


def check_target(module: Module, target: str) -> int:
    """The number of the module's target, 90 for "sm_90a".

    Raises CompileError if ``target`` cannot run it, or for unsuitable versions.
    """
    first = FIRST_VERSION.get(module.target)
    if first is None:
        raise CompileError(f"unknown target {module.target}")
    if not runs_on(module.target, target):
        raise CompileError(
            "SM version specified by .target is higher than default SM version assumed: "
            f"the module is for {module.target}, which the device ({target}) is not"
        )
    version = f"{module.version[0]}.{module.version[1]}"
    if module.version < first:
        raise CompileError(
            f".target {module.target} needs .version {first[0]}.{first[1]}, not {version}",
            UNSUPPORTED_PTX_VERSION,
        )
    if module.version > NEWEST_VERSION:
        raise CompileError(
            f".version {version} is newer than this driver's "
            f"{NEWEST_VERSION[0]}.{NEWEST_VERSION[1]}",
            UNSUPPORTED_PTX_VERSION,
        )
    return number_of(module.target)


def _register_estimate(layout: EntryLayout) -> int:
    """32-bit registers per thread, an upper bound from declarations (no allocation is modelled)."""
    words = sum(max(1, width // 4) for width in layout.widths if width)
    return min(255, max(16, words))


@dataclass(slots=True)
class _Whole:
    """The functions for whole warps, and the names that they use."""

    functions: dict[int, Function] = field(default_factory=dict)
    views: dict[int, set[str]] = field(default_factory=dict)
    temps: set[str] = field(default_factory=set)
    specials: set[str] = field(default_factory=set)


def _emit_all(emitter: Emitter, layout: EntryLayout, codes: list[Code]) -> None:
    """Emit consecutive instructions, with checks of registers used by asynchronous products."""
    for stretch in stretches(codes):
        if touched := touches(layout, stretch):
            emitter.check(touched)
        for code in stretch:
            _emit(emitter, code)


def _translate_whole(
    layout: EntryLayout, blocks: list[Block], codes: list[Code], watched: bool
) -> _Whole:
    """The functions for whole warps."""
    result = _Whole()
    for pc, block in enumerate(blocks):
        if not block.leads:
            continue
        emitter = Emitter(layout, watched)
        if watched:
            emitter.lines.append(f"    watch.block({pc}, {block.last}, L)")
            emitter.sources.append(block.first_line)
        _emit_all(emitter, layout, codes[block.start : block.whole_end])
        terminator = _terminator(emitter, blocks[block.last])
        function = Function(f"<emulated {layout.entry.name}, whole {pc}>", emitter.names)
        function.add("def block():")
        for line, source in zip(*join_runs(emitter.lines, emitter.sources), strict=True):
            function.add(line, source)
        for line in terminator:
            function.add(line)
        result.functions[pc] = function
        for number, elements in emitter.used.items():
            result.views.setdefault(number, set()).update(elements)
        result.temps |= emitter.temps
        result.specials |= emitter.specials
    return result


def _translate_scattered(
    layout: EntryLayout, blocks: list[Block], codes: list[Code], watched: bool, pc: int
) -> Function:
    """The function of a block for scattered groups."""
    block = blocks[pc]
    emitter = Emitter(layout, watched)
    result = Function(f"<emulated {layout.entry.name}, scattered {pc}>", emitter.names)
    if watched:
        emitter.lines.append(f"    watch.block({pc}, {pc}, L)")
        emitter.sources.append(block.first_line)
    _emit_all(emitter, layout, codes[block.start : block.end])
    terminator = _terminator(emitter, block)
    _gathering(result, emitter, terminator)
    return result


def _emit(emitter: Emitter, code: Code) -> None:
    instruction: Instruction = code.instruction
    if code.operation is None:
        return
    try:
        emitter.emit(instruction, code.operation.handler, code.match)
    except CompileError as exc:
        where = f"PTX line {instruction.line}: {instruction.text}: "
        raise CompileError(where + exc.message, exc.code) from None


def _terminator(e: Emitter, block: Block) -> list[str]:
    """The return statements of a block."""
    if block.ending is Ending.FALL:
        return [f"    return {_pc(e, block.next)}"]
    if block.ending is Ending.BRANCH:
        taken = _pc(e, block.target)
        spin = "~" if block.spins else ""
        if block.guard is None:
            return [f"    return {spin}{taken}"]
        after = _pc(e, block.next)
        e.instruction = block.instruction
        mask = e.register(block.guard.name, "b1")
        if block.guard.negated:
            return [
                f"    c = count_nonzero({mask})",
                f"    return {after} if c == n else {spin}{taken} if not c else ~{mask}",
            ]
        return [
            f"    c = count_nonzero({mask})",
            f"    return {spin}{taken} if c == n else {after} if not c else {mask}",
        ]
    if isinstance(block.barrier, BarrierForm):
        e.instruction = block.instruction
        for operand in block.barrier.operands:
            if e.immediate(operand) is None:
                e.source(operand, "u4")
    return [f"    return ~{_pc(e, block.next)}"]


def _pc(e: Emitter, pc: int) -> str:
    """The name of a pc in the text."""
    return e.own_name("pc", str(pc))


def _gathering(result: Function, e: Emitter, terminator: list[str]) -> None:
    """A block over copies: registers are gathered before and written back after."""
    result.add("def block(L):")
    result.add("    n = L.size")
    for number in e.used:
        width = e.layout.width(number)
        own = f"u{width}" if width else "b1"
        name, of_all = e.own_name("r", str(number)), e.own_name("R", str(number))
        base = f"{name}_{own}"
        if number in e.needed:
            result.add(f"    {base} = {of_all}.take(L)")
        else:
            result.add(f"    {base} = empty(n, {own})")
        for element in sorted(e.used[number] - {own}):
            step = width // int(element[1])
            pick = f"[::{step}]" if step > 1 else ""
            result.add(f"    {name}_{element} = {base}.view({element}){pick}")
    for temp in sorted(e.temps):
        element, _, count = temp.split("_", 1)[1].partition("x")
        shape = f"(n, {count})" if count else "n"
        result.add(f"    {temp} = empty({shape}, {element})")
    for special in sorted(e.specials):
        result.add(f"    {special} = pick(S_{special}, L)")
    if any(re.search(r"\bW\b", line) for line in e.lines):
        result.add("    W = scatter_warps(L)")
    for line, source in zip(*join_runs(e.lines, e.sources), strict=True):
        result.add(line, source)
    for number in e.used:
        if number in e.written:
            width = e.layout.width(number)
            name, of_all = e.own_name("r", str(number)), e.own_name("R", str(number))
            result.add(f"    {of_all}[L] = {name}_{f'u{width}' if width else 'b1'}")
    for line in terminator:
        result.add(line)
