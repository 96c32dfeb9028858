"""Loads, stores, atomics and fences (PTX ISA 9.7.9, 9.7.13)."""

from __future__ import annotations

import re
from collections.abc import Callable

from urdir.driver.emulator.machine.emitter import NUMPY, Emitter, Handler
from urdir.driver.emulator.machine.faults import CompileError
from urdir.driver.emulator.machine.operations import operation
from urdir.ptxgen.ptx import TYPE_BYTES, Address, Discard, Operand, Symbol, Vector

_SCOPE = r"\.(?:cta|cluster|gpu|sys)"
#: Hints of accesses to .global or generic addresses; a cache operation excludes a priority.
_PRIORITY = r"\.L1::(?:evict_(?:normal|unchanged|first|last)|no_allocate)"
_HINT, _PREFETCH = r"\.L2::cache_hint", r"\.L2::(?:64|128|256)B"
_FAR = rf"(?:{_HINT}{_PREFETCH}|{_PREFETCH}{_HINT}|{_HINT}|{_PREFETCH})?"
_LOADED, _LOADED_ONCE = r"\.(?:ca|cg|cs|lu|cv)", r"\.(?:ca|cg|cs)"
_STORED = r"\.(?:cg|cs|wb|wt)"
_SCALAR = r"\.([bus]8|[bus]16|[bus]32|[bus]64|f32|f64)"
_TYPE = rf"(?:\.(v2|v4))?{_SCALAR}"

SHIFT = {1: 0, 2: 1, 4: 2, 8: 3, 16: 4}


def _guarded(e: Emitter) -> str:
    """Open the block of a guarded access; returns the suffix that picks the active lanes."""
    if e.mask is None:
        return ""
    e.line(f"if (c := count_nonzero({e.mask})):")
    e.indent += "    "
    e.line(f"q = None if c == n else {e.mask}.nonzero()[0]")
    return ", q"


def _leave(e: Emitter) -> None:
    if e.mask is not None:
        e.indent = e.indent[:-4]


def lane_rows(e: Emitter, space: str) -> str:
    """The argument with the lanes' rows of shared memory, for the spaces that take it."""
    return f", {e.special('row offset', 'u8')}" if space != "memory" else ""


def hint(m: re.Match[str]) -> str:
    """The operand of a cache hint, if the opcode has one."""
    return " u64" if ".L2::cache_hint" in m.string else ""


def vector_item(kind: str, vector: str | None, marks: str = "") -> str:
    """A value, or a vector, of which only the width must agree: see operand_rules.py."""
    nbytes = TYPE_BYTES[kind] * int(vector[1]) if vector else 0
    if nbytes > 16:
        raise CompileError(f"an access moves at most 16 bytes, not {nbytes}")
    return f"b{kind.lstrip('busf')}{marks}*{vector[1]}" if vector else kind + marks.replace("?", "")


def _elements(operand: Operand) -> tuple[Operand, ...]:
    return operand.elements if isinstance(operand, Vector) else (operand,)


def _python_name(space: str | None) -> str:
    """The Python name of an address space."""
    if space is None:
        return "generic"
    if space.startswith("shared"):
        return "cluster" if space.endswith("cluster") else "shared"
    return "memory"


_SHARED, _CLUSTER = r"\.(shared(?:::cta)?)", r"\.(shared::cluster)"
_ORDERED = rf"\.(?:relaxed|acquire){_SCOPE}"
_MMIO = r"\.(?:mmio\.relaxed|relaxed\.mmio)\.sys"


def _ld_operands(m: re.Match[str]) -> str:
    return f"={vector_item(m[3], m[2], '>?')} [{m[1] or ''}]{hint(m)}"


