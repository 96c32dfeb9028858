"""Device memory plus page-locked host memory at its own addresses (unified addressing)."""

from __future__ import annotations

import bisect

import numpy as np

from urdir.driver.emulator.machine.memory import (
    ELEMENTS,
    Allocation,
    Array,
    Memory,
    MemoryRangeError,
    OutOfMemory,
)

_PAGE = 4096


class UnifiedMemory(Memory):
    """What a context's kernels and copies can reach.

    Page-locked memory is a page-aligned array of this process, mapped where it lies: the address
    is one that the host can follow and that kernels can load from and store to.
    """

    def allocate_host(self, nbytes: int) -> int:
        """The address of ``nbytes`` zeroed bytes; raises OutOfMemory."""
        try:
            pages = np.zeros(nbytes + _PAGE, np.uint8)
        except MemoryError as exc:
            raise OutOfMemory(f"the host has no {nbytes} bytes") from exc
        skip = -int(pages.ctypes.data) % _PAGE
        data = pages[skip : skip + nbytes]
        address = int(data.ctypes.data)
        self._drop_freed(address, address + nbytes)
        self._insert(
            Allocation(
                address,
                nbytes,
                "host",
                _typed(data),
                (),
                written_to=nbytes,
                base=np.array(address, np.uint64),
            )
        )
        return address

    def free_host(self, address: int) -> None:
        """Free page-locked memory; raises MemoryRangeError for anything else."""
        allocation = self.find(address)
        if allocation is None or allocation.kind != "host":
            raise MemoryRangeError(f"0x{address:x} is not page-locked memory")
        self.free(address)

    def is_host(self, address: int, nbytes: int) -> bool:
        """Whether a range is page-locked memory."""
        allocation = self.find(address)
        return (
            allocation is not None
            and allocation.kind == "host"
            and address + nbytes <= allocation.end
        )

    def _drop_freed(self, start: int, end: int) -> None:
        """Forget freed host allocations in a range that the process has given out again."""
        for freed in [a for a in self._freed if a.address < end and start < a.end]:
            self._freed.remove(freed)
            at = bisect.bisect_left(self._starts, freed.address)
            del self._starts[at], self._allocations[at]


def _typed(data: Array) -> tuple[Array, ...]:
    return tuple(data[: data.size // e.itemsize * e.itemsize].view(e) for e in ELEMENTS)
