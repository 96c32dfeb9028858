"""Global memory of an emulated device, with every access of host and kernel checked.

An allocation, device or pinned host, is a lazily committed zero array (large ones cost nothing
until touched) and a shadow of the same size that holds 0xFF for every written byte. Addresses are
only numbers: 512-byte aligned, with a red zone after each allocation, and never reused, so that the
message of an access after free can name the allocation.
"""

from __future__ import annotations

import bisect
import collections
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from urdir.driver.emulator.machine.faults import AccessFault
from urdir.driver.emulator.machine.zeros import zeros

Array = npt.NDArray[Any]

Update = Callable[[Array, Array, Array | None], Array]

#: First address of the range: unlike null, host pointers and small integers.
BASE_ADDRESS = 0x7A00_0000_0000
ALIGNMENT = 512
RED_ZONE = 512

#: The element of an access of 1 << k bytes (complex128 is a 16-byte row).
ELEMENTS = tuple(np.dtype(name) for name in ("u1", "u2", "u4", "u8", "c16"))

#: Shadow value of a written byte.
WRITTEN = 0xFF
_SCAN = 4096
#: Number of freed allocations kept for messages.
_REMEMBERED = 4096


class OutOfMemory(MemoryError):  # noqa: N818 - CUDA_ERROR_OUT_OF_MEMORY
    """An allocation exceeds the free memory of the emulated device."""


class MemoryRangeError(ValueError):
    """A host-side access or free outside a live allocation."""


@dataclass(slots=True, eq=False)
class Allocation:
    """A live or freed range: ``nbytes`` from ``address`` on; ``kind`` is "device" or "host"."""

    address: int
    nbytes: int
    kind: str
    views: tuple[Array, ...]
    shadows: tuple[Array, ...]
    live: bool = True
    #: Bytes before this one are known to be written.
    written_to: int = 0
    base: Array = field(default_factory=lambda: np.array(0, np.uint64))

    @property
    def end(self) -> int:
        """The first address after the allocation."""
        return self.address + self.nbytes

    @property
    def is_written(self) -> bool:
        """Whether every byte has been written, as far as the last ``scan`` knows."""
        return self.written_to >= self.nbytes

    def scan(self) -> bool:
        """Advance ``written_to``, at a cost proportional to the advance. Returns ``is_written``."""
        self.written_to = written_prefix(self.shadows[0], self.written_to)
        return self.is_written

    def mark_written(self, offset: int, nbytes: int) -> None:
        """Record that the host or a copy wrote a range of bytes."""
        if self.is_written:
            return
        self.shadows[0][offset : offset + nbytes] = WRITTEN
        if offset <= self.written_to:
            self.written_to = max(self.written_to, offset + nbytes)

    def __str__(self) -> str:
        return f"{self.kind} allocation of {self.nbytes} bytes at 0x{self.address:x}"


def written_prefix(shadow: Array, start: int) -> int:
    """Length of the written prefix of ``shadow``, whose first ``start`` bytes are known."""
    while start < shadow.size and shadow.item(start) == WRITTEN:
        chunk = shadow[start : start + _SCAN]
        first = int(chunk.argmin())
        if chunk[first] != WRITTEN:
            return start + first
        start += chunk.size
    return start