@operation(rf"ld(?:\.weak)?(?:\.(global))?(?:{_LOADED}|{_PRIORITY})?{_FAR}{_TYPE}", _ld_operands)
@operation(rf"ld(?:\.weak)?\.(const)(?:{_LOADED})?{_TYPE}", _ld_operands)
@operation(rf"ld(?:\.weak)?{_SHARED}(?:{_LOADED})?{_TYPE}", _ld_operands)
@operation(
    rf"ld\.(global)(?:(?:{_LOADED_ONCE}|{_PRIORITY})?{_FAR}\.nc"
    rf"|\.nc(?:{_LOADED_ONCE}|{_PRIORITY})?{_FAR}|{_LOADED_ONCE}\.nc{_FAR}){_TYPE}",
    _ld_operands,
)
@operation(rf"ld\.volatile(?:\.(global))?(?:{_PREFETCH})?{_TYPE}", _ld_operands, polls=True)
@operation(rf"ld{_ORDERED}(?:\.(global))?(?:{_PRIORITY})?{_FAR}{_TYPE}", _ld_operands, polls=True)
@operation(rf"ld(?:\.volatile|{_ORDERED}){_SHARED}{_TYPE}", _ld_operands, polls=True)
@operation(rf"ld{_MMIO}(?:\.(global))?(){_SCALAR}", _ld_operands, 70, (8, 2), polls=True)
@operation(rf"ld(?:\.weak)?{_CLUSTER}(?:{_LOADED})?{_TYPE}", _ld_operands, 90, (7, 8))
@operation(rf"ld(?:\.volatile|{_ORDERED}){_CLUSTER}{_TYPE}", _ld_operands, 90, (7, 8), polls=True)
def _ld(e: Emitter, m: re.Match[str]) -> None:
    d, source = e.operands[:2]
    element = NUMPY[m[3]]
    elements = _elements(d)
    size = int(element[1]) * len(elements)
    address = e.address(source)
    space = _python_name(m[1])
    targets = [None if isinstance(o, Discard) else e.direct_target(o, element) for o in elements]
    suffix = _guarded(e)
    e.line(f"v = {space}.load({address}, {SHIFT[size]}{lane_rows(e, space)}{suffix})")
    e.watch_access("load", space, address, SHIFT[size], suffix)
    if len(elements) > 1:
        e.line(f"v = v.view({element}).reshape(-1, {len(elements)})")
    for at, target in enumerate(targets):
        if target is None:
            continue
        view, own = target
        value = f"v[:, {at}]" if len(elements) > 1 else "v"
        if len(elements) == 1 and (own != element or element[0] in "if"):
            value = f"v.view({element})"
        if suffix:
            e.line(f"if q is None: {view}[...] = {value}")
            e.line(f"else: {view}[q] = {value}")
        else:
            e.line(f"{view}[...] = {value}")
    _leave(e)


@operation(rf"ld\.param{_TYPE}", lambda m: f"={vector_item(m[2], m[1], '>?')} [param]")
def _ld_param(e: Emitter, m: re.Match[str]) -> None:
    d, source = e.operands
    element = NUMPY[m[2]]
    elements = _elements(d)
    assert isinstance(source, Address)
    assert isinstance(source.base, Symbol)
    known = e.layout.parameters[source.base.name]
    size = int(element[1])
    if source.offset < 0 or source.offset + size * len(elements) > known[1]:
        raise e.fail(f"{source.base.name} has {known[1]} bytes")
    start = known[0] + source.offset
    if start % (size * len(elements)):
        raise e.fail(f"offset {start} of the parameters is misaligned")
    for at, operand in enumerate(elements):
        first = start // size + at
        e.line(f"{e.target(operand, element)}[...] = P_{element}[{first}]")


_WRITTEN = rf"\.(?:relaxed|release){_SCOPE}"


def _st_operands(m: re.Match[str]) -> str:
    return f"[{m[1] or ''}] {vector_item(m[3], m[2], '>')}{hint(m)}"


