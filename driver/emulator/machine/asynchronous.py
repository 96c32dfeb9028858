"""Asynchronous copies and mbarriers (PTX ISA 9.7.9.25, 9.7.13.15), as late as they may be.

A copy reads its source when it is issued and lands when its completion is observed: at
``wait_group`` by the issuing thread, or when a thread polls the mbarrier that it signals. Until
then its destination counts as never written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from urdir.driver.emulator.machine.faults import (
    ILLEGAL_ADDRESS,
    LAUNCH_FAILED,
    MISALIGNED_ADDRESS,
    AccessFault,
)
from urdir.driver.emulator.machine.shared import SharedMemory
from urdir.driver.emulator.machine.spaces import Changes, GlobalSpace

Array = npt.NDArray[Any]

_U3 = np.uint64(3)


@dataclass(slots=True)
class _Copy:
    """cp.async of several lanes; ``group`` is the number of the group each will be part of."""

    lanes: Array
    group: Array
    addresses: Array
    rows: Array
    shift: int
    data: Array

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
        )


@dataclass(slots=True)
class _Bulk:
    """One cp.async.bulk to shared memory: byte offset in the wave's rows, and what lands there."""

    at: int
    data: Array


class Asynchronous:
    """Copies under way and mbarriers of all CTAs of a wave.

    An mbarrier is known by its slot: the number of its 8-byte word in the wave's shared memory.
    """

    def __init__(self, lanes: int, shared: SharedMemory, memory: GlobalSpace) -> None:
        self.shared = shared
        self.memory = memory
        self.changes: Changes = memory.changes
        self._lanes = lanes
        slots = shared.views[3].size
        self._valid = np.zeros(slots, np.bool_)
        self._expected = np.zeros(slots, np.int64)
        self._pending = np.zeros(slots, np.int64)
        self._bytes = np.zeros(slots, np.int64)
        self._phase = np.zeros(slots, np.uint32)
        self._awaited = np.zeros(slots, np.bool_)
        self.clear()

    def clear(self) -> None:
        """New CTAs."""
        self._committed = np.zeros(self._lanes, np.int64)
        self._copies: list[_Copy] = []
        self._bulk: dict[int, list[_Bulk]] = {}
        self._arrivals: dict[int, list[Array]] = {}
        self._valid[:] = False
        self._awaited[:] = False

    # ---- cp.async ----

    def copy(
        self, to: Array, origin: Array, shift: int, size: Array | None, rows: Array, lanes: Array
    ) -> None:
        """cp.async of 1 << shift bytes a lane; bytes from ``size`` on are zero."""
        if size is None:
            data = self.memory.load(origin, shift)
        else:
            data = np.zeros(to.size << shift, np.uint8)
            for count in np.unique(size).tolist():
                if count > 1 << shift:
                    raise AccessFault(
                        0, LAUNCH_FAILED, f"cp.async source size {count} > {1 << shift}"
                    )
                some = np.flatnonzero(size == count)
                byte = np.arange(count, dtype=np.uint64)
                if count:
                    from_ = (origin[some][:, None] + byte).reshape(-1)
                    target = ((some << shift)[:, None] + byte.astype(np.int64)).reshape(-1)
                    try:
                        data[target] = self.memory.load(from_, 0)
                    except AccessFault as fault:
                        fault.position = int(some[fault.position // count])
                        raise
            data = data.view(self.shared.views[shift].dtype)
        self.shared.unwrite(to, shift, rows)
        self._copies.append(
            _Copy(lanes.copy(), self._committed[lanes], to.copy(), rows.copy(), shift, data)
        )
        self.changes.count += 1

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
        slot = self._slots(address, rows)
        if not no_increment:
            np.add.at(self._pending, slot, 1)
        for number in np.unique(slot).tolist():
            self._arrivals.setdefault(number, []).append(lanes[slot == number])
            self._awaited[number] = True

    # ---- mbarrier ----

    def _slots(self, address: Array, rows: Array, fresh: bool = False) -> Array:
        index = self.shared.locate(address, 3, rows, "mbarrier access")
        if not fresh:
            valid = self._valid[index]
            if not valid.all():
                position = int(valid.argmin())
                where = self.shared.describe(int(address[position]))
                raise AccessFault(
                    position,
                    ILLEGAL_ADDRESS,
                    f"mbarrier at shared address 0x{int(address[position]):x} is not "
                    f"initialised, {where}",
                )
        return index

    def init(self, address: Array, count: Array, rows: Array) -> None:
        """mbarrier.init."""
        slot = self._slots(address, rows, fresh=True)
        self._valid[slot] = True
        self._expected[slot] = self._pending[slot] = count
        self._bytes[slot] = 0
        self._phase[slot] = 0
        self.shared.store(address, np.zeros(address.size, np.uint64), 3, rows)
        self.changes.count += 1

    def invalidate(self, address: Array, rows: Array) -> None:
        """mbarrier.inval."""
        self._valid[self._slots(address, rows)] = False

    def expect(self, address: Array, nbytes: Array, rows: Array) -> None:
        """mbarrier.expect_tx."""
        slot = self._slots(address, rows)
        np.add.at(self._bytes, slot, np.broadcast_to(nbytes, slot.shape).astype(np.int64))
        self.changes.count += 1

    def arrive(self, address: Array, count: Array, rows: Array) -> Array:
        """mbarrier.arrive; returns the state (the phase that the arrival belongs to)."""
        slot = self._slots(address, rows)
        state = self._phase[slot].astype(np.uint64)
        np.subtract.at(self._pending, slot, np.broadcast_to(count, slot.shape).astype(np.int64))
        if (self._pending[slot] < 0).any():
            position = int((self._pending[slot] < 0).argmax())
            expected = int(self._expected[slot[position]])
            raise AccessFault(
                position, LAUNCH_FAILED, f"more than the {expected} expected arrivals in a phase"
            )
        self._complete(slot)
        self.changes.count += 1
        return state

    def _complete(self, slot: Array) -> None:
        """Phases without pending arrivals and bytes end."""
        done = np.unique(slot[(self._pending[slot] == 0) & (self._bytes[slot] == 0)])
        self._phase[done] ^= 1
        self._pending[done] = self._expected[done]

    def poll(self, address: Array, state: Array, rows: Array) -> Array:
        """test_wait / try_wait: whether the phase of that parity is complete, (n,) bool."""
        slot = self._slots(address, rows)
        if self._awaited[slot].any():
            for number in np.unique(slot[self._awaited[slot]]).tolist():
                self._deliver(number)
        complete: Array = self._phase[slot] != (state & 1)
        return complete

    def _deliver(self, slot: int) -> None:
        """Land everything that signals the mbarrier."""
        self._awaited[slot] = False
        this = np.array([slot])
        for lanes in self._arrivals.pop(slot, ()):
            self.wait(None, lanes)
            self._pending[slot] -= lanes.size
            self._complete(this)
        shared, shadow = self.shared.views[0], self.shared.shadows[0]
        for bulk in self._bulk.pop(slot, ()):
            shared[bulk.at : bulk.at + bulk.data.size] = bulk.data
            shadow[bulk.at : bulk.at + bulk.data.size] = 0xFF
            self._bytes[slot] -= bulk.data.size
        self._complete(this)
        self.changes.count += 1

    # ---- cp.async.bulk ----

    def bulk_load(self, to: Array, origin: Array, size: Array, barrier: Array, rows: Array) -> None:
        """cp.async.bulk from global to shared memory with complete_tx."""
        slot = self._slots(barrier, rows)
        sizes = np.broadcast_to(size, to.shape)
        for i in range(to.size):
            nbytes = int(sizes[i])
            self._check_bulk(i, int(to[i]), int(origin[i]), nbytes)
            steps = np.arange(0, nbytes, 16, dtype=np.uint64)
            try:
                data = self.memory.load(origin[i] + steps, 4).view(np.uint8)
                self.shared.unwrite(to[i] + steps, 4, np.broadcast_to(rows[i], steps.shape))
            except AccessFault as fault:
                fault.position = i
                raise
            at = int(to[i]) + int(rows[i])
            self._bulk.setdefault(int(slot[i]), []).append(_Bulk(at, data))
            self._awaited[slot[i]] = True
        self.changes.count += 1

    def bulk_store(self, to: Array, origin: Array, size: Array, rows: Array) -> None:
        """cp.async.bulk from shared to global memory."""
        sizes = np.broadcast_to(size, to.shape)
        for i in range(to.size):
            nbytes = int(sizes[i])
            self._check_bulk(i, int(origin[i]), int(to[i]), nbytes)
            steps = np.arange(0, nbytes, 16, dtype=np.uint64)
            try:
                row = np.broadcast_to(rows[i], steps.shape)
                self.memory.store(to[i] + steps, self.shared.load(origin[i] + steps, 4, row), 4)
            except AccessFault as fault:
                fault.position = i
                raise

    def _check_bulk(self, position: int, shared: int, outside: int, nbytes: int) -> None:
        if shared % 16 or outside % 16 or nbytes % 16 or nbytes <= 0:
            raise AccessFault(
                position,
                MISALIGNED_ADDRESS,
                f"bulk copy of {nbytes} bytes between shared address 0x{shared:x} and "
                f"0x{outside:x}: all three must be multiples of 16",
            )
