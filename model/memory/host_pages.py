"""Pages of a prefix tree that were evicted from the device, in page-locked host memory.

Copies are queued on a stream of their own, ordered by events: a page is read before the steps that
are queued later overwrite it, and is written after the steps that are queued already, and before
those that read it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from urdir.driver.context import close_all
from urdir.model.errors import ModelError
from urdir.model.memory.pages import Move, Node
from urdir.model.owner import Owner

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.driver.memory import Slice
    from urdir.driver.stream import Stream
    from urdir.model.memory.cache_groups import Group


#: Pages that are copied to measure the rate.
_MEASURED = 32


class HostSlots:
    """``count`` slots for nodes; the first one that was filled is evicted first: a node before its
    parent, which was evicted from the device after it. Bookkeeping only."""

    def __init__(self, count: int) -> None:
        self.count = count
        # a prefix is evicted from its end on: its slots then have the order of its pages
        self._unused = list(range(count))
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
        self._groups = tuple(groups)
        slot_nbytes = sum(size for group in groups for _, _, size in group.planes())
        if nbytes < slot_nbytes:
            raise ModelError(
                f"{nbytes:,} bytes of host memory for prefixes: a page takes {slot_nbytes:,}"
            )
        super().__init__(nbytes // slot_nbytes)
        # of each plane of each group: its memory, start, bytes of a page, and where slots are
        self._planes: list[list[tuple[Slice, int, int, int]]] = []
        at = 0
        for group in groups:
            self._planes.append([])
            for memory, start, size in group.planes():
                self._planes[-1].append((memory, start, size, at))
                at += self.count * size
        self._steps = stream
        self._pinned = device.pinned(at, "prefixes")
        self._copies = device.create_stream("prefixes")
        self._event = device.create_event("prefixes")
        # an emulated device copies and computes at other rates than a GPU
        self._seconds = 0.0 if device.is_emulated else self._measure()

    def pays(self, seconds: float) -> bool:
        """Whether a token comes back sooner than it is computed in so many seconds (0: it is not
        known how many)."""
        return not seconds or self._seconds < seconds

    def _measure(self) -> float:
        """Seconds in which a token comes back: slots are copied to pages, which are empty."""
        leading = self._groups[0].layout
        count = min(_MEASURED, self.count, *(group.layout.pages for group in self._groups))
        pages = (tuple([number] * len(self._groups)) for number in range(count))
        nothing = Node(None, (), -1)
        moves = [Move(nothing, slot, of) for slot, of in enumerate(pages)]
        begun = time.perf_counter()
        self._copy(moves, to_device=True)
        self._copies.synchronize()
        return (time.perf_counter() - begun) / (count * leading.page_len)

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
        """Queue copies; pages and slots that follow one another are copied at once."""
        for number, planes in enumerate(self._planes):
            pages = ((move.pages[number], move.slot) for move in moves)
            runs = _runs([(page, slot) for page, slot in pages if page is not None])
            for memory, start, size, at in planes:
                copy = memory.upload_async if to_device else memory.download_async
                for page, slot, count in runs:
                    place = at + slot * size
                    copy(self._pinned, count * size, start + page * size, self._copies, place)


def _runs(pairs: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Pairs (page, slot), in runs of consecutive ones of both: the first, and how many."""
    runs: list[tuple[int, int, int]] = []
    for page, slot in sorted(pairs):
        if runs:
            first, begun, count = runs[-1]
            if (page, slot) == (first + count, begun + count):
                runs[-1] = first, begun, count + 1
                continue
        runs.append((page, slot, 1))
    return runs
