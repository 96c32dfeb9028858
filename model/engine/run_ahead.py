"""Run-ahead: later steps are queued while the host waits for the first one.

Several steps are launched as one graph if it has been recorded, which saves host time: 8 to 12 us a
token instead of 27 to 44 (host of an H200); the device gains 0.2 %. The first step of an answer is
launched alone, so that its token comes early.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from urdir.driver.context import close_all
from urdir.model.memory.device_state import MAILBOX_SLOTS
from urdir.model.owner import Owner

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.driver.stream import Event, Stream

#: Launches that are queued before the oldest is read: a new request waits for these.
AHEAD = 2
#: Steps of one launch, at most.
AT_ONCE = 4
#: The most answers of a service that continue by several steps a launch. Steps of few rows take the
#: least time: the host gains most, and a new request waits for only two such launches.
FEW = 4
assert AHEAD * AT_ONCE <= MAILBOX_SLOTS
Launch = TypeVar("Launch")


class RunAhead(Owner, Generic[Launch]):
    """The launches on ``stream`` that the host has not read, the oldest first: up to `AHEAD`.

    ``waited_seconds`` is the time, over the object's life, in which the host only waited
    for the device.
    """

    def __init__(self, device: Device, stream: Stream) -> None:
        self.waited_seconds = 0.0
        self._stream = stream
        self._launches: deque[tuple[Event, Launch]] = deque()
        # taken in turns: no more launches than these are queued
        self._events = deque(device.create_event("step") for _ in range(AHEAD))

    def __len__(self) -> int:
        """Launches that are queued and not read."""
        return len(self._launches)

    @property
    def is_full(self) -> bool:
        """Whether enough is queued, so that the oldest launch is to be waited for."""
        return len(self) >= AHEAD

    def queued(self, launch: Launch) -> None:
        """A launch has been queued on the stream."""
        event = self._events[0]
        self._stream.record(event)
        self._events.rotate(-1)
        self._launches.append((event, launch))

    def wait(
        self,
        use_wait: Callable[[], bool] = lambda: False,
        use_more: Callable[[], bool] = lambda: False,
    ) -> Launch:
        """Wait for the oldest launch, and complete it.

        While the host would wait, ``use_wait`` is called, at least once, until it returns False,
        and then ``use_more``: they must return quickly.
        """
        event, _ = self._launches[0]
        while use_wait() and not event.is_done:
            pass
        while not event.is_done and use_more():
            pass
        start = time.perf_counter()
        _, launch = self._launches.popleft()  # also if waiting fails: nothing waits for ever
        event.synchronize()
        self.waited_seconds += time.perf_counter() - start
        return launch

    def clear(self) -> None:
        """Drop the launches unread."""
        self._launches.clear()

    def close(self) -> None:
        """Free the events. Idempotent."""
        close_all([*self._events])
