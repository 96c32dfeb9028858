"""cp.async, cp.async.bulk and mbarrier (PTX ISA 9.7.9.25, 9.7.13.15)."""

from __future__ import annotations

import re

from urdir.driver.emulator.machine.emitter import Emitter
from urdir.driver.emulator.machine.operations import operation
from urdir.driver.emulator.machine.ops_memory import hint
from urdir.ptxgen.ptx import Discard, Operand

_SHARED = r"(?:\.shared(?:::cta)?)?"
_RELEASE, _ACQUIRE = r"(?:\.release\.(?:cta|cluster))?", r"(?:\.acquire\.(?:cta|cluster))?"
_RELAXED = r"\.relaxed\.(?:cta|cluster)"


def _mbarrier_of(m: re.Match[str]) -> str:
    """The address of an mbarrier."""
    return "[shared]" if ".shared" in m.string else "[shared/64]"


def _copy_operands(m: re.Match[str]) -> str:
    sizes = "#16" if m[1] == "cg" else "#4,8,16"
    return f"[shared] [global/32] {sizes} (i32#0..16){hint(m)}"


def _rows(e: Emitter) -> str:
    return e.special("row offset", "u8")


@operation(
    r"cp\.async\.(ca|cg)\.shared(?:::cta)?\.global(?:\.L2::cache_hint)?(?:\.L2::(?:64|128|256)B)?",
    _copy_operands, 80, (7, 0), branches=True,
)  # fmt: skip
def _copy(e: Emitter, m: re.Match[str]) -> None:
    to, origin, size, *rest = e.operands
    nbytes = e.number(size)
    if rest and "cache_hint" in e.instruction.opcode:
        rest = rest[:-1]
    destination, source = e.address(to), e.address(origin)
    count = e.full(rest[0], "u4") if rest else "None"
    shift = nbytes.bit_length() - 1
    e.line(f"asynchronous.copy({destination}, {source}, {shift}, {count}, {_rows(e)}, L)")
    read = f", {count}.nonzero()[0]" if rest else ""
    e.watch_access("load", "memory", source, shift, read)
    e.watch_access("copy", "shared", destination, shift)


@operation(r"cp\.async\.commit_group", "", 80, (7, 0), branches=True)
def _commit(e: Emitter, m: re.Match[str]) -> None:
    e.line("asynchronous.commit(L)")


@operation(r"cp\.async\.(wait_group)", "#", 80, (7, 0), branches=True)
@operation(r"cp\.async\.(wait_all)", "", 80, (7, 0), branches=True)
def _wait(e: Emitter, m: re.Match[str]) -> None:
    groups = None
    if m[1] == "wait_group":
        groups = e.number(e.operands[0])
    e.line(f"v = asynchronous.wait({groups}, L)")
    e.watch("landed", "v")


@operation(
    rf"cp\.async\.mbarrier\.arrive(\.noinc)?{_SHARED}\.b64", _mbarrier_of, 80, (7, 0), branches=True
)
def _copy_arrive(e: Emitter, m: re.Match[str]) -> None:
    address = e.address(e.operands[0])
    e.line(f"asynchronous.arrive_when_copied({address}, {_rows(e)}, L, {bool(m[1])})")
    e.watch("signal", address, "L", _rows(e))


@operation(
    rf"mbarrier\.init{_SHARED}\.b64",
    lambda m: f"{_mbarrier_of(m)} i32#1..1048575",
    80,
    (7, 0),
    branches=True,
)
def _init(e: Emitter, m: re.Match[str]) -> None:
    address, count = e.address(e.operands[0]), e.source(e.operands[1], "u4")
    e.watch_access("store", "shared", address, 3)
    e.line(f"mbarriers.init({address}, {count}, {_rows(e)})")


@operation(rf"mbarrier\.inval{_SHARED}\.b64", _mbarrier_of, 80, (7, 0), branches=True)
def _inval(e: Emitter, m: re.Match[str]) -> None:
    e.line(f"mbarriers.invalidate({e.address(e.operands[0])}, {_rows(e)})")


def _mbarrier(e: Emitter, operand: Operand) -> tuple[str, str]:
    """The names of an mbarrier's address, and of the rows that it is in."""
    address, rows = e.address(operand), _rows(e)
    if "shared::cluster" not in e.instruction.parts:
        return address, rows
    e.line(f"bar, home = cluster.resolve({address}, {rows}, None)")
    return "bar", "home"


