"""How busy steps keep the device, by its own clock."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from urdir.driver.context import close_all
from urdir.model.owner import Owner

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.driver.stream import Event, Stream


class _Span(NamedTuple):
    begin: Event
    end: Event


class StepClock(Owner):
    """Times launches on ``stream``, up to ``most`` of which are not read yet.

    ``busy_seconds`` is what launches took that were read, ``idle_seconds`` what passed between the
    end of one and the beginning of the next while there was work to do.
    """

    def __init__(self, device: Device, stream: Stream, most: int) -> None:
        self.busy_seconds = self.idle_seconds = 0.0
        self._stream = stream
        # in turns: one is kept for the end of the launch that was read last
        self._spans = deque(
            _Span(device.create_event("begin of steps"), device.create_event("end of steps"))
            for _ in range(most + 1)
        )
        self._launches: deque[_Span] = deque()
        self._last: _Span | None = None

    def begin(self) -> None:
        """A launch is queued next."""
        self._stream.record(self._spans[0].begin)

    def end(self) -> None:
        """The launch has been queued."""
        span = self._spans[0]
        self._stream.record(span.end)
        self._spans.rotate(-1)
        self._launches.append(span)

    def read(self) -> None:
        """The oldest launch is complete; one whose end could not be marked is not timed."""
        if not self._launches:
            return
        span = self._launches.popleft()
        self.busy_seconds += span.end.elapsed_ms_since(span.begin) / 1e3
        if self._last is not None:
            self.idle_seconds += span.begin.elapsed_ms_since(self._last.end) / 1e3
        self._last = span

    def rest(self) -> None:
        """There is no work: what passes until the next launch does not count."""
        self._last = None

    def clear(self) -> None:
        """Forget the launches that were not read."""
        self._launches.clear()
        self._last = None

    def close(self) -> None:
        """Free the events; closing twice does nothing."""
        close_all([event for span in self._spans for event in span])
