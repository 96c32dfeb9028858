"""Registers that warpgroups hand to each other: setmaxnreg (PTX ISA 9.7.19.5).

The emulator allocates no registers. It assumes that a CTA starts with as many per thread as its
directives allow, since ptxas gives a kernel with setmaxnreg that many. (If the entry has neither
.maxnreg nor .minnctapersm, ptxas ignores setmaxnreg, which lint reports.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from urdir.driver.emulator.machine.faults import LAUNCH_FAILED, AccessFault
from urdir.driver.emulator.machine.wgmma import WARPGROUP
from urdir.ptxgen.ptx.architecture import SM_REGISTERS

Array = npt.NDArray[Any]

#: ptxas gives a thread at most this many, a multiple of the other number.
_MOST, _UNIT = 255, 8


def registers_at_start(directives: Mapping[str, tuple[int, ...]], threads: int) -> int:
    """Registers per thread at the start of an entry with CTAs of ``threads`` threads."""
    if "maxnreg" in directives:
        return directives["maxnreg"][0]
    threads = math.prod(directives.get("maxntid", directives.get("reqntid", (threads,))))
    (resident,) = directives.get("minnctapersm", (1,))
    warpgroups = -(-threads // WARPGROUP) * resident
    return min(_MOST, SM_REGISTERS // (warpgroups * WARPGROUP)) // _UNIT * _UNIT


class RegisterPool:
    """Registers available to the threads of each warpgroup of a wave, ``per_cta`` per CTA."""

    def __init__(self, warpgroups: int, per_cta: int, at_start: int) -> None:
        self.at_start = at_start
        self._per_cta = per_cta
        self._held = np.zeros(warpgroups, np.int64)
        self.clear()

    def clear(self) -> None:
        """New CTAs."""
        self._held[:] = self.at_start
        #: The line of the last setmaxnreg.inc; 0: none so far.
        self._line = 0

    def change(self, which: Array, count: int, is_more: bool, line: int) -> None:
        """setmaxnreg of some warpgroups; AccessFault at the first whose change has the wrong
        direction."""
        held = self._held[which]
        wrong = held > count if is_more else held < count
        if wrong.any():
            at = int(wrong.argmax())
            verb = "raises" if is_more else "lowers"
            raise AccessFault(
                at, LAUNCH_FAILED,
                f"setmaxnreg {verb} the registers of a thread to {count}, from {held[at]}",
            )  # fmt: skip
        self._held[which] = count
        if is_more:
            self._line = line

    def finish(self) -> None:
        """All CTAs have ended: check that their last register counts fit together."""
        if not self._line:
            return
        held = self._held.reshape(-1, self._per_cta)
        room = self.at_start * self._per_cta
        for cta in np.flatnonzero(held.sum(axis=1) > room).tolist()[:1]:
            numbers = ", ".join(map(str, held[cta].tolist()))
            raise AccessFault(
                0, LAUNCH_FAILED,
                f"setmaxnreg.inc waits for ever: the warpgroups of a CTA want {numbers} registers "
                f"a thread, which is more than {self._per_cta} times {self.at_start}",
                self._line,
            )  # fmt: skip
