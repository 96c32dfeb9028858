"""Device memory plus page-locked host memory at its own addresses (unified addressing).

All devices of a driver share one address space. A device can access the memory of another only
after its context enabled peer access, and page-locked memory of all contexts always.
"""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Mapping

import numpy as np

from urdir.driver.emulator.machine.memory import (
    BASE_ADDRESS,
    ELEMENTS,
    Allocation,
    Array,
    Memory,
    MemoryRangeError,
    OutOfMemory,
)
from urdir.driver.emulator.machine.zeros import zeros

_PAGE = 4096
#: Distance between the first addresses of two devices.
_DEVICE_STRIDE = 1 << 38


class UnifiedMemory(Memory):
    """The memory that kernels and copies of device ``ordinal`` can access.

    Page-locked memory is a page-aligned array of this process, mapped at its own address, which
    both host and kernels use. ``others`` are the memories of all devices of the driver by ordinal;
    ``peers`` the ordinals with enabled access.
    """

    def __init__(
        self, total: int, ordinal: int = 0, others: Mapping[int, UnifiedMemory] | None = None
    ) -> None:
        super().__init__(total, BASE_ADDRESS + ordinal * _DEVICE_STRIDE)
        self.ordinal = ordinal
        self.peers: set[int] = set()
        self._others = {} if others is None else others

    def find(self, address: int) -> Allocation | None:
        """The live allocation that holds ``address``: of this device, of a peer, of the host."""
        if (own := self.find_own(address)) is not None:
            return own
        for ordinal, other in self._others.items():
            if other is not self and (found := other.find_own(address)) is not None:
                return found if ordinal in self.peers or found.kind == "host" else None
        return None

    def describe(self, address: int) -> str:
        """The position of ``address``, and why it cannot be accessed if it is another device's."""
        for ordinal, other in self._others.items():
            found = other.find_own(address)
            if other is not self and found is not None:
                known = "" if ordinal in self.peers else ", without peer access to it"
                offset = address - found.address
                return f"at offset {offset} of the {found} of device {ordinal}{known}"
        return super().describe(address)

    def allocate_host(self, nbytes: int) -> int:
        """The address of ``nbytes`` zeroed bytes; raises OutOfMemory."""
        try:
            pages = zeros(nbytes + _PAGE)
        except MemoryError as exc:
            raise OutOfMemory(f"the host has no {nbytes} bytes") from exc
        skip = -int(pages.ctypes.data) % _PAGE
        data = pages[skip : skip + nbytes]
        self._insert_host(data)
        return int(data.ctypes.data)

    def register_host(self, address: int, nbytes: int) -> None:
        """Map memory of the process."""
        array = (ctypes.c_uint8 * nbytes).from_address(address)
        self._insert_host(np.ctypeslib.as_array(array))

    def _insert_host(self, data: Array) -> None:
        address, nbytes = int(data.ctypes.data), data.size
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

    def free_host(self, address: int) -> None:
        """Free page-locked memory; raises MemoryRangeError for anything else."""
        allocation = self.find_own(address)
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
        """Forget freed host allocations in a range that the process has reused."""
        for freed in [a for a in self._freed if a.address < end and start < a.end]:
            self._freed.remove(freed)
            at = bisect.bisect_left(self._starts, freed.address)
            del self._starts[at], self._allocations[at]


def _typed(data: Array) -> tuple[Array, ...]:
    return tuple(data[: data.size // e.itemsize * e.itemsize].view(e) for e in ELEMENTS)
