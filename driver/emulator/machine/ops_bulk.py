"""Bulk copies and st.async (PTX ISA 9.7.9.25.4, 9.7.9.12)."""

from __future__ import annotations

import re

from urdir.driver.emulator.machine.emitter import NUMPY, Emitter
from urdir.driver.emulator.machine.operations import operation
from urdir.driver.emulator.machine.ops_memory import SHIFT, hint, vector_data, vector_item

_HINT = r"(?:\.L2::cache_hint)?"
_COMPLETES = r"\.mbarrier::complete_tx::bytes"
#: The size of a copy: of constants ptxas takes multiples of 16 bytes below 2 GiB.
_SIZE = f"i32#0..{2**31 - 16}/16"


def _load_operands(m: re.Match[str]) -> str:
    masks = " u16#0..65535" if m[1] else ""
    return f"[shared] [global/32] {_SIZE} [shared]{masks}{hint(m)}"


@operation(
    rf"cp\.async\.bulk\.shared::cluster\.global{_COMPLETES}(\.multicast::cluster)?{_HINT}",
    _load_operands, 90, (8, 0), branches=True,
)  # fmt: skip
@operation(
    rf"cp\.async\.bulk\.shared::cta\.global{_COMPLETES}(){_HINT}",
    _load_operands, 90, (8, 6), branches=True,
)  # fmt: skip
def _load(e: Emitter, m: re.Match[str]) -> None:
    to, origin, size, barrier, *rest = e.operands
    names = [e.address(to), e.address(origin), e.source(size, "u4"), e.address(barrier)]
    rows = e.special("row offset", "u8")
    masks = e.source(rest[0], "u2") if m[1] else "None"
    e.line(f"bulk.load({', '.join(names)}, {rows}, {masks})")
    e.watch("bulk", *names, "L", masks)


@operation(
    rf"cp\.async\.bulk\.shared::cluster\.shared::cta{_COMPLETES}",
    f"[shared] [shared] {_SIZE} [shared]", 90, (8, 0), branches=True,
)  # fmt: skip
def _send(e: Emitter, m: re.Match[str]) -> None:
    to, origin, size, barrier = e.operands
    names = [e.address(to), e.address(origin), e.source(size, "u4"), e.address(barrier)]
    e.line(f"bulk.send({', '.join(names)}, {e.special('row offset', 'u8')})")
    e.watch("bulk_send", *names, "L")


@operation(
    rf"st\.async(?:\.weak)?(?:\.shared::cluster)?{_COMPLETES}(?:\.(v2|v4))?"
    r"\.(b32|b64|[us]32|[us]64|f32|f64)",
    lambda m: f"[shared] {vector_item(m[2], m[1])} [shared]", 90, (8, 1), branches=True,
)  # fmt: skip
def _store_async(e: Emitter, m: re.Match[str]) -> None:
    to, value, barrier = e.operands
    data, size = vector_data(e, value, NUMPY[m[2]])
    names = [e.address(to), data, str(SHIFT[size]), e.address(barrier)]
    e.line(f"bulk.store_async({', '.join(names)}, {e.special('row offset', 'u8')})")
    e.watch("store_async", *names, "L")


@operation(
    rf"cp\.async\.bulk\.global\.shared::cta\.bulk_group{_HINT}",
    lambda m: f"[global/32] [shared] {_SIZE}{hint(m)}", 90, (8, 0), branches=True,
)  # fmt: skip
def _store(e: Emitter, m: re.Match[str]) -> None:
    to, origin, size = e.operands[:3]
    names = [e.address(to), e.address(origin), e.source(size, "u4")]
    rows = e.special("row offset", "u8")
    e.line(f"bulk.store({', '.join(names)}, {rows}, L, {e.instruction.line})")
    e.watch("bulk_store", *names, "L")


@operation(r"cp\.async\.bulk\.commit_group", "", 90, (8, 0), branches=True)
def _commit(e: Emitter, m: re.Match[str]) -> None:
    e.line("bulk.commit(L)")
    e.watch("bulk_commit", "L")


@operation(r"cp\.async\.bulk\.wait_group(\.read)?", "#", 90, (8, 0), branches=True)
def _wait(e: Emitter, m: re.Match[str]) -> None:
    groups = e.number(e.operands[0])
    e.line(f"bulk.wait({groups}, {bool(m[1])}, L)")
    e.watch("bulk_wait", str(groups), "L")


@operation(
    rf"cp\.async\.bulk\.prefetch\.L2\.global{_HINT}",
    lambda m: f"[global] {_SIZE}{hint(m)}", 90, (8, 0), branches=True,
)  # fmt: skip
def _prefetch(e: Emitter, m: re.Match[str]) -> None:
    """No effect: only time would change."""
