"""What the device's clock says of steps and of the pauses between them."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from urdir.driver.device import Device
from urdir.model.engine.step_clock import Span, StepClock


class ToyEvent:
    """A point in time, in milliseconds."""

    def __init__(self) -> None:
        self.at: float | None = None

    def elapsed_ms_since(self, earlier: ToyEvent) -> float:
        assert self.at is not None
        assert earlier.at is not None
        return self.at - earlier.at

    def close(self) -> None:
        pass


class ToyDevice:
    """A device whose clock the test moves on; it is its own stream."""

    now = 0.0
    created = 0

    def create_event(self, name: str) -> ToyEvent:
        self.created += 1
        return ToyEvent()

    def record(self, event: ToyEvent) -> None:
        event.at = self.now


def test_launches_and_the_pauses_between_them() -> None:
    """Two are queued before the first is read. A rest is no pause."""
    toy: Any = ToyDevice()
    with StepClock(toy, toy) as clock:
        spans: deque[Span] = deque()

        def launch(pause: float, takes: float) -> None:
            spans.append(clock.span())
            toy.now += pause
            clock.mark(spans[-1].begin)
            toy.now += takes
            clock.mark(spans[-1].end)

        launch(7, 100)
        for pause in (3, 5, 11):
            launch(pause, 200)
            clock.read(spans.popleft())
        assert clock.busy_seconds == pytest.approx(0.5)
        assert clock.idle_seconds == pytest.approx(0.008)
        clock.read(spans.popleft())
        assert clock.busy_seconds == pytest.approx(0.7)
        assert clock.idle_seconds == pytest.approx(0.019)
        clock.rest()
        launch(1000, 1)
        clock.read(spans.popleft())
        assert clock.idle_seconds == pytest.approx(0.019)
        launch(2, 1)
        spans.clear()  # never read
        clock.rest()
        launch(4, 1)
        launch(6, 1)
        clock.read(spans.popleft())
        clock.read(spans.popleft())
        assert clock.busy_seconds == pytest.approx(0.703)
        assert clock.idle_seconds == pytest.approx(0.025)
        assert toy.created == 2 * 3  # two that are queued, and the last one read


def test_on_a_device(device: Device) -> None:
    with device.create_stream() as stream, StepClock(device, stream) as clock:
        for _ in range(3):
            span = clock.span()
            clock.mark(span.begin)
            clock.mark(span.end)
            clock.read(span)
        assert 0 <= clock.busy_seconds < 10
        assert 0 <= clock.idle_seconds < 10
