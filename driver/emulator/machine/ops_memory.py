"""Loads, stores, atomics and fences (PTX ISA 9.7.9, 9.7.13)."""

from __future__ import annotations

import re

from urdir.driver.emulator.machine.emitter import NUMPY, Emitter
from urdir.driver.emulator.machine.operations import operation
from urdir.ptxgen.ptx import Address, Discard, Operand, Symbol, Vector

_SCOPE = r"(?:\.(?:cta|cluster|gpu|sys))?"
_ORDER = rf"(?:\.(?:weak|volatile|relaxed|release|mmio){_SCOPE})?"
_POLLING = rf"\.(?:volatile|relaxed|acquire|mmio){_SCOPE}"
_HINTS = r"(?:\.(?:ca|cg|cs|lu|cv|wb|wt))?(?:\.L1::\w+)?(?:\.L2::(?:evict_\w+|\d+B|cache_hint))*"
_TYPE = r"(?:\.(v2|v4|v8))?\.(b8|b16|b32|b64|[us]8|[us]16|[us]32|[us]64|f16|f32|f64)"

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


def _elements(e: Emitter, operand: Operand, vector: str | None) -> tuple[Operand, ...]:
    count = int(vector[1]) if vector else 1
    elements = operand.elements if isinstance(operand, Vector) else (operand,)
    if len(elements) != count:
        raise e.fail(f"{count} registers are needed, not {len(elements)}")
    return elements


def _is_shared(e: Emitter, space: str | None, operand: Operand) -> str:
    """The Python name of the address space."""
    if space is None:
        base = operand.base if isinstance(operand, Address) else None
        if isinstance(base, Symbol) and base.name in e.layout.shared:
            raise e.fail(f"{base.name} is a .shared address, not a generic one")
        return "generic"
    if space.startswith("shared"):
        return "cluster" if space.endswith("cluster") else "shared"
    return "memory"


_LOAD_SPACE = r"(?:\.(global|const|shared(?:::cta)?))?"
_CLUSTER = r"\.(shared::cluster)"


@operation(rf"ld(?:\.weak)?{_LOAD_SPACE}{_HINTS}{_TYPE}")
@operation(rf"ld\.(global){_HINTS}\.nc{_HINTS}{_TYPE}")
@operation(rf"ld{_POLLING}{_LOAD_SPACE}{_HINTS}{_TYPE}", polls=True)
@operation(rf"ld(?:\.weak)?{_CLUSTER}{_TYPE}", 90, (7, 8))
@operation(rf"ld{_POLLING}{_CLUSTER}{_TYPE}", 90, (7, 8), polls=True)
def _ld(e: Emitter, m: re.Match[str]) -> None:
    d, source = e.operands[:2]
    element = NUMPY[m[3]]
    elements = _elements(e, d, m[2])
    size = int(element[1]) * len(elements)
    if size not in SHIFT:
        raise e.fail(f"an access moves at most 16 bytes, not {size}")
    address = e.address(source)
    space = _is_shared(e, m[1], source)
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


@operation(rf"ld\.param{_TYPE}")
def _ld_param(e: Emitter, m: re.Match[str]) -> None:
    d, source = e.operands
    element = NUMPY[m[2]]
    elements = _elements(e, d, m[1])
    if not isinstance(source, Address) or not isinstance(source.base, Symbol):
        raise e.fail("ld.param takes [parameter+offset]")
    known = e.layout.parameters.get(source.base.name)
    if known is None:
        raise e.fail(f"{source.base.name} is not a parameter")
    size = int(element[1])
    if source.offset < 0 or source.offset + size * len(elements) > known[1]:
        raise e.fail(f"{source.base.name} has {known[1]} bytes")
    start = known[0] + source.offset
    if start % (size * len(elements)):
        raise e.fail(f"offset {start} of the parameters is misaligned")
    for at, operand in enumerate(elements):
        first = start // size + at
        e.line(f"{e.target(operand, element)}[...] = P_{element}[{first}]")


@operation(rf"st{_ORDER}(?:\.(global|shared(?:::cta)?))?{_HINTS}{_TYPE}")
@operation(rf"st{_ORDER}{_CLUSTER}{_TYPE}", 90, (7, 8))
def _st(e: Emitter, m: re.Match[str]) -> None:
    destination, value = e.operands[:2]
    element = NUMPY[m[3]]
    elements = _elements(e, value, m[2])
    size = int(element[1]) * len(elements)
    if size not in SHIFT:
        raise e.fail(f"an access moves at most 16 bytes, not {size}")
    address = e.address(destination)
    space = _is_shared(e, m[1], destination)
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


def vector_data(e: Emitter, value: Operand, element: str, vector: str | None) -> tuple[str, int]:
    """What a store of a value or vector writes, (n,), and the bytes of each lane."""
    elements = _elements(e, value, vector)
    size = int(element[1]) * len(elements)
    if size not in SHIFT:
        raise e.fail(f"an access moves at most 16 bytes, not {size}")
    if len(elements) == 1:
        return f"{e.full(value, element)}.view(u{size})", size
    return _joined(e, elements, element), size


