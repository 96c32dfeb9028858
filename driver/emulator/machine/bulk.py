"""Bulk copies and st.async (PTX ISA 9.7.9.25.4, 9.7.9.12), as late as permitted.

A copy to shared memory reads its source when issued, and lands when a thread polls its mbarrier. A
copy to global memory reads shared memory when its thread waits for that (``wait_group.read``), and
lands at its ``wait_group``, or when the grid ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from urdir.driver.emulator.machine.cluster_space import ClusterSpace
from urdir.driver.emulator.machine.faults import LAUNCH_FAILED, MISALIGNED_ADDRESS, AccessFault
from urdir.driver.emulator.machine.mbarriers import Landing, MBarriers
from urdir.driver.emulator.machine.spaces import GlobalSpace

Array = npt.NDArray[Any]

#: Bytes of the pieces that bulk copies consist of, as a shift.
PIECE = 4

_APART = "the mbarrier is not in the shared memory that the data goes to"


@dataclass(slots=True)
class _Store:
    """A copy to global memory: ``group`` is the number of its group."""

    lane: int
    group: int
    to: Array
    origin: Array
    rows: Array
    line: int
    data: Array | None = None


class BulkCopies:
    """Bulk copies in flight of all CTAs of a wave."""

    def __init__(
        self, lanes: int, mbarriers: MBarriers, memory: GlobalSpace, cluster: ClusterSpace
    ) -> None:
        self.mbarriers = mbarriers
        self.shared = mbarriers.shared
        self.memory = memory
        self.cluster = cluster
        self.changes = mbarriers.changes
        self._lanes = lanes
        self.clear()

    def clear(self) -> None:
        """New CTAs."""
        self._committed = np.zeros(self._lanes, np.int64)
        self._stores: list[_Store] = []

    # ---- to shared memory ----

    def load(
        self,
        to: Array,
        origin: Array,
        size: Array,
        barrier: Array,
        rows: Array,
        masks: Array | None = None,
    ) -> None:
        """cp.async.bulk from global to shared memory; of all CTAs in ``masks`` if given."""
        every = [None] * to.size if masks is None else np.broadcast_to(masks, to.shape).tolist()
        for i, nbytes in enumerate(np.broadcast_to(size, to.shape).tolist()):
            with _lane(i):
                steps = _pieces(int(to[i]), int(origin[i]), nbytes)
                data = self.memory.load(origin[i] + steps, PIECE)
                mask = every[i]
                self._send(to[i : i + 1], steps, data, barrier[i : i + 1], rows[i : i + 1], mask)

    def send(self, to: Array, origin: Array, size: Array, barrier: Array, rows: Array) -> None:
        """cp.async.bulk from the CTA's shared memory to that of a CTA of its cluster."""
        for i, nbytes in enumerate(np.broadcast_to(size, to.shape).tolist()):
            with _lane(i):
                steps = _pieces(int(to[i]), int(origin[i]), nbytes)
                row = np.broadcast_to(rows[i], steps.shape)
                data = self.shared.load(origin[i] + steps, PIECE, row)
                self._send(to[i : i + 1], steps, data, barrier[i : i + 1], rows[i : i + 1], None)

    def _send(
        self, to: Array, steps: Array, data: Array, barrier: Array, row: Array, mask: int | None
    ) -> None:
        """Start the copy of one lane: it lands at an mbarrier beside its destination."""
        local, home = self.cluster.resolve(to, row, None)
        at, beside = self.cluster.resolve(barrier, row, None)
        if home[0] != beside[0]:
            raise AccessFault(0, LAUNCH_FAILED, _APART)
        for each in home if mask is None else self.cluster.members(home, mask):
            (slot,) = self.mbarriers.slots(at, np.array([each]))
            where = np.broadcast_to(each, steps.shape)
            self.shared.unwrite(local + steps, PIECE, where)
            index = self.shared.locate(local + steps, PIECE, where, "bulk copy")
            self.mbarriers.arrives_later(int(slot), Landing(index, data, PIECE))
        self.changes.count += 1

    def store_async(self, to: Array, data: Array, shift: int, barrier: Array, rows: Array) -> None:
        """st.async: elements of 1 << shift bytes to shared memory of the cluster."""
        local, home = self.cluster.resolve(to, rows, None)
        at, beside = self.cluster.resolve(barrier, rows, None)
        if (apart := home != beside).any():
            raise AccessFault(int(apart.argmax()), LAUNCH_FAILED, _APART)
        slots = self.mbarriers.slots(at, beside)
        self.shared.unwrite(local, shift, home)
        index = self.shared.locate(local, shift, home, "st.async")
        for slot in np.unique(slots).tolist():
            some = slots == slot
            self.mbarriers.arrives_later(slot, Landing(index[some], data[some], shift))
        self.changes.count += 1

    # ---- to global memory ----

    def store(
        self, to: Array, origin: Array, size: Array, rows: Array, lanes: Array, line: int
    ) -> None:
        """cp.async.bulk from shared to global memory."""
        for i, nbytes in enumerate(np.broadcast_to(size, to.shape).tolist()):
            with _lane(i):
                steps = _pieces(int(origin[i]), int(to[i]), nbytes)
                row = np.broadcast_to(rows[i], steps.shape)
                self.shared.load(origin[i] + steps, PIECE, row)  # may be read from now on
                self.memory.memory.check(to[i] + steps, PIECE, "store")
            lane = int(lanes[i])
            group = int(self._committed[lane])
            self._stores.append(_Store(lane, group, to[i] + steps, origin[i] + steps, row, line))

    def commit(self, lanes: Array) -> None:
        """cp.async.bulk.commit_group."""
        self._committed[lanes] += 1

    def wait(self, groups: int, only_reads: bool, lanes: Array) -> None:
        """cp.async.bulk.wait_group, for each lane's groups but the last ``groups``."""
        if not self._stores:
            return
        before = dict(zip(lanes.tolist(), (self._committed[lanes] - groups).tolist(), strict=True))
        left = []
        for store in self._stores:
            if store.group >= before.get(store.lane, 0):
                left.append(store)
                continue
            self._read(store)
            if only_reads:
                left.append(store)
            else:
                self._land(store)
        self._stores = left

    def end(self, lanes: Array) -> None:
        """Lanes end: shared memory may be gone before their copies have read it."""
        if not self._stores:
            return
        ending = set(lanes.tolist())
        for store in self._stores:
            if store.data is None and store.lane in ending:
                raise AccessFault(
                    lanes.tolist().index(store.lane), LAUNCH_FAILED,
                    "the thread ends before its bulk copy has read shared memory; hint: "
                    "cp.async.bulk.wait_group.read 0 must come first", store.line,
                )  # fmt: skip

    def finish(self) -> None:
        """All CTAs have ended: pending copies land."""
        for store in self._stores:
            self._land(store)
        self._stores = []

    def _read(self, store: _Store) -> None:
        if store.data is None:
            store.data = self.shared.load(store.origin, PIECE, store.rows)

    def _land(self, store: _Store) -> None:
        assert store.data is not None
        self.memory.store(store.to, store.data, PIECE)


def _pieces(shared: int, outside: int, nbytes: int) -> Array:
    """Offsets of the 16-byte pieces of a copy; AccessFault if it is not a multiple of these."""
    if shared % 16 or outside % 16 or nbytes % 16 or nbytes <= 0:
        raise AccessFault(
            0,
            MISALIGNED_ADDRESS,
            f"bulk copy of {nbytes} bytes between 0x{shared:x} and 0x{outside:x}: all three must "
            "be multiples of 16",
        )
    return np.arange(0, nbytes, 16, dtype=np.uint64)


@contextmanager
def _lane(i: int) -> Iterator[None]:
    """Attribute a fault inside the context to lane ``i``."""
    try:
        yield
    except AccessFault as fault:
        fault.position = i
        raise
