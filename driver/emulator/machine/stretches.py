"""Stretches of instructions between wgmmas, and their accesses to wgmma registers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from urdir.driver.emulator.machine.flow import Code
from urdir.driver.emulator.machine.layout import EntryLayout
from urdir.driver.emulator.machine.register_rules import Stretch, Touch, bits_of
from urdir.ptxgen.ptx.flow import reads, writes


def stretches(codes: Sequence[Code]) -> Iterator[Sequence[Code]]:
    """A block of instructions, cut before and after each operation of warpgroups."""
    start = 0
    for at, code in enumerate(codes):
        if code.operation is not None and code.operation.warpgroup:
            if start < at:
                yield codes[start:at]
            yield codes[at : at + 1]
            start = at + 1
    if start < len(codes):
        yield codes[start:]


def touches(layout: EntryLayout, codes: Sequence[Code]) -> Stretch | None:
    """Accesses of a stretch to wgmma registers; None: there are none, or it is a wgmma."""
    found = []
    for code in codes if layout.fragments else ():
        i = code.instruction
        if i.parts[0] == "wgmma":
            return None
        both = (layout.fragments.intersection(names(i)) for names in (reads, writes))
        read, written = (bits_of(map(layout.number, names)) for names in both)
        if read | written:
            found.append(Touch(i.line, i.text, read, written))
    if not found:
        return None
    read, written = 0, 0
    for touch in found:
        read |= touch.reads
        written |= touch.writes
    return Stretch(tuple(found), read, written)