_ATOMICS = r"(add|min|max|and|or|xor|exch|cas|inc|dec)\.(b32|b64|[us]32|[us]64|f32|f64|f16x2)"
_ATOM_ORDER = r"(?:\.(relaxed|acquire|release|acq_rel))?(?:\.(cta|cluster|gpu|sys))?"


@operation(
    rf"(atom){_ATOM_ORDER}(?:\.(global|shared(?:::cta)?))?\.{_ATOMICS}(?:\.L2::cache_hint)?",
    polls=True,
)
@operation(rf"(red){_ATOM_ORDER}(?:\.(global|shared(?:::cta)?))?\.{_ATOMICS}(?:\.L2::cache_hint)?")
@operation(rf"(atom){_ATOM_ORDER}{_CLUSTER}\.{_ATOMICS}", 90, (7, 8), polls=True)
@operation(rf"(red){_ATOM_ORDER}{_CLUSTER}\.{_ATOMICS}", 90, (7, 8))
def _atom(e: Emitter, m: re.Match[str]) -> None:
    operands = list(e.operands)
    d = operands.pop(0) if m[1] == "atom" else Discard()
    destination, *values = operands
    if len(values) != (2 if m[5] == "cas" else 1):
        raise e.fail("wrong number of operands")
    element = NUMPY[m[6]]
    if m[5] in ("and", "or", "xor", "exch", "cas") and m[6][0] != "b":
        raise e.fail(f"{m[1]}.{m[5]} takes .b32 or .b64")
    if m[5] in ("add", "min", "max") and (m[6][0] == "b" or m[6] == "f16x2"):
        raise e.fail(f"{m[1]}.{m[5]} has no .{m[6]}")
    if (m[5] in ("min", "max") and m[6][0] == "f") or (m[5] in ("inc", "dec") and m[6] != "u32"):
        raise e.fail(f"{m[1]}.{m[5]} has no .{m[6]}")
    address = e.address(destination)
    names = [e.full(v, element) for v in values]
    space = _is_shared(e, m[4], destination)
    target = None if isinstance(d, Discard) else e.direct_target(d, element)
    suffix = _guarded(e)
    data = ", ".join(names) if len(names) == 2 else f"{names[0]}, None"
    e.line(f"v = {space}.atomic({m[5]!r}, {address}, {data}{lane_rows(e, space)}{suffix})")
    e.watch_access("atomic", space, address, SHIFT[int(element[1])], suffix)
    if target is not None:
        if suffix:
            e.line(f"if q is None: {target[0]}[...] = v")
            e.line(f"else: {target[0]}[q] = v")
        else:
            e.line(f"{target[0]}[...] = v")
    _leave(e)


@operation(
    r"fence(?:\.(?:sc|acq_rel|acquire|release))?(?:\.sync_restrict::\S+)?\.(?:cta|cluster|gpu|sys)"
)
@operation(r"membar\.(?:cta|gl|sys)")
@operation(r"fence\.proxy\.(?:async(?:\.(?:global|shared::(?:cta|cluster)))?|alias)", 90, (8, 0))
@operation(r"fence\.mbarrier_init\.release\.cluster", 90, (8, 0))
@operation(r"prefetch\.(?:global\.)?L[12](?:::evict_\w+)?")
@operation(r"prefetchu\.L1")
@operation(r"applypriority\.global\.L2::evict_normal|discard\.global\.L2")
@operation(r"pmevent(?:\.mask)?")
def _no_effect(e: Emitter, m: re.Match[str]) -> None:
    """Lanes see every store at once; only a watcher receives fences."""
    parts = e.instruction.parts
    if parts[:3] == ("fence", "proxy", "async") or parts[:2] == ("fence", "mbarrier_init"):
        e.watch("fence_proxy", "L")
    if parts[0] == "membar" or (parts[0] == "fence" and parts[1] != "proxy"):
        e.watch("fence", "L")


@operation(r"createpolicy\.fractional\.L2::\w+(?:\.L2::\w+)?\.b64", 80, (7, 4))
def _createpolicy(e: Emitter, m: re.Match[str]) -> None:
    e.line(f"{e.target(e.operands[0], 'u8')}[...] = 0")


@operation(r"isspacep\.(global|shared)")
def _isspacep(e: Emitter, m: re.Match[str]) -> None:
    d, a = e.operands
    e.line(f"{e.target(d, 'b1')}[...] = generic.is_{m[1]}({e.source(a, 'u8')})")


@operation(r"nanosleep\.u32", 70, (6, 3), polls=True)
def _nanosleep(e: Emitter, m: re.Match[str]) -> None:
    e.line(f"machine.sleep({e.source(e.operands[0], 'u4')})")
