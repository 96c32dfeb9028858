"""Recording of the bytes that work accesses, for finding races in graphs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from urdir.driver.emulator.copies import Interval
from urdir.driver.emulator.machine.memory import ELEMENTS, Allocation, Array, Update
from urdir.driver.emulator.machine.zeros import zeros
from urdir.driver.emulator.pinned import UnifiedMemory

_PAGE_SHIFT = 12
_PAGE = 1 << _PAGE_SHIFT
_SHIFTS = tuple(np.array(k, np.uint64) for k in range(5))
_TOUCHED = tuple(np.full(1 << k, 1, np.uint8).view(ELEMENTS[k])[0] for k in range(5))


class TouchedBytes:
    """Bytes of one allocation, as flags. Memory is proportional to the accessed pages: a graph has
    hundreds of kernels, each of which accesses little of a large allocation."""

    def __init__(self, nbytes: int) -> None:
        count = -(-nbytes // _PAGE)
        self._pages = np.zeros(count, np.bool_)
        flags = zeros(count * _PAGE)
        self._flags = tuple(flags.view(element) for element in ELEMENTS)

    def add(self, index: Array, shift: int) -> None:
        """Add elements of 1 << shift bytes, by their numbers."""
        self._pages[index >> (_PAGE_SHIFT - shift)] = True
        self._flags[shift][index] = _TOUCHED[shift]

    def add_range(self, low: int, high: int) -> None:
        """Add the bytes from ``low`` up to ``high``."""
        self._pages[low >> _PAGE_SHIFT : ((high - 1) >> _PAGE_SHIFT) + 1] = True
        self._flags[0][low:high] = 1

    def overlap(self, other: TouchedBytes) -> int | None:
        """The offset of the first common byte, or None."""
        for page in np.flatnonzero(self._pages & other._pages).tolist():
            low = page << _PAGE_SHIFT
            both = self._flags[0][low : low + _PAGE] & other._flags[0][low : low + _PAGE]
            if both.any():
                return low + int(both.argmax())
        return None


class Footprint:
    """Bytes of all allocations."""

    def __init__(self) -> None:
        self._touched: dict[int, TouchedBytes] = {}

    def add(self, allocation: Allocation, index: Array, shift: int) -> None:
        """Add elements of 1 << shift bytes at ``index``."""
        self._of(allocation).add(index, shift)

    def add_interval(self, allocation: Allocation, interval: Interval) -> None:
        """Add the bytes between two addresses."""
        low, high = (address - allocation.address for address in interval)
        if low < high:
            self._of(allocation).add_range(low, high)

    def overlap(self, other: Footprint) -> int | None:
        """The lowest common address, or None."""
        for start in sorted(self._touched.keys() & other._touched.keys()):
            offset = self._touched[start].overlap(other._touched[start])
            if offset is not None:
                return start + offset
        return None

    def _of(self, allocation: Allocation) -> TouchedBytes:
        start = allocation.address
        if start not in self._touched:
            self._touched[start] = TouchedBytes(allocation.nbytes)
        return self._touched[start]


class Trace:
    """Reads and writes of one piece of work."""

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
        """The lowest address that both access and one of them writes, or None."""
        found = (
            self.writes.overlap(other.writes),
            self.writes.overlap(other.reads),
            self.reads.overlap(other.writes),
        )
        return min((address for address in found if address is not None), default=None)


class TracedMemory:
    """A memory that records kernel-side accesses in ``trace``."""

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
            allocation = self._memory.find(int(left.item(0)))
            assert allocation is not None
            index = np.subtract(left, allocation.base)
            is_inside = np.maximum.reduce(index) < allocation.nbytes  # addresses below it wrap
            inside = None if is_inside else index < allocation.nbytes
            of = np.right_shift(index if inside is None else index[inside], _SHIFTS[shift])
            footprint.add(allocation, of.view(np.int64), shift)
            if inside is None:
                return
            left = left[~inside]
