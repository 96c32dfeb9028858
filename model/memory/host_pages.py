"""Pages and states of prefixes that were evicted from the device, in page-locked host memory.

Copies are queued on a stream of their own, ordered by events: a page is read before the steps that
are queued later overwrite it, and is written after the steps that are queued already, and before
those that read it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from urdir.driver.context import close_all
from urdir.model.errors import ModelError
from urdir.model.memory.host_slots import HostSlots, Move
from urdir.model.owner import Owner

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.driver.memory import Slice
    from urdir.driver.stream import Stream

_Node = TypeVar("_Node")

#: Pages that are copied to measure the rate.
_MEASURED = 32


class Arrays(Protocol):
    """Arrays on the device that are divided alike: the caches of a group of layers by pages, states
    by places."""

    def planes(self) -> Iterator[tuple[Slice, int, int]]:
        """Of each array: its memory, and where its parts begin, of this many bytes each."""


class HostPages(HostSlots[_Node], Owner):
    """Slots of up to ``nbytes`` bytes in all, each for a page (or state) of every one of
    ``groups``. Steps are queued on ``stream``. Raises ModelError for less than a slot."""

    def __init__(
        self, device: Device, stream: Stream, groups: Sequence[Arrays], nbytes: int
    ) -> None:
        slot_nbytes = sum(size for group in groups for _, _, size in group.planes())
        if nbytes < slot_nbytes:
            raise ModelError(
                f"prefix_host_memory has {nbytes:,} bytes for a device: a page of its layers takes "
                f"{slot_nbytes:,}"
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

    def measure(self, pages: int) -> float:
        """Seconds in which a page comes back: slots are copied to the first pages, up to ``pages``
        of them, which are empty."""
        count = min(_MEASURED, self.count, pages)
        runs = [(0, 0, count)]
        taken = []
        for _ in range(2):  # the first time more has to be made ready
            begun = time.perf_counter()
            for planes in self._planes:
                self._copy_runs(planes, runs, to_device=True)
            self._copies.synchronize()
            taken.append(time.perf_counter() - begun)
        return min(taken) / count

    def receive(self, moves: Sequence[Move[_Node]]) -> None:
        """Queue copies of pages to slots, before what is written to the pages from now on. Raises
        DriverError."""
        self._copy(moves, to_device=False)
        self._order(self._copies, self._steps)

    def give(self, moves: Sequence[Move[_Node]]) -> None:
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

    def _copy(self, moves: Sequence[Move[_Node]], *, to_device: bool) -> None:
        """Queue copies; pages and slots that follow one another are copied at once."""
        for number, planes in enumerate(self._planes):
            pages = ((move.pages[number], move.slot) for move in moves)
            runs = _runs([(page, slot) for page, slot in pages if page is not None])
            self._copy_runs(planes, runs, to_device=to_device)

    def _copy_runs(
        self,
        planes: Sequence[tuple[Slice, int, int, int]],
        runs: Sequence[tuple[int, int, int]],
        *,
        to_device: bool,
    ) -> None:
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
