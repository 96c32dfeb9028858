"""mbarriers of all CTAs of a wave (PTX ISA 9.7.13.15), and copies that land when they are polled.

An asynchronous copy that signals an mbarrier lands as late as permitted: when a thread polls that
mbarrier. Until then its destination counts as never written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from urdir.driver.emulator.machine.faults import ILLEGAL_ADDRESS, LAUNCH_FAILED, AccessFault
from urdir.driver.emulator.machine.memory import ALL_WRITTEN
from urdir.driver.emulator.machine.shared import SharedMemory
from urdir.driver.emulator.machine.spaces import Changes

Array = npt.NDArray[Any]

#: Maximum transaction count of an mbarrier (PTX ISA 9.7.13.15.2, "tx-count").
MOST_BYTES = (1 << 20) - 1


class Arrival(Protocol):
    """An event that an mbarrier counts once it is complete."""

    def land(self, shared: SharedMemory) -> tuple[int, int]:
        """Complete it; returns the numbers of arrivals and bytes."""


@dataclass(slots=True)
class Landing:
    """A copy to shared memory: the elements of 1 << shift bytes that it writes."""

    index: Array
    data: Array
    shift: int

    def land(self, shared: SharedMemory) -> tuple[int, int]:
        """Write them."""
        shared.views[self.shift][self.index] = self.data
        shared.shadows[self.shift][self.index] = ALL_WRITTEN[self.shift]
        return 0, self.data.nbytes


class MBarriers:
    """mbarriers by slot: the number of their 8-byte word in the wave's shared memory.

    Methods take ``rows`` (n,), the start of the shared memory of each lane's address.
    """

    def __init__(self, shared: SharedMemory, changes: Changes) -> None:
        self.shared = shared
        self.changes = changes
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
        self._arrivals: dict[int, list[Arrival]] = {}
        self._valid[:] = False
        self._awaited[:] = False

    def slots(self, address: Array, rows: Array) -> Array:
        """The slots of initialised mbarriers; raises AccessFault for others."""
        index = self.shared.locate(address, 3, rows, "mbarrier access")
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
        slot = self.shared.locate(address, 3, rows, "mbarrier access")
        self._valid[slot] = True
        self._expected[slot] = self._pending[slot] = count
        self._bytes[slot] = 0
        self._phase[slot] = 0
        self.shared.store(address, np.zeros(address.size, np.uint64), 3, rows)
        self.changes.count += 1

    def invalidate(self, address: Array, rows: Array) -> None:
        """mbarrier.inval."""
        self._valid[self.slots(address, rows)] = False

    def expect(self, address: Array, nbytes: Array, rows: Array) -> None:
        """mbarrier.expect_tx."""
        slot = self.slots(address, rows)
        np.add.at(self._bytes, slot, np.broadcast_to(nbytes, slot.shape).astype(np.int64))
        if (self._bytes[slot] > MOST_BYTES).any():
            position = int((self._bytes[slot] > MOST_BYTES).argmax())
            raise AccessFault(
                position, LAUNCH_FAILED, f"an mbarrier can expect {MOST_BYTES} bytes at most"
            )
        self.changes.count += 1

    def arrive(self, address: Array, count: Array, rows: Array) -> Array:
        """mbarrier.arrive; returns the state (the phase that the arrival belongs to)."""
        slot = self.slots(address, rows)
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

    def expect_arrivals(self, slot: Array) -> None:
        """Expect one more arrival each in this phase."""
        np.add.at(self._pending, slot, 1)

    def arrives_later(self, slot: int, arrival: Arrival) -> None:
        """Register a pending event that the mbarrier counts."""
        self._arrivals.setdefault(slot, []).append(arrival)
        self._awaited[slot] = True

    def poll(self, address: Array, state: Array, rows: Array) -> Array:
        """test_wait / try_wait: whether the phase of that parity is complete, (n,) bool."""
        slot = self.slots(address, rows)
        if self._awaited[slot].any():
            for number in np.unique(slot[self._awaited[slot]]).tolist():
                self._deliver(number)
        complete: Array = self._phase[slot] != (state & 1)
        return complete

    def _complete(self, slot: Array) -> None:
        """End the phases without pending arrivals and bytes."""
        done = np.unique(slot[(self._pending[slot] == 0) & (self._bytes[slot] == 0)])
        self._phase[done] ^= 1
        self._pending[done] = self._expected[done]

    def _deliver(self, slot: int) -> None:
        """Land everything that signals the mbarrier."""
        self._awaited[slot] = False
        this = np.array([slot])
        for arrival in self._arrivals.pop(slot, ()):
            arrivals, nbytes = arrival.land(self.shared)
            self._pending[slot] -= arrivals
            self._bytes[slot] -= nbytes
            self._complete(this)
        self.changes.count += 1
