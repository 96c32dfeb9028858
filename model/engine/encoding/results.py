"""Results of steps that are copied to the host while the device has the next step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from urdir.driver.context import close_all
from urdir.model.owner import Owner

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.driver.memory import Region
    from urdir.driver.stream import Event, Stream

Floats = npt.NDArray[np.float32]

#: Page-locked bytes of each half: 512 results of 1,024 values.
_HALF_BYTES = 1 << 21


class QueuedResults(Owner):
    """Copies to the host in the order of ``stream``, of two steps at most: page-locked memory has a
    half for each. A larger result is copied once its step is complete, and nothing is queued."""

    def __init__(self, device: Device, stream: Stream) -> None:
        self._stream = stream
        self._pinned = device.pinned(2 * _HALF_BYTES, "queued results")
        self._events: list[Event] = [device.create_event("queued results") for _ in range(2)]
        self._half = 0

    def rows(self, waiting: Waiting, source: Region, shape: tuple[int, int]) -> None:
        """Add the results (rows, width) f32 of the step that was queued last to ``waiting``."""
        nbytes = 4 * shape[0] * shape[1]
        if nbytes > _HALF_BYTES:
            waiting.take_all()
            self._stream.synchronize()
            waiting.take(source.download(np.float32, shape))
            return
        waiting.take_all(left=1)
        self._half = 1 - self._half
        at, event = self._half * _HALF_BYTES, self._events[self._half]
        source.download_async(self._pinned, nbytes, 0, self._stream, at)
        self._stream.record(event)
        waiting.queued.append((event, self._pinned.view(np.float32, shape, at)))

    def close(self) -> None:
        """Free the memory. Idempotent."""
        close_all([*self._events, self._pinned])


class Waiting:
    """The results of the steps of one call, in order: those that are ``made``, a step's by
    ``each``, and copies that are ``queued``."""

    def __init__(self, each: Callable[[Floats], Floats] = np.copy) -> None:
        self._each = each
        self.made: list[Floats] = []
        self.queued: deque[tuple[Event, Floats]] = deque()

    def take(self, values: Floats) -> None:
        """Take the results of a step, whose memory others will have."""
        self.made.append(self._each(values))

    def take_all(self, left: int = 0) -> None:
        """Wait for what is queued, except for this many of the last ones."""
        while len(self.queued) > left:
            event, values = self.queued.popleft()
            event.synchronize()
            self.take(values)
