"""Which bytes a piece of work touches, recorded while it runs: to find races in graphs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from urdir.driver.emulator.copies import Interval
from urdir.driver.emulator.machine.memory import ELEMENTS, Allocation, Array, Update
from urdir.driver.emulator.pinned import UnifiedMemory

_ALL_ONES = tuple(np.full(1 << k, 1, np.uint8).view(ELEMENTS[k])[0] for k in range(5))


class Footprint:
    """Bytes of each allocation, as flags; lazily committed, so that big allocations cost little."""

    def __init__(self) -> None:
        self._flags: dict[int, tuple[Array, ...]] = {}
        self._bounds: dict[int, Interval] = {}

    def add(self, allocation: Allocation, index: Array, shift: int) -> None:
        """Add elements of 1 << shift bytes at ``index``."""
        low = int(index.min()) << shift
        high = (int(index.max()) + 1) << shift
        self._flags_of(allocation, low, high)[shift][index] = _ALL_ONES[shift]

    def add_interval(self, allocation: Allocation, interval: Interval) -> None:
        """Add the bytes between two addresses."""
        low, high = (address - allocation.address for address in interval)
        self._flags_of(allocation, low, high)[0][low:high] = 1

    def overlap(self, other: Footprint) -> int | None:
        """The lowest address in both, None when they are disjoint."""
        for start in sorted(self._flags.keys() & other._flags.keys()):
            low = max(self._bounds[start][0], other._bounds[start][0])
            high = min(self._bounds[start][1], other._bounds[start][1])
            if low < high:
                both = self._flags[start][0][low:high] & other._flags[start][0][low:high]
                if both.any():
                    return start + low + int(both.argmax())
        return None

    def _flags_of(self, allocation: Allocation, low: int, high: int) -> tuple[Array, ...]:
        start = allocation.address
        if start not in self._flags:
            data = np.zeros(allocation.nbytes, np.uint8)
            whole = (data[: data.size // e.itemsize * e.itemsize].view(e) for e in ELEMENTS)
            self._flags[start] = tuple(whole)
            self._bounds[start] = low, high
        else:
            bounds = self._bounds[start]
            self._bounds[start] = min(bounds[0], low), max(bounds[1], high)
        return self._flags[start]


class Trace:
    """What one piece of work read and wrote."""

    def __init__(self) -> None:
        self.reads = Footprint()
        self.writes = Footprint()

    def add_intervals(
        self, memory: UnifiedMemory, reads: Iterable[Interval], writes: Iterable[Interval]
    ) -> None:
        """Add the ranges of a copy or fill."""
        for footprint, intervals in ((self.reads, reads), (self.writes, writes)):
            for interval in intervals:
                if allocation := memory.find(interval[0]):
                    footprint.add_interval(allocation, interval)

    def conflict(self, other: Trace) -> int | None:
        """The lowest address that both touch and one of them writes, None without one."""
        found = (
            self.writes.overlap(other.writes),
            self.writes.overlap(other.reads),
            self.reads.overlap(other.writes),
        )
        return min((address for address in found if address is not None), default=None)


class TracedMemory:
    """A memory whose kernel-side accesses are recorded in ``trace``; otherwise the same memory."""

    def __init__(self, memory: UnifiedMemory, trace: Trace) -> None:
        self._memory = memory
        self.trace = trace

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)

    def load(self, addresses: Array, shift: int) -> Array:
        """A recorded load."""
        values = self._memory.load(addresses, shift)
        self._record(self.trace.reads, addresses, shift)
        return values

    def store(self, addresses: Array, values: Array, shift: int) -> None:
        """A recorded store."""
        self._memory.store(addresses, values, shift)
        self._record(self.trace.writes, addresses, shift)

    def update(self, addresses: Array, shift: int, operation: Update) -> Array:
        """A recorded atomic operation: a write. (Two of them in unordered nodes are a race.)"""
        result = self._memory.update(addresses, shift, operation)
        self._record(self.trace.writes, addresses, shift)
        return result

    def _record(self, footprint: Footprint, addresses: Array, shift: int) -> None:
        left = np.atleast_1d(addresses)
        while left.size:
            allocation = self._memory.find(int(left[0]))
            assert allocation is not None
            inside = (left >= allocation.address) & (left < allocation.end)
            index = (left[inside] - np.uint64(allocation.address)) >> np.uint64(shift)
            footprint.add(allocation, index.astype(np.int64), shift)
            left = left[~inside]
