"""Shared memory of the resident CTAs: one row of one array each, every access checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from urdir.driver.emulator.machine.faults import AccessFault
from urdir.driver.emulator.machine.layout import SharedVariable
from urdir.driver.emulator.machine.memory import ALL_WRITTEN, ELEMENTS, WRITTEN, written_prefix

Array = npt.NDArray[Any]

_COPYING = 0x01
_SHIFTS = tuple(np.array(k, np.uint64) for k in range(5))
_COPY_FLAGS = tuple(np.full(1 << k, _COPYING, np.uint8).view(ELEMENTS[k])[0] for k in range(5))


class SharedMemory:
    """``nbytes`` for each of ``ctas`` CTAs; addresses count from the start of a CTA's row.

    Methods take ``rows`` (n,) uint64, the start of each lane's row, beside the addresses.
    """

    def __init__(self, ctas: int, nbytes: int, variables: Mapping[str, SharedVariable]) -> None:
        self.nbytes = nbytes
        self.stride = max(16, -(-nbytes // 16) * 16)
        self.variables = variables
        data = np.zeros(ctas * self.stride, np.uint8)
        shadow = np.zeros(ctas * self.stride, np.uint8)
        self.views = tuple(data.view(element) for element in ELEMENTS)
        self.shadows = tuple(shadow.view(element) for element in ELEMENTS)
        self._written_to = 0

    def clear(self) -> None:
        """Reset for new CTAs: nothing is written."""
        shadow = self.shadows[0].reshape(-1, self.stride)
        shadow[:, : self.nbytes] = 0
        shadow[:, self.nbytes :] = WRITTEN
        self._written_to = 0

    def load(self, addresses: Array, shift: int, rows: Array) -> Array:
        """The elements of 1 << shift bytes at the addresses; raises AccessFault."""
        index = self.locate(addresses, shift, rows, "load")
        if self._written_to < self.shadows[0].size and not self._scan():
            flags = self.shadows[shift].take(index).view(np.uint8)
            if np.minimum.reduce(flags) != WRITTEN:
                bad = int(flags.argmin()) >> shift
                what = "load of never-written bytes"
                if flags[flags.argmin()] == _COPYING:
                    what = "load of bytes whose asynchronous copy has not been waited for"
                raise self._fault(addresses, bad, shift, what)
        values: Array = self.views[shift].take(index)
        return values

    def store(self, addresses: Array, values: Array, shift: int, rows: Array) -> None:
        """Write elements; of lanes with equal addresses the last one wins."""
        index = self.locate(addresses, shift, rows, "store")
        self.views[shift][index] = values
        if self._written_to < self.shadows[0].size:
            self.shadows[shift][index] = ALL_WRITTEN[shift]

    def unwrite(self, addresses: Array, shift: int, rows: Array) -> None:
        """Mark the destination of a pending asynchronous copy as never written."""
        index = self.locate(addresses, shift, rows, "asynchronous copy")
        self.shadows[shift][index] = _COPY_FLAGS[shift]
        self._written_to = min(self._written_to, int(index.min()) << shift)

    def locate(self, addresses: Array, shift: int, rows: Array, action: str) -> Array:
        """Checked element indices, int64."""
        bits = int(np.bitwise_or.reduce(addresses))
        size = 1 << shift
        if bits & (size - 1) or (
            bits + size > self.nbytes and int(np.maximum.reduce(addresses)) + size > self.nbytes
        ):
            self._check(addresses, shift, action)
        index = np.add(addresses, rows)
        if shift:
            np.right_shift(index, _SHIFTS[shift], index)
        return index.view(np.int64)

    def _scan(self) -> bool:
        shadow = self.shadows[0]
        self._written_to = written_prefix(shadow, self._written_to)
        return self._written_to >= shadow.size

    def _check(self, addresses: Array, shift: int, action: str) -> None:
        for position, address in enumerate(addresses.tolist()):
            if address % (1 << shift):
                raise self._fault(addresses, position, shift, f"misaligned {action}")
            if address + (1 << shift) > self.nbytes:
                raise self._fault(addresses, position, shift, f"out-of-bounds {action}")

    def _fault(self, addresses: Array, position: int, shift: int, what: str) -> AccessFault:
        address = int(addresses[position])
        place = f"shared address 0x{address:x}, {self.describe(address)}"
        return AccessFault.of(position, what, 1 << shift, place)

    def describe(self, address: int) -> str:
        """The variable at an address."""
        if address >= self.nbytes:
            return f"the CTA has {self.nbytes} bytes of shared memory"
        for v in self.variables.values():
            end = v.offset + v.nbytes if v.nbytes else self.nbytes
            if v.offset <= address < end:
                size = f"{v.nbytes} bytes" if v.nbytes else "dynamic"
                return f"at offset {address - v.offset} of {v.name} ({size})"
        return "in no variable"
