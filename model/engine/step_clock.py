"""Device time of steps, and idle time between them, by the device's clock."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from urdir.driver.context import close_all
from urdir.model.owner import Owner

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.driver.stream import Event, Stream


class Span(NamedTuple):
    """A launch: where it begins and ends."""

    begin: Event
    end: Event


class StepClock(Owner):
    """Times launches on ``stream`` by marks before and after them.

    ``busy_seconds`` is what launches took that were read, ``idle_seconds`` what passed between the
    end of one and the beginning of the next while there was work to do.
    """

    def __init__(self, device: Device, stream: Stream) -> None:
        self.busy_seconds = self.idle_seconds = 0.0
        self._device = device
        self._stream = stream
        self._spans: list[Span] = []
        self._free: list[Span] = []
        self._last: Span | None = None

    def span(self) -> Span:
        """For one launch, until it is read."""
        if not self._free:
            create = self._device.create_event
            self._free.append(Span(create("begin of steps"), create("end of steps")))
            self._spans.append(self._free[-1])
        return self._free.pop()

    def mark(self, point: Event) -> None:
        """The beginning or the end of a launch is here."""
        self._stream.record(point)

    def read(self, span: Span) -> None:
        """A launch is complete: the one after the last that was read."""
        self.busy_seconds += span.end.elapsed_ms_since(span.begin) / 1e3
        if self._last is not None:
            self.idle_seconds += span.begin.elapsed_ms_since(self._last.end) / 1e3
            self._free.append(self._last)
        self._last = span

    def rest(self) -> None:
        """Pause until the next launch. Nothing is queued: launches that were not read never are."""
        self._last = None
        self._free = [*self._spans]

    def close(self) -> None:
        """Free the marks. Idempotent."""
        close_all([event for span in self._spans for event in span])
