"""Streams and events."""

from __future__ import annotations

import signal

import numpy as np
import pytest

from urdir.driver.device import Device
from urdir.driver.emulator.scheduler import Scheduler
from urdir.driver.errors import CudaError, LifetimeError


def test_events_are_ordered_in_time(device: Device) -> None:
    with device.create_stream() as stream, device.create_event("start") as start:
        buffer = device.allocate(1 << 16, "x")
        stream.record(start)
        for _ in range(20):
            buffer.fill(1, stream)
        end = stream.record()
        elapsed = end.elapsed_ms_since(start)
        assert 0 <= elapsed < 60_000
        assert end.elapsed_ms_since(end) == 0


def test_stream_waits_for_an_event_of_another(device: Device) -> None:
    a, b = device.create_stream("a"), device.create_stream("b")
    x, y = device.allocate(1 << 20, "x"), device.allocate(1 << 20, "y")
    for value in range(1, 5):
        x.fill(value, a)
        b.wait(a.record())
        y.copy_from(x, b)
        a.wait(b.record())
    b.synchronize()
    assert np.array_equal(y.download("u1"), np.full(1 << 20, 4, np.uint8))


def test_plain_download_sees_queued_work(device: Device) -> None:
    with device.create_stream() as stream:
        buffer = device.allocate(1 << 20, "x")
        buffer.fill(0)
        buffer.fill(9, stream)
        assert set(buffer.download("u1").tolist()) == {9}


def test_plain_upload_comes_after_queued_work(device: Device) -> None:
    with device.create_stream() as stream:
        buffer = device.allocate(1 << 20, "x")
        buffer.fill(9, stream)
        buffer.upload(np.zeros(1 << 20, np.uint8))
        stream.synchronize()
        assert not buffer.download("u1").any()


def test_use_after_close(device: Device) -> None:
    with device.create_stream("decode") as stream, stream.record() as event:
        pass
    stream.close()
    event.close()
    for call in (
        stream.synchronize,
        stream.record,
        lambda: device.allocate(4, "x").fill(0, stream),
    ):
        with pytest.raises(LifetimeError, match="stream 'decode' was used after it was closed"):
            call()
    with pytest.raises(LifetimeError, match="event 'event' was used"):
        event.synchronize()


def test_an_event_tells_whether_it_is_passed(device: Device) -> None:
    with device.create_stream() as stream, device.create_event("end") as end:
        assert end.is_done  # never recorded: nothing to wait for
        buffer = device.allocate(1 << 20, "x")
        for _ in range(20):
            buffer.fill(1, stream)
        stream.record(end)
        while not end.is_done:  # asking often enough is waiting
            pass
        assert buffer.download("u1").all()
    with pytest.raises(LifetimeError):
        _ = end.is_done


def test_a_second_ctrl_c_ends_the_emulated_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first waits for what runs; the second stops a kernel in the middle, which is told."""

    def interrupted(scheduler: Scheduler) -> None:
        for _ in range(interrupts):
            signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Device.open("emulator") as device:
            monkeypatch.setattr(Scheduler, "finish_all", interrupted)
            interrupts = 1
            with pytest.raises(KeyboardInterrupt):
                device.synchronize()
            interrupts = 0
            device.synchronize()
            interrupts = 2
            with pytest.raises(KeyboardInterrupt):
                device.synchronize()
            with pytest.raises(CudaError, match="Ctrl-C, twice, stopped a kernel"):
                device.synchronize()
    finally:
        signal.signal(signal.SIGINT, before)
