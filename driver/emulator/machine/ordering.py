"""Ordering of the threads of a launch: barriers, fences, releases and acquires.

Threads of one CTA are ordered by a barrier (bar, barrier, mbarrier), lanes of one warp also by
bar.warp.sync, any two threads by a release (or a fence before a strong write) that the other
acquires (or reads strongly, then a fence). What one thread releases or acquires holds for its whole
warp. A barrier that some of its threads miss is a fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from urdir.driver.emulator.machine.clocks import Clocks, Knowledge, join
from urdir.driver.emulator.machine.faults import LAUNCH_FAILED, KernelFault
from urdir.driver.emulator.machine.flow import Block
from urdir.driver.emulator.machine.groups import WARP
from urdir.driver.emulator.machine.watch import Access, Array, Watch, WatchedLaunch
from urdir.driver.emulator.machine.wave import Wave

_RELEASES = frozenset(("release", "acq_rel"))
_ACQUIRES = frozenset(("acquire", "acq_rel"))

#: Where something is released: (0, global address) or (1, byte of the wave's shared memory).
Location = tuple[int, int]


def together(arrivals: Sequence[tuple[Block, Array]]) -> list[tuple[Block, Array]]:
    """The lanes that arrived at each barrier instruction, once each.

    The threads of a warp may arrive one after the other, after a loop that they left at different
    times: ptxas lets them wait for each other there (WARPSYNC or BSYNC before the BAR, nvJitLink
    13.5, sm_75 to sm_120).
    """
    by_pc: dict[int, list[tuple[Block, Array]]] = {}
    for block, lanes in arrivals:
        by_pc.setdefault(block.start, []).append((block, lanes))
    return [(one[0][0], np.unique(np.concatenate([n for _, n in one]))) for one in by_pc.values()]


class Ordering(Watch):
    """Maintains the clocks of a launch."""

    def begin(self, launch: WatchedLaunch) -> None:
        """Start of a launch."""
        super().begin(launch)
        self._clocks: Clocks | None = None
        self._released: dict[Location, Knowledge] = {}
        #: Per warp: what a strong write publishes since its fence, what a fence will acquire.
        self._fenced: dict[int, Knowledge] = {}
        self._seen: dict[int, Knowledge] = {}

    def begin_wave(self, wave: Wave, first_cta: int) -> None:
        """Start of a wave: shared memory and barriers are new."""
        super().begin_wave(wave, first_cta)
        if self._clocks is None:
            ctas = self.grid[0] * self.grid[1] * self.grid[2]
            self._clocks = Clocks(ctas, wave.lanes_per_cta // WARP)
        self._released = {at: known for at, known in self._released.items() if at[0] == 0}
        #: Barrier number and CTA -> what the arrivals released.
        self._barriers: dict[tuple[int, int], Knowledge] = {}
        self._arrived: dict[int, list[tuple[Block, Array]]] = {}

    @property
    def clocks(self) -> Clocks:
        """The launch's clocks."""
        assert self._clocks is not None
        return self._clocks

    def fault(self, message: str) -> KernelFault:
        """A fault of the kernel."""
        return KernelFault(LAUNCH_FAILED, f"kernel {self.program.name}: {message}")

    # ---- memory ----

    def synchronise(self, access: Access, where: Array) -> None:
        """Process a strong operation lane by lane, since lanes may share an address."""
        action, order = access.action, access.order
        for at, lane in zip(where.tolist(), access.lanes.tolist(), strict=True):
            key, warp = (int(access.is_shared), at), lane // WARP
            if action != "store" and (found := self._released.get(key)):
                if order in _ACQUIRES:
                    self.clocks.acquire(warp, found)
                else:
                    join(self._seen.setdefault(warp, {}), found)
            if action != "load":
                given = self.clocks.release(warp) if order in _RELEASES else self._fenced.get(warp)
                if given:
                    join(self._released.setdefault(key, {}), given)

    def fence(self, line: int, lanes: Array) -> None:
        """Acquire what was read, publish what was done with the next write."""
        for warp in np.unique((lanes + self.first_lane) // WARP).tolist():
            if seen := self._seen.pop(warp, None):
                self.clocks.acquire(warp, seen)
            self._fenced[warp] = self.clocks.release(warp)

    def converge(self, line: int, lanes: Array) -> None:
        """bar.warp.sync."""
        self.clocks.converge(np.unique((lanes + self.first_lane) // WARP))

    def signal(self, line: int, mbarrier: Array, lanes: Array, rows: Array) -> None:
        """An arrival releases."""
        self._at_mbarriers(mbarrier, lanes, rows, self.release_at)

    def observe(self, line: int, mbarrier: Array, done: Array, lanes: Array) -> None:
        """Observing the end of a phase acquires."""
        rows = self.rows(lanes[done] + self.first_lane)
        self._at_mbarriers(mbarrier[done], lanes[done], rows, self._acquire_at)

    def _at_mbarriers(self, mbarrier: Array, lanes: Array, rows: Array, act: Any) -> None:
        lanes = lanes + self.first_lane
        at = mbarrier.astype(np.int64) + rows.astype(np.int64)
        pairs = {(int(a), int(lane) // WARP) for a, lane in zip(at, lanes, strict=True)}
        for where, warp in sorted(pairs):
            act((1, where), warp)

    def release_at(self, key: Location, warp: int) -> None:
        """A warp releases to warps that acquire at a location."""
        join(self._released.setdefault(key, {}), self.clocks.release(warp))

    def _acquire_at(self, key: Location, warp: int) -> None:
        self.clocks.acquire(warp, self._released.get(key, {}))

    # ---- barriers ----

    def barrier(self, block: Block, lanes: Array) -> None:
        """All threads of some CTAs pass a barrier."""
        ctas = np.unique((lanes + self.first_lane) // self.wave.lanes_per_cta)
        self.clocks.meet(ctas)
        warps = self.wave.lanes_per_cta // WARP
        for cta in ctas.tolist() if self._fenced or self._seen else ():
            self._share(range(cta * warps, (cta + 1) * warps))

    def arrive(self, block: Block, number: int, lanes: Array) -> None:
        """Some threads arrive: they release."""
        self._arrived.setdefault(number, []).append((block, lanes))
        warps = self.wave.lanes_per_cta // WARP
        for warp in np.unique((lanes + self.first_lane) // WARP).tolist():
            key = (number, warp // warps)
            join(self._barriers.setdefault(key, {}), self.clocks.release(warp))

    def complete(self, number: int, ctas: Array) -> None:
        """Waiting warps acquire."""
        size = self.wave.lanes_per_cta
        still = []
        here: list[tuple[Block, Array]] = []
        for block, lanes in self._arrived.pop(number, []):
            now = ctas[lanes // size]
            if now.any():
                here.append((block, lanes[now]))
            if not now.all():
                still.append((block, lanes[~now]))
        if still:
            self._arrived[number] = still
        for block, lanes in together(here):
            self._check_warps(block, number, lanes)
        self._check_threads(number, here)
        for block, lanes in here:
            if block.barrier is None or not block.barrier.waits:
                continue
            warps = np.unique((lanes + self.first_lane) // WARP)
            for warp in warps.tolist():
                knowledge = self._barriers[number, warp // (size // WARP)]
                self.clocks.acquire(warp, knowledge)
            self.clocks.converge(warps)

    def _share(self, warps: range) -> None:
        """Share fences of all meeting warps, for "all fence, barrier, one writes the flag"."""
        for of_warp in (self._fenced, self._seen):
            together: Knowledge = {}
            for warp in warps if of_warp else ():
                join(together, of_warp.get(warp, {}))
            for warp in warps if together else ():
                of_warp[warp] = dict(together)

    def _check_warps(self, block: Block, number: int | str, lanes: Array) -> None:
        """Check that the threads of a warp reach the same bar.sync, which is .aligned."""
        parts = block.instruction.parts
        if parts[0] == "barrier" and "aligned" not in parts:
            return
        warp, count = np.unique(lanes // WARP, return_counts=True)
        flags = self.wave.all_flags().reshape(-1, WARP)
        whole = flags.sum(axis=1)[warp]
        for i in np.flatnonzero(count < whole).tolist():
            inside = lanes[lanes // WARP == warp[i]]
            members = np.flatnonzero(flags[warp[i]]) + warp[i] * WARP
            missing = int(np.setdiff1d(members, inside)[0]) + self.first_lane
            raise self.fault(
                f"barrier {number} in divergent code: {self.line(block.instruction.line)} is "
                f"reached by {count[i]} of the {whole[i]} threads of a warp, by "
                f"{self.thread(int(inside[0]) + self.first_lane)} but not by "
                f"{self.thread(missing)}; hint: move the barrier to code that all threads of the "
                "CTA execute"
            )

    def _check_threads(self, number: int, here: Sequence[tuple[Block, Array]]) -> None:
        """Check that a barrier without a count is reached by all threads of the CTA, ended ones
        too."""
        whole = [(b, lanes) for b, lanes in here if b.barrier and b.barrier.count is None]
        if not whole or len(whole) < len(here):
            return
        arrived = np.concatenate([lanes for _, lanes in whole])
        size = self.wave.lanes_per_cta
        cta, count = np.unique(arrived // size, return_counts=True)
        short = np.flatnonzero(count < self.wave.threads)
        if not short.size:
            return
        one = int(cta[short[0]])
        everybody = np.flatnonzero(self.wave.all_flags()[one * size : (one + 1) * size])
        missing = int(np.setdiff1d(everybody + one * size, arrived)[0]) + self.first_lane
        raise self.fault(
            f"barrier {number} is not reached by all threads: "
            f"{self.line(whole[0][0].instruction.line)} is reached by {count[short[0]]} of the "
            f"{self.wave.threads} threads of the CTA, by "
            f"{self.thread(int(arrived[arrived // size == one][0]) + self.first_lane)} but "
            f"{self.thread(missing)} has ended before; hint: let threads without work go on to "
            "the barrier, and guard what they would do"
        )
