"""Sanitizer: unordered accesses of different threads, and barriers that some threads miss.

Two accesses of one address by different threads, one of them a write, are a race unless

- both are strong operations (atomics, volatile, relaxed, acquire, release): flags, counters, data
  that carries its own flag;
- or one is ordered before the other, see ordering.py;
- or both write the same value: it does not matter which was last.

Shuffles, votes and matrix instructions order no memory accesses, and lockstep of a warp does not
either (PTX ISA, Memory Consistency Model). For each byte only the last write and two reads are
stored: a race can be missed. cp.async counts as a write of the issuing thread at its wait. For
other asynchronous accesses see async_races.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from urdir.driver.emulator.machine.cluster_ordering import ClusterOrdering
from urdir.driver.emulator.machine.groups import WARP
from urdir.driver.emulator.machine.memory import Allocation
from urdir.driver.emulator.machine.peer_races import DeviceOrder
from urdir.driver.emulator.machine.shadow import (
    Shadow,
    encode,
    epoch_of,
    is_strong,
    lane_of,
    line_of,
)
from urdir.driver.emulator.machine.watch import Access, Array, WatchedLaunch
from urdir.driver.emulator.machine.wave import Wave

_HINTS = {
    "one instruction": "give each thread an address of its own, let one thread write, or use an "
    "atomic",
    "warp": "order the lanes of a warp by bar.warp.sync: shuffles and lockstep order no memory",
    "copy": "cp.async.wait_group is for the thread that copied; the others need a bar.sync after "
    "it",
    "CTA": "put a bar.sync between the two",
    "cluster": "CTAs of a cluster are ordered by barrier.cluster.arrive and barrier.cluster.wait, "
    "not by a bar.sync, nor by an arrival with .relaxed",
    "grid": "CTAs are ordered only by a release that the other acquires, or by two launches",
}


@dataclass(frozen=True, slots=True)
class Place:
    """A memory: its accesses, contents and base address (-1 for shared memory)."""

    shadow: Shadow
    views: tuple[Array, ...]
    base: int


class RaceDetector(ClusterOrdering):
    """Raises KernelFault at the first race, or barrier that not all threads reach together.

    ``devices`` is given if several devices may access the same memory.
    """

    def __init__(self, devices: DeviceOrder | None = None) -> None:
        self._devices = devices

    def begin(self, launch: WatchedLaunch) -> None:
        """Start of a launch."""
        super().begin(launch)
        self._global: dict[int, Shadow] = {}

    def begin_wave(self, wave: Wave, first_cta: int) -> None:
        """Start of a wave: shared memory is new."""
        super().begin_wave(wave, first_cta)
        self._shared = Shadow(wave.shared.views[0].size)
        self._left = np.full(wave.ctas, wave.threads)
        self._is_visited = False

    # ---- accesses ----

    def touch(self, access: Access) -> None:
        """Compare with earlier accesses, and record."""
        if access.is_shared:
            where = access.address.astype(np.int64) + self.rows_of(access)
            if access.rows is not None:
                self.check_begun(access)
                self._is_visited = True
            if int(access.address.max()) + (1 << access.shift) <= self.shared.nbytes:
                self._record(access, Place(self._shared, self.shared.views, -1), where)
        else:
            where = access.address
            for allocation, some in self._by_allocation(access):
                start = allocation.address
                shadow = self._global.get(start)
                if shadow is None:
                    shadow = self._global[start] = Shadow(allocation.nbytes)
                offset = (some.address - np.uint64(start)).astype(np.int64)
                self._record(some, Place(shadow, allocation.views, start), offset)
                if self._devices is not None and allocation.kind == "device":
                    by = f"{self.line(some.line)} of kernel {self.program.name}"
                    self._devices.touch(self.memory.ordinal, some, allocation, by, self.fault)
        if access.order != "weak":
            self.synchronise(access, where)

    def _by_allocation(self, access: Access) -> Iterator[tuple[Allocation, Access]]:
        """Split an access by allocation, without lanes outside all: those fault anyway."""
        left = access
        while left.lanes.size:
            allocation = self.memory.find(int(left.address[0]))
            if allocation is None:
                return
            inside = (left.address >= allocation.address) & (left.address < allocation.end)
            yield allocation, left.pick(inside)
            left = left.pick(~inside)

    def _record(self, access: Access, place: Place, offset: Array) -> None:
        shadow = place.shadow
        size = 1 << access.shift
        if int(offset.max()) + size > place.views[0].size or (offset & (size - 1)).any():
            return  # beyond the end, or misaligned: the access itself is a fault
        if access.action != "load":
            self.check_write(access, place, offset)
        index, each = shadow.units(offset, access.shift)
        epochs = self.clocks.now[access.lanes // WARP]
        code = encode(access.lanes, epochs, access.line, access.order != "weak")
        if each > 1:
            code = np.repeat(code, each)
        writes = shadow.writes[index]
        if access.action == "load":
            self._compare(writes, code, place, index)
            shadow.read(index, code)
            return
        if access.values is not None:
            # Rewriting the present value is harmless.
            values = np.ascontiguousarray(access.values).view(place.views[shadow.shift].dtype)
            writes[place.views[shadow.shift][index] == values] = 0
        for past in (writes, shadow.reads[index], shadow.others[index]):
            self._compare(past, code, place, index)
        shadow.write(index, code)
        if access.order == "weak":
            winners = shadow.writes[index]
            if access.values is not None and (winners != code).any():
                _, group = np.unique(index, return_inverse=True)
                last = np.empty_like(values)
                last[group] = values
                winners = np.where(last[group] == values, code, winners)
            for at in np.flatnonzero(winners != code).tolist()[:1]:
                self._report(int(code[at]), int(winners[at]), place, int(index[at]))

    def fence(self, line: int, lanes: Array) -> None:
        """A fence also counts for other devices."""
        super().fence(line, lanes)
        if self._devices is not None:
            self._devices.fence(self.memory.ordinal)

    def check_write(self, access: Access, place: Place, offset: Array) -> None:
        """Hook for further rules about writes."""

    def _compare(self, past: Array, code: Array, place: Place, index: Array) -> None:
        if (at := self._unordered(past, code)) is not None:
            self._report(int(past[at]), int(code[at]), place, int(index[at]))

    def _unordered(self, past: Array, code: Array) -> int | None:
        """The first position where ``past`` may not have finished before an access."""
        if not past.any():
            return None
        before, now = lane_of(past), lane_of(code)
        suspects = (past != 0) & (before != now)
        suspects &= ~(is_strong(past) & is_strong(code))
        at = np.flatnonzero(suspects)
        if not at.size:
            return None
        known = self.clocks.known(now[at] // WARP, before[at] // WARP)
        races = at[known < epoch_of(past[at])]
        return int(races[0]) if races.size else None

    def landed(self, line: int, copies: Sequence[Any]) -> None:
        """A thread has waited for its copies: they count as written now, except those announced by
        an mbarrier."""
        for copy in copies:
            left = ~copy.announced
            if left.any():
                offset = (copy.addresses + copy.rows).astype(np.int64)[left]
                self.rewrite(offset, copy.shift, copy.lanes[left] + self.first_lane)

    def rewrite(self, offset: Array, shift: int, lanes: Array) -> None:
        """Count copies of these lanes as written now, unless written since."""
        index, each = self._shared.units(offset, shift)
        lanes = np.repeat(lanes, each)
        issued = self._shared.writes[index]
        own = lane_of(issued) == lanes
        code = encode(lanes, self.clocks.now[lanes // WARP], 0, False) | line_of(issued)
        self._shared.writes[index[own]] = code[own]

    # ---- ends ----

    def end(self, lanes: Array) -> None:
        """Check that a CTA ends only after others in its cluster are done with its shared
        memory."""
        if self.wave.cluster_size == 1:
            return
        cta, count = np.unique(lanes // self.wave.lanes_per_cta, return_counts=True)
        self._left[cta] -= count
        for ended in cta[self._left[cta] == 0].tolist() if self._is_visited else ():
            self._check_visits(ended)

    def _check_visits(self, cta: int) -> None:
        """A remote access is over when any warp of the CTA knows of it."""
        shadow, stride = self._shared, self.shared.stride
        units = slice(*(at >> shadow.shift for at in (cta * stride, (cta + 1) * stride)))
        size = self.wave.lanes_per_cta
        home = cta + self.first_lane // size
        warps = range(home * size // WARP, (home + 1) * size // WARP)
        for codes in (shadow.writes[units], shadow.reads[units], shadow.others[units]):
            visits = np.unique(codes[(codes != 0) & (lane_of(codes) // size != home)])
            visitor = lane_of(visits) // WARP
            known = np.zeros(visits.size, np.int32)
            for warp in warps if visits.size else ():
                known = np.maximum(known, self.clocks.known(np.full(visits.size, warp), visitor))
            for code in visits[known < epoch_of(visits)][:1]:
                one = np.array([code])
                raise self.fault(
                    f"race: {self.line(int(line_of(one)[0]))} of "
                    f"{self.thread(int(lane_of(one)[0]))} touches the shared memory of CTA "
                    f"{self.cta(home * size)}, which may have ended before; hint: let it wait with "
                    "barrier.cluster.arrive and barrier.cluster.wait until the others have done"
                )

    # ---- reports ----

    def _report(self, past: int, code: int, place: Place, unit: int) -> None:
        """Raise for a race."""
        offset = unit << place.shadow.shift
        pair = np.array([past, code])
        lines, lanes = line_of(pair).tolist(), lane_of(pair).tolist()
        size = self.wave.lanes_per_cta
        copied = "cp.async" in self.program.instructions.get(lines[0], "")
        if lanes[0] // size != lanes[1] // size:
            hint = "grid" if place.base >= 0 else "cluster"
        elif lines[0] == lines[1]:
            hint = "one instruction"
        elif copied:
            hint = "copy"
        else:
            hint = "warp" if lanes[0] // WARP == lanes[1] // WARP else "CTA"
        first, second = (
            f"{self.line(line)} of {self.thread(lane)}"
            for line, lane in zip(lines, lanes, strict=True)
        )
        self._report_pair(first, second, self._where(place.base, offset), hint)

    def _report_pair(self, first: str, second: str, where: str, hint: str) -> NoReturn:
        raise self.fault(
            f"race: {first} and {second} touch {where} with nothing to order them; hint: "
            f"{_HINTS[hint]}"
        )

    def _where(self, base: int, offset: int) -> str:
        """An address, and its variable or parameter."""
        if base < 0:
            cta, address = divmod(offset, self.shared.stride)
            lane = cta * self.wave.lanes_per_cta + self.first_lane
            whose = f" of CTA {self.cta(lane)}" if self.wave.cluster_size > 1 else ""
            return f"shared address 0x{address:x}{whose}, {self.shared.describe(address)},"
        address = base + offset
        found = self.memory.describe(address)
        owners = [
            (address - value, name)
            for name, (at, nbytes) in self.program.layout.parameters.items()
            if nbytes == 8
            and base <= (value := int.from_bytes(self.params[at : at + 8], "little")) <= address
        ]
        name = f"{min(owners)[1]}+{min(owners)[0]}, " if owners else ""
        return f"global address 0x{address:x}, {name}{found},"