class Memory:
    """The memory of one emulated device."""

    #: Which device's memory it is.
    ordinal = 0

    def __init__(self, total: int = 8 << 30, base: int = BASE_ADDRESS) -> None:
        self.total = total
        self.used = 0
        self._next = base
        self._starts: list[int] = []
        self._allocations: list[Allocation] = []
        self._freed: collections.deque[Allocation] = collections.deque()

    # ---- allocations ----

    def allocate(self, nbytes: int, kind: str = "device") -> int:
        """The address of ``nbytes`` fresh bytes; raises OutOfMemory above ``total``.

        Host memory counts as written: the emulator cannot see the host write it.
        """
        if nbytes <= 0:
            raise ValueError(f"an allocation needs at least one byte, not {nbytes}")
        if kind == "device" and self.used + nbytes > self.total:
            raise OutOfMemory(
                f"{nbytes} bytes asked for, {self.total - self.used} of {self.total} free"
            )
        try:
            data, shadow = zeros(nbytes), zeros(nbytes)
        except MemoryError as exc:
            raise OutOfMemory(f"the host has no {2 * nbytes} bytes for {nbytes}") from exc
        address = self._next
        self._next += -(-(nbytes + RED_ZONE) // ALIGNMENT) * ALIGNMENT
        self._insert(
            Allocation(
                address,
                nbytes,
                kind,
                _typed(data),
                _typed(shadow),
                written_to=nbytes if kind == "host" else 0,
                base=np.array(address, np.uint64),
            )
        )
        if kind == "device":
            self.used += nbytes
        return address

    def _insert(self, allocation: Allocation) -> None:
        """Keep allocations sorted by address, live and freed ones together."""
        at = bisect.bisect(self._starts, allocation.address)
        self._starts.insert(at, allocation.address)
        self._allocations.insert(at, allocation)

    def free(self, address: int) -> None:
        """Free the allocation that starts at ``address``."""
        allocation = self.find_own(address)
        if allocation is None or allocation.address != address:
            raise MemoryRangeError(
                f"0x{address:x} is not the start of a live allocation: {self.describe(address)}"
            )
        allocation.live = False
        allocation.views = allocation.shadows = ()
        if allocation.kind == "device":
            self.used -= allocation.nbytes
        self._freed.append(allocation)
        if len(self._freed) > _REMEMBERED:
            at = bisect.bisect_left(self._starts, self._freed.popleft().address)
            del self._starts[at], self._allocations[at]

    def find(self, address: int) -> Allocation | None:
        """The live allocation at ``address``, if this device may access it."""
        return self.find_own(address)

    def find_own(self, address: int) -> Allocation | None:
        """The live allocation of this memory that holds ``address``."""
        at = bisect.bisect(self._starts, address) - 1
        if at < 0:
            return None
        allocation = self._allocations[at]
        return allocation if address < allocation.end and allocation.live else None

    @property
    def allocations(self) -> tuple[Allocation, ...]:
        """Every live allocation, by address."""
        return tuple(a for a in self._allocations if a.live)

    def describe(self, address: int) -> str:
        """The position of ``address``: in, after or before which allocation."""
        if address < 4096:
            return "a null pointer" if address == 0 else "next to a null pointer"
        at = bisect.bisect(self._starts, address) - 1
        if at >= 0:
            a = self._allocations[at]
            state = "" if a.live else "freed "
            if address < a.end:
                return f"at offset {address - a.address} of the {state}{a}"
            if at + 1 == len(self._starts) or address - a.end < self._starts[at + 1] - address:
                return f"{address - a.end} bytes behind the end of the {state}{a}"
        if at + 1 < len(self._starts):
            a = self._allocations[at + 1]
            return f"{a.address - address} bytes before the {'' if a.live else 'freed '}{a}"
        return "there are no allocations"

    # ---- host side ----

    def _range(self, address: int, nbytes: int) -> tuple[Allocation, int]:
        allocation = self.find(address)
        if allocation is None or nbytes < 0 or address + nbytes > allocation.end:
            raise MemoryRangeError(
                f"{nbytes} bytes at 0x{address:x} are not inside one allocation: "
                f"0x{address:x} is {self.describe(address)}"
            )
        return allocation, address - allocation.address

    def contains(self, address: int, nbytes: int) -> bool:
        """Whether one live allocation holds all of the range."""
        allocation = self.find(address)
        return allocation is not None and address + nbytes <= allocation.end

    def read(self, address: int, nbytes: int) -> bytes:
        """A copy of ``nbytes`` bytes (zeros if never written)."""
        return self.view(address, nbytes).tobytes()

    def write(self, address: int, data: bytes | bytearray | memoryview | Array) -> None:
        """Copy ``data`` to ``address``."""
        source = (
            np.ascontiguousarray(data).reshape(-1).view(np.uint8)
            if isinstance(data, np.ndarray)
            else np.frombuffer(data, np.uint8)
        )
        if not source.size:
            return
        allocation, offset = self._range(address, source.size)
        allocation.views[0][offset : offset + source.size] = source
        allocation.mark_written(offset, source.size)

    def fill(self, address: int, value: int, count: int, width: int = 1) -> None:
        """Write ``count`` little-endian unsigned values of ``width`` bytes (1, 2 or 4)."""
        if count:
            allocation, offset = self._range(address, count * width)
            if address % width:
                raise MemoryRangeError(f"0x{address:x} is not a multiple of {width}")
            target = allocation.views[0][offset : offset + count * width]
            target.view(f"u{width}")[:] = value
            allocation.mark_written(offset, count * width)

    def copy(self, destination: int, source: int, nbytes: int, owner: Memory | None = None) -> None:
        """Copy between (possibly overlapping) ranges; never-written bytes stay so. ``owner`` is the
        memory of the source, if different.
        """
        if not nbytes:
            return
        to, at = self._range(destination, nbytes)
        origin, start = (owner or self)._range(source, nbytes)
        to.views[0][at : at + nbytes] = origin.views[0][start : start + nbytes]
        if origin.is_written or origin.scan():
            to.mark_written(at, nbytes)
        elif not to.is_written or to.kind == "device":
            to.shadows[0][at : at + nbytes] = origin.shadows[0][start : start + nbytes]
            to.written_to = min(to.written_to, at)

    def view(self, address: int, nbytes: int) -> Array:
        """A writable uint8 view of the bytes themselves."""
        if not nbytes:
            return np.empty(0, np.uint8)
        allocation, offset = self._range(address, nbytes)
        return allocation.views[0][offset : offset + nbytes]

    # ---- device side ----

    def load(self, addresses: Array, shift: int) -> Array:
        """The elements of 1 << shift bytes at ``addresses`` (n,) uint64; raises AccessFault."""
        allocation, index = self._locate(addresses, shift, "load")
        if allocation is None:
            return self._scattered_load(addresses, shift)
        if not (allocation.is_written or allocation.scan()):
            flags = allocation.shadows[shift].take(index).view(np.uint8)
            if np.minimum.reduce(flags) != WRITTEN:
                bad = int(flags.argmin()) >> shift
                raise self._fault(addresses, bad, shift, "load of never-written bytes")
        values: Array = allocation.views[shift].take(index)
        return values

    def store(self, addresses: Array, values: Array, shift: int) -> None:
        """Write elements of 1 << shift bytes; of lanes with equal addresses the last one wins."""
        allocation, index = self._locate(addresses, shift, "store")
        if allocation is None:
            for at, _ in self._by_allocation(addresses, shift, "store"):
                self.store(addresses[at], values[at] if values.size > 1 else values, shift)
            return
        allocation.views[shift][index] = values
        if not (allocation.is_written or allocation.scan()):
            allocation.shadows[shift][index] = ALL_WRITTEN[shift]

    def update(self, addresses: Array, shift: int, operation: Update) -> Array:
        """An atomic read-modify-write: ``operation(view, index, lanes) -> old values``.

        ``lanes`` are the positions that the index belongs to, None for all.
        """
        allocation, index = self._locate(addresses, shift, "atomic access")
        if allocation is None:
            result = np.empty(addresses.size, ELEMENTS[shift])
            for at, _ in self._by_allocation(addresses, shift, "atomic access"):
                found, index = self._locate(addresses[at], shift, "atomic access")
                assert found is not None
                result[at] = operation(found.views[shift], index, at).view(result.dtype)
            return result
        if not (allocation.is_written or allocation.scan()):
            flags = allocation.shadows[shift].take(index).view(np.uint8)
            if np.minimum.reduce(flags) != WRITTEN:
                bad = int(flags.argmin()) >> shift
                raise self._fault(addresses, bad, shift, "atomic access to never-written bytes")
        return operation(allocation.views[shift], index, None)

    def check(self, addresses: Array, shift: int, action: str) -> None:
        """Raise AccessFault for an invalid access of 1 << shift bytes."""
        self._locate(addresses, shift, action)

    def _locate(self, addresses: Array, shift: int, action: str) -> tuple[Allocation | None, Array]:
        """The allocation of all addresses, and their element index in it.

        None if the addresses are valid but lie in several allocations.
        """
        allocation = self.find(int(addresses[0]))
        if allocation is not None:
            index = np.subtract(addresses, allocation.base)
            bits = int(np.bitwise_or.reduce(index))
            size = 1 << shift
            if not bits & (size - 1) and (
                bits + size <= allocation.nbytes
                or int(np.maximum.reduce(index)) + size <= allocation.nbytes
            ):
                if shift:
                    np.right_shift(index, _SHIFTS[shift], index)
                return allocation, index.view(np.int64)
        self._raise_first(addresses, shift, action)
        return None, addresses

    def _raise_first(self, addresses: Array, shift: int, action: str) -> None:
        """Raise for the first bad lane."""
        size = 1 << shift
        for position, address in enumerate(addresses.tolist()):
            if address % size:
                raise self._fault(addresses, position, shift, f"misaligned {action}")
            allocation = self.find(address)
            if allocation is None or address + size > allocation.end:
                raise self._fault(addresses, position, shift, f"out-of-bounds {action}")

    def _by_allocation(
        self, addresses: Array, shift: int, action: str
    ) -> list[tuple[Array, Allocation]]:
        """Positions grouped by the allocation that they lie in (all are known to be fine)."""
        groups = []
        left = np.arange(addresses.size)
        while left.size:
            allocation = self.find(int(addresses[left[0]]))
            assert allocation is not None
            at = addresses[left]
            inside = (at >= allocation.address) & (at < allocation.end)
            groups.append((left[inside], allocation))
            left = left[~inside]
        return groups

    def _scattered_load(self, addresses: Array, shift: int) -> Array:
        values = np.empty(addresses.size, ELEMENTS[shift])
        for at, _ in self._by_allocation(addresses, shift, "load"):
            try:
                values[at] = self.load(addresses[at], shift)
            except AccessFault as fault:
                fault.position = int(at[fault.position])
                raise
        return values

    def _fault(self, addresses: Array, position: int, shift: int, what: str) -> AccessFault:
        address = int(addresses[position])
        place = f"0x{address:x}, {self.describe(address)}"
        return AccessFault.of(position, what, 1 << shift, place)


_SHIFTS = tuple(np.array(k, np.uint64) for k in range(5))
#: The shadow of a written element, by the logarithm of its size.
ALL_WRITTEN = tuple(np.full(1 << k, WRITTEN, np.uint8).view(ELEMENTS[k])[0] for k in range(5))


def _typed(data: Array) -> tuple[Array, ...]:
    """Views of ``data`` by element size: 1, 2, 4, 8, 16 bytes (whole elements only)."""
    return tuple(data[: data.size // e.itemsize * e.itemsize].view(e) for e in ELEMENTS)
