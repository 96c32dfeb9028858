"""Address spaces: the single path from a kernel's loads, stores and atomics to memory.

Generated code calls a space with all lanes' operands; ``q`` picks the lanes of a guarded access
(None for all). A fault's position is translated back to the lanes of the group.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from urdir.driver.emulator.machine.atomics import read_modify_write
from urdir.driver.emulator.machine.faults import AccessFault
from urdir.driver.emulator.machine.memory import Memory
from urdir.driver.emulator.machine.ops_convert import SHARED_WINDOW
from urdir.driver.emulator.machine.shared import SharedMemory

Array = npt.NDArray[Any]


def pick(values: Array, q: Array | None) -> Array:
    """The active lanes' values; a single value stands for all lanes."""
    return values if q is None or values.size == 1 else values[q]


class Changes:
    """Counts events that could release a waiting group: stores, and atomics that changed a
    value."""

    count = 0


class GlobalSpace:
    """``.global`` and ``.const``."""

    def __init__(self, changes: Changes) -> None:
        self.memory: Memory
        self.changes = changes

    def load(self, address: Array, shift: int, q: Array | None = None) -> Array:
        """The elements at the active lanes' addresses."""
        if q is None:
            return self.memory.load(address, shift)
        try:
            return self.memory.load(address[q], shift)
        except AccessFault as fault:
            fault.position = int(q[fault.position])
            raise

    def store(self, address: Array, values: Array, shift: int, q: Array | None = None) -> None:
        """Write the active lanes' elements."""
        self.changes.count += 1
        if q is None:
            self.memory.store(address, values, shift)
            return
        try:
            self.memory.store(address[q], pick(values, q), shift)
        except AccessFault as fault:
            fault.position = int(q[fault.position])
            raise

    def atomic(
        self, operation: str, address: Array, a: Array, b: Array | None, q: Array | None = None
    ) -> Array:
        """Old values of the active lanes."""
        shift = a.itemsize.bit_length() - 1

        def update(view: Array, index: Array, lanes: Array | None) -> Array:
            first = pick(pick(a, q), lanes)
            second = None if b is None else pick(pick(b, q), lanes)
            old, changed = read_modify_write(operation, view, index, first, second)
            self.changes.count += changed
            return old

        try:
            return self.memory.update(pick(address, q), shift, update).view(a.dtype)
        except AccessFault as fault:
            if q is not None:
                fault.position = int(q[fault.position])
            raise


class SharedSpace:
    """``.shared``: like global memory, with each lane's row."""

    def __init__(self, memory: SharedMemory, changes: Changes) -> None:
        self.memory = memory
        self.changes = changes

    def load(self, address: Array, shift: int, rows: Array, q: Array | None = None) -> Array:
        """The elements at the active lanes' addresses."""
        if q is None:
            return self.memory.load(address, shift, rows)
        try:
            return self.memory.load(address[q], shift, rows[q])
        except AccessFault as fault:
            fault.position = int(q[fault.position])
            raise

    def store(
        self, address: Array, values: Array, shift: int, rows: Array, q: Array | None = None
    ) -> None:
        """Write the active lanes' elements."""
        self.changes.count += 1
        if q is None:
            self.memory.store(address, values, shift, rows)
            return
        try:
            self.memory.store(address[q], pick(values, q), shift, rows[q])
        except AccessFault as fault:
            fault.position = int(q[fault.position])
            raise

    def atomic(
        self,
        operation: str,
        address: Array,
        a: Array,
        b: Array | None,
        rows: Array,
        q: Array | None = None,
    ) -> Array:
        """Old values of the active lanes."""
        shift = a.itemsize.bit_length() - 1
        try:
            self.memory.load(pick(address, q), shift, pick(rows, q))
        except AccessFault as fault:
            if q is not None:
                fault.position = int(q[fault.position])
            raise
        index = self.memory.locate(pick(address, q), shift, pick(rows, q), "atomic access")
        second = None if b is None else pick(b, q)
        old, changed = read_modify_write(
            operation, self.memory.views[shift], index, pick(a, q), second
        )
        self.changes.count += changed
        return old


class GenericSpace:
    """Generic addresses: shared ones begin at SHARED_WINDOW."""

    def __init__(self, global_space: GlobalSpace, shared_space: SharedSpace) -> None:
        self.global_space = global_space
        self.shared_space = shared_space

    def is_shared(self, address: Array) -> Array:
        """Which addresses are in the shared window."""
        window = np.uint64(SHARED_WINDOW)
        return (address >= window) & (address < window + np.uint64(1 << 32))

    def is_global(self, address: Array) -> Array:
        """Which addresses are not."""
        return ~self.is_shared(address)

    def _split(self, address: Array, q: Array | None) -> tuple[Array, Array]:
        lanes = np.arange(address.size) if q is None else q
        in_shared = self.is_shared(address[lanes])
        return lanes[in_shared], lanes[~in_shared]

    def load(self, address: Array, shift: int, rows: Array, q: Array | None = None) -> Array:
        """As of the two spaces."""
        shared, outside = self._split(address, q)
        if not shared.size:
            return self.global_space.load(address, shift, q)
        local = address - np.uint64(SHARED_WINDOW)
        if not outside.size:
            return self.shared_space.load(local, shift, rows, q)
        far = self.global_space.load(address, shift, outside)
        result = np.empty(address.size, far.dtype)
        result[outside] = far
        result[shared] = self.shared_space.load(local, shift, rows, shared)
        return result if q is None else result[q]

    def store(
        self, address: Array, values: Array, shift: int, rows: Array, q: Array | None = None
    ) -> None:
        """As of the two spaces."""
        shared, outside = self._split(address, q)
        if outside.size:
            self.global_space.store(address, values, shift, outside)
        if shared.size:
            local = address - np.uint64(SHARED_WINDOW)
            self.shared_space.store(local, values, shift, rows, shared)

    def atomic(
        self,
        operation: str,
        address: Array,
        a: Array,
        b: Array | None,
        rows: Array,
        q: Array | None = None,
    ) -> Array:
        """As of the two spaces."""
        shared, outside = self._split(address, q)
        result = np.empty(address.size, a.dtype)
        if outside.size:
            result[outside] = self.global_space.atomic(operation, address, a, b, outside)
        if shared.size:
            local = address - np.uint64(SHARED_WINDOW)
            result[shared] = self.shared_space.atomic(operation, local, a, b, rows, shared)
        return result if q is None else result[q]
