"""Work of the host between launches: every interpreter of a plan does it in its place."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from urdir.driver.device import Device
from urdir.driver.diff import trace
from urdir.driver.errors import HostWorkError, LaunchError, LifetimeError
from urdir.driver.execute import bind, evaluate, profile, record, recording, run
from urdir.driver.host_work import HostWork
from urdir.driver.memory import Region
from urdir.driver.operation import Memory
from urdir.driver.parallel import completed
from urdir.driver.plan import Plan
from urdir.driver.recorded_parts import RecordedParts
from urdir.driver.stream import Stream
from urdir.ptxgen.kernels.add import Add
from urdir.ptxgen.ptx.launch import Access, Param

COUNT = 96
ADD = Add(n=COUNT)


class Square(HostWork):
    """Squares of what the device has made so far; fails if it is told to."""

    name = "square"
    fails = False

    @property
    def params(self) -> Sequence[Param]:
        return (
            Param("x", "u8", (4 * COUNT,), Access.IN),
            Param("y", "u8", (4 * COUNT,), Access.OUT),
        )

    def perform(self, args: Mapping[str, Memory], stream: Stream) -> None:
        if self.fails:
            raise HostWorkError("no squares today")
        x, y = args["x"], args["y"]
        assert isinstance(x, Region)
        assert isinstance(y, Region)
        stream.synchronize()
        y.upload(x.download(np.float32) ** 2)


@pytest.mark.parametrize("ends", ["with launches", "with work"])
def test_every_interpreter(device: Device, ends: str) -> None:
    """z = (x + x)² + x, by several graphs; twice, as the first result is replaced."""
    values = np.random.default_rng(0).standard_normal(COUNT).astype(np.float32)
    square = Square()
    with device.arena(dict.fromkeys("xyz", 4 * COUNT), "work") as of:
        of["x"].upload(values)
        plan = Plan("squares")
        if ends == "with work":
            plan.launch(square, "first", x=of["x"], y=of["y"])
        plan.launch(ADD, "twice", a=of["x"], b=of["x"], y=of["y"])
        plan.launch(square, "square", x=of["y"], y=of["z"])
        plan.launch(ADD, "sum", a=of["z"], b=of["x"], y=of["y"])
        if ends == "with work":
            plan.launch(square, "again", x=of["y"], y=of["z"])
            plan.launch(square, "last", x=of["z"], y=of["y"])
        assert plan.kernels() == (ADD,)
        expected = (values + values) ** 2 + values
        expected = expected**4 if ends == "with work" else expected

        def check() -> None:
            found: Any = of["y"].download(np.float32)
            np.testing.assert_allclose(found, expected, rtol=1e-6)
            of["y"].fill(0)
            of["z"].fill(0)

        bound = bind(plan, device)
        with device.create_stream() as stream:
            run(bound, device, stream)
            check()
            evaluate(bound)
            check()
            assert len(profile(bound, device, stream)) == len(plan)
            check()
            assert {of.kernel for of in trace(bound, device, stream)} == {ADD.name}
            check()
            with pytest.raises(LaunchError, match="not in one graph"):
                record(bound, device)
            graph = completed(recording(bound, device))
            assert isinstance(graph, RecordedParts)
            assert len(graph.graphs) == 2
            with graph:
                for _ in range(2):
                    graph.launch(stream)
                    check()
                square.fails = True
                with pytest.raises(HostWorkError, match="today"):
                    graph.launch(stream)
            with pytest.raises(LifetimeError):
                graph.launch(stream)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C is heard, also where the tests run in the background of a shell."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_waits_for_the_whole_run(device: Device) -> None:
    """What comes after the work is queued."""

    class Interrupted(Square):
        def perform(self, args: Mapping[str, Memory], stream: Stream) -> None:
            signal.raise_signal(signal.SIGINT)
            super().perform(args, stream)

    plan = Plan("squares")
    with device.arena(dict.fromkeys("xyz", 4 * COUNT), "work") as of:
        of["x"].upload(np.full(COUNT, 3, np.float32))
        plan.launch(Interrupted(), "square", x=of["x"], y=of["y"])
        plan.launch(ADD, "sum", a=of["y"], b=of["x"], y=of["z"])
        with device.create_stream() as stream, completed(recording(plan, device)) as graph:
            with pytest.raises(KeyboardInterrupt):
                graph.launch(stream)
            stream.synchronize()
            found: Any = of["z"].download(np.float32)
            np.testing.assert_array_equal(found, np.full(COUNT, 12))


def test_graphs_of_a_recording_that_fails_are_freed(device: Device) -> None:
    if not device.is_emulated:
        pytest.skip("faults are injected into the emulator")
    plan = Plan("squares")
    with device.arena(dict.fromkeys("xyz", 4 * COUNT), "work") as of:
        plan.launch(ADD, "twice", a=of["x"], b=of["x"], y=of["y"])
        plan.launch(Square(), "square", x=of["y"], y=of["z"])
        plan.launch(ADD, "sum", a=of["z"], b=of["x"], y=of["y"])
        bound = bind(plan, device)
        before = device.api.live()
        device.api.inject("cuGraphInstantiate", nth=2)
        with pytest.raises(Exception, match="cuGraphInstantiate"):
            completed(recording(bound, device))
        gc.collect()
        assert device.api.live() == before
