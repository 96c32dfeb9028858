"""cp.async: copies of single threads (PTX ISA 9.7.9.25.3), as late as permitted.

A copy reads its source when it is issued and lands when its completion is observed: at
``wait_group`` by the issuing thread, or when a thread polls the mbarrier that it signals. Until
then its destination counts as never written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from urdir.driver.emulator.machine.faults import LAUNCH_FAILED, AccessFault
from urdir.driver.emulator.machine.mbarriers import MBarriers
from urdir.driver.emulator.machine.shared import SharedMemory
from urdir.driver.emulator.machine.spaces import GlobalSpace

Array = npt.NDArray[Any]


@dataclass(slots=True)
class _Copy:
    """cp.async of several lanes; ``group`` is the number of each lane's group, ``announced``
    whether an mbarrier counts it.
    """

    lanes: Array
    group: Array
    addresses: Array
    rows: Array
    shift: int
    data: Array
    announced: Array

    def split(self, now: Array) -> tuple[_Copy, _Copy]:
        """The lanes where ``now`` holds, and the others."""
        return self._pick(now), self._pick(~now)

    def _pick(self, m: Array) -> _Copy:
        return _Copy(
            self.lanes[m],
            self.group[m],
            self.addresses[m],
            self.rows[m],
            self.shift,
            self.data[m],
            self.announced[m],
        )


@dataclass(slots=True)
class _Copied:
    """Arrival of lanes at an mbarrier when their copies so far have landed."""

    copies: Asynchronous
    lanes: Array

    def land(self, shared: SharedMemory) -> tuple[int, int]:
        """Land the copies."""
        self.copies.wait(None, self.lanes)
        return int(self.lanes.size), 0


class Asynchronous:
    """Copies in flight of all CTAs of a wave."""

    def __init__(self, lanes: int, mbarriers: MBarriers, memory: GlobalSpace) -> None:
        self.mbarriers = mbarriers
        self.shared = mbarriers.shared
        self.memory = memory
        self.changes = mbarriers.changes
        self._lanes = lanes
        self.clear()

    def clear(self) -> None:
        """New CTAs."""
        self._committed = np.zeros(self._lanes, np.int64)
        self._copies: list[_Copy] = []

    def copy(
        self, to: Array, origin: Array, shift: int, size: Array | None, rows: Array, lanes: Array
    ) -> None:
        """cp.async of 1 << shift bytes a lane; bytes from ``size`` on are zero."""
        if size is None or (size == 1 << shift).all():
            data = self.memory.load(origin, shift)
        else:
            data = self._parts(origin, shift, size)
        self.shared.unwrite(to, shift, rows)
        group, announced = self._committed[lanes], np.zeros(lanes.size, np.bool_)
        self._copies.append(
            _Copy(lanes.copy(), group, to.copy(), rows.copy(), shift, data, announced)
        )
        self.changes.count += 1

    def _parts(self, origin: Array, shift: int, size: Array) -> Array:
        """What copies of ``size`` bytes (n,) of 1 << shift bring; the others are zero."""
        data = np.zeros(origin.size, self.shared.views[shift].dtype)
        for count in np.unique(size).tolist():
            if count > 1 << shift:
                raise AccessFault(0, LAUNCH_FAILED, f"cp.async source size {count} > {1 << shift}")
            some = (size == count).nonzero()[0]
            try:
                if count == 1 << shift:
                    data[some] = self.memory.load(origin[some], shift)
                elif count:
                    byte = np.arange(count, dtype=np.int64)
                    from_ = (origin[some][:, None] + byte.view(np.uint64)).reshape(-1)
                    target = ((some << shift)[:, None] + byte).reshape(-1)
                    data.view(np.uint8)[target] = self.memory.load(from_, 0)
            except AccessFault as fault:
                at = fault.position if count == 1 << shift else fault.position // count
                fault.position = int(some[at])
                raise
        return data

    def commit(self, lanes: Array) -> None:
        """cp.async.commit_group."""
        self._committed[lanes] += 1

    def wait(self, groups: int | None, lanes: Array) -> list[_Copy]:
        """cp.async.wait_group ``groups``; None is wait_all. Returns the copies that have landed."""
        if not self._copies:
            return []
        waiting = np.full(self._lanes, -1, np.int64)
        waiting[lanes] = self._committed[lanes] - groups if groups is not None else 1 << 40
        left, landed = [], []
        for copy in self._copies:
            now = copy.group < waiting[copy.lanes]
            if now.all():
                landed.append(copy)
            elif now.any():
                done, rest = copy.split(now)
                landed.append(done)
                left.append(rest)
            else:
                left.append(copy)
        for copy in landed:
            self.shared.store(copy.addresses, copy.data, copy.shift, copy.rows)
        self._copies = left
        return landed

    def arrive_when_copied(
        self, address: Array, rows: Array, lanes: Array, no_increment: bool
    ) -> None:
        """cp.async.mbarrier.arrive: the lanes arrive once their copies so far have landed."""
        slot = self.mbarriers.slots(address, rows)
        if not no_increment:
            self.mbarriers.expect_arrivals(slot)
        arriving = np.zeros(self._lanes, np.bool_)
        arriving[lanes] = True
        for copy in self._copies:
            copy.announced |= arriving[copy.lanes]
        for number in np.unique(slot).tolist():
            self.mbarriers.arrives_later(number, _Copied(self, lanes[slot == number]))
