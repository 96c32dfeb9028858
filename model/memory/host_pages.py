"""Pages of a prefix tree that were evicted from the device, in page-locked host memory.

Copies are queued on a stream of their own, ordered by events: a page is read before the steps that
are queued later overwrite it, and is written after the steps that are queued already, and before
those that read it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from urdir.driver.context import close_all
from urdir.model.errors import ModelError
from urdir.model.memory.pages import Move, Node
from urdir.model.owner import Owner

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.driver.stream import Stream
    from urdir.model.memory.cache_groups import Group


class HostSlots:
    """``count`` slots for nodes; the first one that was filled is evicted first: a node before its
    parent, which was evicted from the device after it. Bookkeeping only."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._unused = list(reversed(range(count)))
        self._slots: OrderedDict[Node, int] = OrderedDict()

    @property
    def used(self) -> int:
        """Number of nodes that have a slot."""
        return len(self._slots)

    def put(self, node: Node) -> tuple[int, Node | None]:
        """A slot for a node, and the node that has to leave it."""
        lost = None
        if self._unused:
            slot = self._unused.pop()
        else:
            lost, slot = self._slots.popitem(last=False)
        self._slots[node] = slot
        return slot, lost

    def claim(self, node: Node) -> int:
        """The slot of a node, which leaves it; it stays filled until it is freed."""
        return self._slots.pop(node)

    def free(self, slot: int) -> None:
        """A claimed slot is of no use any more, once queued copies have run."""
        self._unused.append(slot)

    def drop(self, node: Node) -> None:
        """A node that may have a slot has left the tree."""
        if (slot := self._slots.pop(node, None)) is not None:
            self._unused.append(slot)


class HostPages(HostSlots, Owner):
    """Slots of up to ``nbytes`` bytes in all, each for a page of every one of ``groups``, the
    leading one first. Steps are queued on ``stream``. Raises ModelError for less than a slot."""

    def __init__(
        self, device: Device, stream: Stream, groups: Sequence[Group], nbytes: int
    ) -> None:
        self._planes = [list(group.planes()) for group in groups]
        self._offsets = [0]
        for planes in self._planes:
            size = sum(size for _, _, size in planes)
            self._offsets.append(self._offsets[-1] + size)
        slot_nbytes = self._offsets[-1]
        if nbytes < slot_nbytes:
            raise ModelError(
                f"{nbytes:,} bytes of host memory for prefixes: a page takes {slot_nbytes:,}"
            )
        super().__init__(nbytes // slot_nbytes)
        self.slot_nbytes = slot_nbytes
        self._steps = stream
        self._pinned = device.pinned(self.count * slot_nbytes, "prefixes")
        self._copies = device.create_stream("prefixes")
        self._event = device.create_event("prefixes")

    def receive(self, moves: Sequence[Move]) -> None:
        """Queue copies of pages to slots, before what is written to the pages from now on. Raises
        DriverError."""
        self._copy(moves, to_device=False)
        self._order(self._copies, self._steps)

    def give(self, moves: Sequence[Move]) -> None:
        """Queue copies of slots to pages, after the queued steps and before later ones, and free
        the slots. Raises DriverError."""
        self._order(self._steps, self._copies)
        self._copy(moves, to_device=True)
        self._order(self._copies, self._steps)
        for move in moves:
            self.free(move.slot)

    def close(self) -> None:
        """Wait for the copies and free the memory. Idempotent."""
        close_all([self._copies, self._event, self._pinned])

    def _order(self, first: Stream, then: Stream) -> None:
        """What is queued on ``then`` from now on waits for what is queued on ``first``."""
        first.record(self._event)
        then.wait(self._event)

    def _copy(self, moves: Sequence[Move], *, to_device: bool) -> None:
        for move in moves:
            at = move.slot * self.slot_nbytes
            for page, planes, offset in zip(move.pages, self._planes, self._offsets, strict=False):
                place = at + offset
                if page is None:
                    continue
                for memory, start, nbytes in planes:
                    copy = memory.upload_async if to_device else memory.download_async
                    copy(self._pinned, nbytes, start + page * nbytes, self._copies, place)
                    place += nbytes