@operation(
    rf"st(?:\.weak)?(?:\.(global))?(?:{_STORED}|{_PRIORITY})?(?:{_HINT})?{_TYPE}", _st_operands
)
@operation(rf"st(?:\.weak)?{_SHARED}(?:{_STORED})?{_TYPE}", _st_operands)
@operation(rf"st\.volatile(?:\.(global|shared(?:::cta)?))?{_TYPE}", _st_operands)
@operation(rf"st{_WRITTEN}(?:\.(global))?(?:{_PRIORITY})?(?:{_HINT})?{_TYPE}", _st_operands)
@operation(rf"st{_WRITTEN}{_SHARED}{_TYPE}", _st_operands)
@operation(rf"st{_MMIO}(?:\.(global))?(){_SCALAR}", _st_operands, 70, (8, 2))
@operation(rf"st(?:\.weak)?{_CLUSTER}(?:{_STORED})?{_TYPE}", _st_operands, 90, (7, 8))
@operation(rf"st(?:\.volatile|{_WRITTEN}){_CLUSTER}{_TYPE}", _st_operands, 90, (7, 8))
def _st(e: Emitter, m: re.Match[str]) -> None:
    destination, value = e.operands[:2]
    element = NUMPY[m[3]]
    elements = _elements(value)
    size = int(element[1]) * len(elements)
    address = e.address(destination)
    space = _python_name(m[1])
    data = _joined(e, elements, element)
    suffix = _guarded(e)
    e.watch_access("store", space, address, SHIFT[size], f"{suffix or ', None'}, {data}")
    e.line(f"{space}.store({address}, {data}, {SHIFT[size]}{lane_rows(e, space)}{suffix})")
    _leave(e)


def _joined(e: Emitter, elements: tuple[Operand, ...], element: str) -> str:
    """The operands of each lane as one element."""
    if len(elements) == 1:
        data = e.source(elements[0], "u" + element[1] if element[0] != "f" else element)
        return f"{data}.view(u{element[1]})" if element[0] == "f" else data
    row, size = e.row(element, len(elements)), int(element[1]) * len(elements)
    for at, operand in enumerate(elements):
        e.line(f"{row}[:, {at}] = {e.source(operand, element)}")
    return f"{row}.view({'c16' if size == 16 else f'u{size}'}).reshape(-1)"


def vector_data(e: Emitter, value: Operand, element: str) -> tuple[str, int]:
    """What a store of a value or vector writes, (n,), and the bytes of each lane."""
    elements = _elements(value)
    size = int(element[1]) * len(elements)
    if len(elements) == 1:
        return f"{e.full(value, element)}.view(u{size})", size
    return _joined(e, elements, element), size


_ATOMICS = (
    ("add", "u32|s32|u64|f32|f64"),
    ("min|max", "u32|s32|u64|s64"),
    ("and|or|xor", "b32|b64"),
    ("inc|dec", "u32"),
)


def _atom_operands(m: re.Match[str]) -> str:
    result = f"={m[4]}? " if m[1] == "atom" else ""
    return f"{result}[{m[2] or ''}] {m[4]}{f' {m[4]}' if m[3] == 'cas' else ''}{hint(m)}"


def _atomics(stem: str, orders: str, polls: bool) -> Callable[[Handler], Handler]:
    """Decorator: the handler of atom or red, for every operation and state space."""
    order = rf"(?:\.(?:{orders}))?(?:{_SCOPE})?"
    swaps = (("exch", "b32|b64"), ("cas", "b32|b64")) if stem == "atom" else ()

    def register(handler: Handler) -> Handler:
        for names, types in (*_ATOMICS, *swaps):
            for space, far in ((r"(?:\.(global))?", f"(?:{_HINT})?"), (_SHARED, "")):
                hinted = far if names != "cas" else ""
                for before, after in {("", hinted), (hinted, "")}:
                    text = rf"({stem}){order}{space}\.({names}){before}\.({types}){after}"
                    operation(text, _atom_operands, polls=polls)(handler)
            text = rf"({stem}){order}{_CLUSTER}\.({names})\.({types})"
            operation(text, _atom_operands, 90, (7, 8), polls=polls)(handler)
        return handler

    return register