@operation(
    rf"mbarrier\.expect_tx(?:{_RELAXED})?(?:{_SHARED}|\.shared::cluster)\.b64",
    lambda m: f"{_mbarrier_of(m)} i32", 90, (8, 0), branches=True,
)  # fmt: skip
def _expect(e: Emitter, m: re.Match[str]) -> None:
    address, rows = _mbarrier(e, e.operands[0])
    e.line(f"mbarriers.expect({address}, {e.source(e.operands[1], 'u4')}, {rows})")


def _arrive_operands(m: re.Match[str]) -> str:
    """An arrival in another CTA has no state; counts of several arrivals may be missing."""
    state = "=_" if "shared::cluster" in m.string else "=u64?"
    count = "i32" if m[1] else f"(i32#1..{2**32 - 1})"
    return f"{state} {_mbarrier_of(m)} {count}"


@operation(
    rf"mbarrier\.arrive(\.expect_tx)?{_RELEASE}\.shared::cluster\.b64",
    _arrive_operands, 90, (8, 0), branches=True,
)  # fmt: skip
@operation(
    rf"mbarrier\.arrive(\.expect_tx)?{_RELAXED}(?:{_SHARED}|\.shared::cluster)\.b64",
    _arrive_operands, 90, (8, 6), branches=True,
)  # fmt: skip
@operation(
    rf"mbarrier\.arrive(\.expect_tx){_RELEASE}{_SHARED}\.b64",
    _arrive_operands, 90, (8, 0), branches=True,
)  # fmt: skip
@operation(
    rf"mbarrier\.arrive(){_RELEASE}{_SHARED}\.b64",
    lambda m: f"=u64? {_mbarrier_of(m)}", 80, (7, 0), branches=True,
)  # fmt: skip
@operation(
    rf"mbarrier\.arrive(){_RELEASE}{_SHARED}\.b64", _arrive_operands, 90, (7, 8), branches=True
)
def _arrive(e: Emitter, m: re.Match[str]) -> None:
    state, where, *rest = e.operands
    address, rows = _mbarrier(e, where)
    count = e.constant(1, "u4")
    if "relaxed" not in e.instruction.parts:
        e.watch("signal", address, "L", rows)
    if m[1]:
        e.line(f"mbarriers.expect({address}, {e.source(rest[0], 'u4')}, {rows})")
    elif rest:
        count = e.source(rest[0], "u4")
    e.line(f"v = mbarriers.arrive({address}, {count}, {rows})")
    if not isinstance(state, Discard):
        e.line(f"{e.target(state, 'u8')}[...] = v")


def _poll_operands(m: re.Match[str]) -> str:
    state = "i32#0..1" if m[2] else "u64"
    hint_of_time = " (i32)" if m[1] == "try_wait" else ""
    return f"=pred {_mbarrier_of(m)} {state}{hint_of_time}"


@operation(
    rf"mbarrier\.(test_wait)(){_ACQUIRE}{_SHARED}\.b64",
    _poll_operands, 80, (7, 0), branches=True, polls=True,
)  # fmt: skip
@operation(
    rf"mbarrier\.(test_wait)(\.parity){_ACQUIRE}{_SHARED}\.b64",
    _poll_operands, 80, (7, 1), branches=True, polls=True,
)  # fmt: skip
@operation(
    rf"mbarrier\.(try_wait)(\.parity)?{_ACQUIRE}{_SHARED}\.b64",
    _poll_operands, 90, (7, 8), branches=True, polls=True,
)  # fmt: skip
@operation(
    rf"mbarrier\.(test_wait|try_wait)(\.parity)?{_RELAXED}{_SHARED}\.b64",
    _poll_operands, 90, (8, 6), branches=True, polls=True,
)  # fmt: skip
def _poll(e: Emitter, m: re.Match[str]) -> None:
    done, where, state = e.operands[:3]
    address = e.address(where)
    phase = e.source(state, "u4" if m[2] else "u8")
    e.line(f"v = mbarriers.poll({address}, {phase}, {_rows(e)})")
    if "relaxed" not in e.instruction.parts:
        e.watch("observe", address, "v", "L")
    e.line(f"{e.target(done, 'b1')}[...] = v")
