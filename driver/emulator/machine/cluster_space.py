"""Distributed shared memory: one address window over the shared memory of a cluster's CTAs.

A shared::cluster address is an offset below 1 << 24 with a number above it: 0 for the lane's own
CTA, so that plain shared::cta addresses are valid here, or 1 and the rank of a CTA of its cluster.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from urdir.driver.emulator.machine.faults import LAUNCH_FAILED, AccessFault
from urdir.driver.emulator.machine.shared import SharedMemory
from urdir.driver.emulator.machine.spaces import Changes, SharedSpace

Array = npt.NDArray[Any]

#: More bytes than a CTA can have.
_WINDOW_BITS = 24
_OFFSET = (1 << _WINDOW_BITS) - 1
#: Ranks from this one on, which no cluster has, are not distinguished.
_LAST_RANK = 254


def map_rank(address: Array, rank: Array) -> Array:
    """mapa: the same offset in the shared memory of the CTA with that rank."""
    window = np.minimum(rank, np.uint32(_LAST_RANK)).astype(address.dtype) + address.dtype.type(1)
    mapped: Array = (address & address.dtype.type(_OFFSET)) | window << _WINDOW_BITS
    return mapped


class ClusterSpace(SharedSpace):
    """``.shared::cluster``: like .shared, in the row of the addressed CTA."""

    def __init__(self, memory: SharedMemory, changes: Changes, size: int, ctas: int) -> None:
        super().__init__(memory, changes)
        self.size = size
        #: Threads of each CTA of the wave that have not ended; the run of the wave sets it.
        self.live: Array = np.ones(ctas, np.int64)

    def resolve(self, address: Array, rows: Array, q: Array | None) -> tuple[Array, Array]:
        """Offsets in a CTA's shared memory, and the start of that CTA's row.

        Raises AccessFault for a lane (of ``q``, None for all) that addresses a missing CTA.
        """
        window = (address >> np.uint64(_WINDOW_BITS)).astype(np.int64)
        if not window.any():
            return address, rows
        stride = self.memory.stride
        own = rows.astype(np.int64) // stride
        cta = np.where(window == 0, own, own // self.size * self.size + window - 1)
        self._check(address, window, cta, q)
        return address & np.uint64(_OFFSET), (cta * stride).astype(np.uint64)

    def members(self, home: Array, mask: int) -> Array:
        """The start of the shared memory of each CTA in a mask of ranks, given one of the cluster.

        Raises AccessFault for missing ranks.
        """
        stride = self.memory.stride
        first = int(home[0]) // stride // self.size * self.size
        ranks = [rank for rank in range(16) if mask >> rank & 1]
        if not ranks or ranks[-1] >= self.size or mask >> 16:
            what = f"the CTA mask 0x{mask:x} does not fit a cluster of {self.size} CTAs"
            raise AccessFault(0, LAUNCH_FAILED, what)
        ctas = first + np.array(ranks)
        if not self.live[ctas].all():
            rank = ranks[int((self.live[ctas] == 0).argmax())]
            raise AccessFault(0, LAUNCH_FAILED, f"copy to the CTA of rank {rank}, which has ended")
        return (ctas * stride).astype(np.uint64)

    def _check(self, address: Array, window: Array, cta: Array, q: Array | None) -> None:
        beyond = (window < 0) | (window > self.size)
        missing = beyond | (self.live[np.where(beyond, 0, cta)] == 0)
        if q is not None:
            active = np.zeros(address.size, np.bool_)
            active[q] = True
            missing &= active
        if not missing.any():
            return
        at = int(missing.argmax())
        where = f"shared::cluster address 0x{int(address[at]):x}"
        if beyond[at]:
            what = f"access beyond the cluster of {self.size} CTAs, {where}"
        else:
            what = f"access to a CTA that has ended, {where}"
        raise AccessFault(at, LAUNCH_FAILED, what + _rank(int(address[at])))

    # ---- accesses ----

    def load(self, address: Array, shift: int, rows: Array, q: Array | None = None) -> Array:
        """The elements at the active lanes' addresses."""
        local, home = self.resolve(address, rows, q)
        with _naming_rank(address):
            return super().load(local, shift, home, q)

    def store(
        self, address: Array, values: Array, shift: int, rows: Array, q: Array | None = None
    ) -> None:
        """Write the active lanes' elements."""
        local, home = self.resolve(address, rows, q)
        with _naming_rank(address):
            super().store(local, values, shift, home, q)

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
        local, home = self.resolve(address, rows, q)
        with _naming_rank(address):
            return super().atomic(operation, local, a, b, home, q)


def _rank(address: int) -> str:
    window = address >> _WINDOW_BITS
    return f", of the CTA of rank {window - 1}" if 0 < window <= _LAST_RANK + 1 else ""


@contextmanager
def _naming_rank(address: Array) -> Iterator[None]:
    """Add the rank of the addressed memory to a fault."""
    try:
        yield
    except AccessFault as fault:
        whose = _rank(int(address[fault.position]))
        raise AccessFault(fault.position, fault.code, fault.message + whose) from None