@_atomics("atom", "relaxed|acquire|release|acq_rel", polls=True)
@_atomics("red", "relaxed|release", polls=False)
def _atom(e: Emitter, m: re.Match[str]) -> None:
    operands = list(e.operands)
    d = operands.pop(0) if m[1] == "atom" else Discard()
    destination, *values = operands
    values = values[: 2 if m[3] == "cas" else 1]
    element = NUMPY[m[4]]
    address = e.address(destination)
    names = [e.full(v, element) for v in values]
    space = _python_name(m[2])
    target = None if isinstance(d, Discard) else e.direct_target(d, element)
    suffix = _guarded(e)
    data = ", ".join(names) if len(names) == 2 else f"{names[0]}, None"
    e.line(f"v = {space}.atomic({m[3]!r}, {address}, {data}{lane_rows(e, space)}{suffix})")
    e.watch_access("atomic", space, address, SHIFT[int(element[1])], suffix)
    if target is not None:
        if suffix:
            e.line(f"if q is None: {target[0]}[...] = v")
            e.line(f"else: {target[0]}[q] = v")
        else:
            e.line(f"{target[0]}[...] = v")
    _leave(e)


@operation(r"fence(?:\.(?:sc|acq_rel))?\.(?:cta|cluster|gpu|sys)", "")
@operation(r"fence\.(?:acquire|release)\.(?:cta|cluster|gpu|sys)", "", 90, (8, 6))
@operation(r"fence\.acquire\.sync_restrict::shared::cluster\.cluster", "", 90, (8, 6))
@operation(r"fence\.release\.sync_restrict::shared::cta\.cluster", "", 90, (8, 6))
@operation(r"membar\.(?:cta|gl|sys)", "")
@operation(r"fence\.proxy\.async(?:\.(?:global|shared::(?:cta|cluster)))?", "", 90, (8, 0))
@operation(r"fence\.proxy\.alias", "", 70, (7, 5))
@operation(r"fence\.mbarrier_init\.release\.cluster", "", 90, (8, 0))
@operation(r"prefetch(?:\.(global))?\.L[12]", "[{1}]")
@operation(r"prefetch\.(global)\.L2::evict_(?:last|normal)", "[{1}]", 80, (7, 4))
@operation(r"prefetchu\.L1", "[generic]")
@operation(r"(applypriority)(?:\.(global))?\.L2::evict_normal", "[{2}] #128", 80, (7, 4))
@operation(r"(discard)(?:\.(global))?\.L2", "[{2}] #128", 80, (7, 4))
@operation(r"pmevent", "#0..15")
@operation(r"(pmevent)\.mask", "#0..65535", 20, (3, 0))
def _no_effect(e: Emitter, m: re.Match[str]) -> None:
    """Lanes see every store at once; only a watcher receives fences."""
    parts = e.instruction.parts
    if parts[:3] == ("fence", "proxy", "async") or parts[:2] == ("fence", "mbarrier_init"):
        e.watch("fence_proxy", "L")
    if parts[0] == "membar" or (parts[0] == "fence" and parts[1] != "proxy"):
        e.watch("fence", "L")


@operation(
    r"createpolicy\.fractional\.L2::evict_(?:last|normal|first|unchanged)"
    r"(?:\.L2::evict_(?:first|unchanged))?\.b64", "=u64 (f32#0..1)", 80, (7, 4),
)  # fmt: skip
def _createpolicy(e: Emitter, m: re.Match[str]) -> None:
    e.line(f"{e.target(e.operands[0], 'u8')}[...] = 0")


@operation(r"isspacep\.(global|shared)", "=pred u64")
def _isspacep(e: Emitter, m: re.Match[str]) -> None:
    d, a = e.operands
    e.line(f"{e.target(d, 'b1')}[...] = generic.is_{m[1]}({e.source(a, 'u8')})")


@operation(r"nanosleep\.u32", "i32", 70, (6, 3), polls=True)
def _nanosleep(e: Emitter, m: re.Match[str]) -> None:
    e.line(f"machine.sleep({e.source(e.operands[0], 'u4')})")
