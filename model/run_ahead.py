"""Steps that run ahead of their reader: later ones are queued while the first one is waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from urdir.model.decode_state import MAILBOX_SLOTS
from urdir.model.owner import Owner

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.driver.stream import Stream

#: Steps that are queued before the host reads the first one's tokens.
AHEAD = 3
assert AHEAD <= MAILBOX_SLOTS


class RunAhead(Owner):
    """Keeps up to `AHEAD` steps queued on ``stream``, and waits for one after the other.

    ``waited_seconds`` is the time, over the object's life, in which the host had nothing to do but
    wait for the device.
    """

    def __init__(self, device: Device, stream: Stream) -> None:
        self.waited_seconds = 0.0
        self._stream = stream
        self._events = [device.create_event("step") for _ in range(AHEAD)]

    def run(self, queue_step: Callable[[], bool], use_wait: Callable[[], bool]) -> Iterator[None]:
        """Something for every step that is complete.

        ``queue_step`` queues a step on the stream, or returns False when there is none any more.
        While the host would wait, ``use_wait`` is called (at least once a step) until it returns
        False: it is to return quickly.
        """
        queued = done = 0
        while True:
            while queued < done + AHEAD and queue_step():
                self._stream.record(self._events[queued % AHEAD])
                queued += 1
            if queued == done:
                return
            event = self._events[done % AHEAD]
            while use_wait() and not event.is_done:
                pass
            start = time.perf_counter()
            event.synchronize()
            self.waited_seconds += time.perf_counter() - start
            done += 1
            yield

    def close(self) -> None:
        """Free the events; closing twice does nothing."""
        for event in self._events:
            event.close()
