"""Addresses in the shared memory of a cluster (PTX ISA 9.7.9.23)."""

from __future__ import annotations

import re

from urdir.driver.emulator.machine.emitter import NUMPY, Emitter
from urdir.driver.emulator.machine.operations import operation


@operation(r"mapa\.shared::cluster\.(u32|u64)", "={1} {1}&shared i32", 90, (7, 8))
def _mapa(e: Emitter, m: re.Match[str]) -> None:
    d, a, rank = e.operands
    element = NUMPY[m[1]]
    address, which = e.source(a, element), e.source(rank, "u4")
    e.line(f"{e.target(d, element)}[...] = map_rank({address}, {which})")
