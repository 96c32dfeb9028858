"""Streamed memory: transfers in plans and graphs, and what finds a slot that is read too early."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.driver.planted import graph_without
from urdir.driver import bindings
from urdir.driver import pinned as pinned_memory
from urdir.driver.device import Device
from urdir.driver.errors import CudaError, LaunchError
from urdir.driver.execute import bind, evaluate, profile, record, run
from urdir.driver.memory import Arena
from urdir.driver.operation import Copy
from urdir.driver.plan import Plan
from urdir.driver.streamed import StreamedSlice, is_transfer
from urdir.ptxgen.kernels.add import Add

COUNT, NBYTES = 96, 384
ADD = Add(n=COUNT)
ARRAYS = 7


class Streams:
    """``ARRAYS`` arrays in host memory that take turns in two slots, and a running sum."""

    def __init__(self, device: Device, owners: ExitStack, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.device = device
        sizes = {"x": NBYTES, "y": NBYTES, "z": NBYTES, "slots": 2 * NBYTES}
        self.memory: Arena = owners.enter_context(device.arena(sizes, "work"))
        self.values = self.rng.standard_normal((ARRAYS, COUNT)).astype(np.float32)
        self.arrays = []
        slots = self.memory["slots"]
        for number, values in enumerate(self.values):
            pinned = owners.enter_context(device.pinned(NBYTES, f"array {number}"))
            pinned.view(np.float32, COUNT)[:] = values
            at = slots.offset + number % 2 * NBYTES
            self.arrays.append(StreamedSlice(slots.buffer, at, NBYTES, f"array {number}", pinned))
        self.memory["x"].upload(np.zeros(COUNT, np.float32))

    def plan(self, order: list[int]) -> Plan:
        """z = the sum of the arrays in this order, one launch each."""
        plan, before = Plan("sum"), self.memory["x"]
        for step, number in enumerate(order):
            after = self.memory["yz"[step % 2] if step < len(order) - 1 else "z"]
            if after is before:
                plan.copy(self.memory["y"], before, "aside")
                before = self.memory["y"]
            plan.launch(ADD, f"add {number}", a=before, b=self.arrays[number], y=after)
            before = after
        return plan

    def expected(self, order: list[int]) -> Any:
        total = np.zeros(COUNT, np.float32)
        for number in order:
            total = total + self.values[number]
        return total

    def result(self) -> Any:
        return self.memory["z"].download(np.float32)


@pytest.fixture
def streams(device: Device) -> Iterator[Streams]:
    with ExitStack() as owners:
        yield Streams(device, owners)


def test_every_interpreter_reads_what_was_copied(streams: Streams) -> None:
    order = [*range(ARRAYS), 3, 3, 0, 1, 2]
    plan = streams.plan(order)
    plan.add_transfers()
    device, expected = streams.device, streams.expected(order)
    with device.create_stream() as stream:
        run(plan, device, stream)
        stream.synchronize()
        np.testing.assert_array_equal(streams.result(), expected)
        streams.memory["slots"].fill(0xFF)
        evaluate(plan)
        np.testing.assert_array_equal(streams.result(), expected)
        assert sum(timing.what == "copy" for timing in profile(plan, device, stream)) >= ARRAYS
        with record(plan, device) as graph:
            for _ in range(4):  # in another order each time
                streams.memory["slots"].fill(0xFF)
                graph.launch(stream)
                stream.synchronize()
                np.testing.assert_array_equal(streams.result(), expected)


@pytest.mark.parametrize("seed", range(4))
def test_random_orders(streams: Streams, seed: int) -> None:
    order = np.random.default_rng(seed).integers(0, ARRAYS, 12).tolist()
    plan = streams.plan(order)
    plan.add_transfers()
    with record(plan, streams.device) as graph, streams.device.create_stream() as stream:
        graph.launch(stream)
        stream.synchronize()
    np.testing.assert_array_equal(streams.result(), streams.expected(order))


def test_copies_run_beside_launches_and_one_after_the_other(streams: Streams) -> None:
    plan = streams.plan([*range(ARRAYS)])
    plan.add_transfers()
    before: dict[int, set[int]] = {}
    with record(plan, streams.device) as graph:
        for number in range(len(plan)):
            direct = {edge.before for edge in graph.edges if edge.after == number}
            before[number] = direct.union(*(before[other] for other in direct))
    copies = [number for number, operation in enumerate(plan) if is_transfer(operation)]
    assert len(copies) == ARRAYS
    assert all(one in before[other] for one, other in pairwise(copies))
    beside = [
        (copy, number)
        for copy in copies
        for number in set(range(len(plan))).difference(copies)
        if number not in before[copy] and copy not in before[number]
    ]
    assert (
        len(beside) >= ARRAYS - 2
    )  # each but the first two is copied while the other slot is read


@pytest.mark.parametrize(
    "left_out",
    [("transfer array 0", "add 0"), ("add 0", "transfer array 2")],
    ids=["early read", "early overwrite"],
)
def test_the_emulator_finds_a_planted(streams: Streams, left_out: tuple[str, str]) -> None:
    if not streams.device.is_emulated:
        pytest.skip("races are found by the emulator")
    streams.memory["slots"].fill(0)
    plan = streams.plan([0, 1, 2])
    plan.add_transfers()
    labels = [operation.label for operation in plan]
    before, after = map(labels.index, left_out)
    graph = graph_without(plan, streams.device, (before, after))
    with pytest.raises(LaunchError, match="no path leads"):
        graph.instantiate()
    with graph.instantiate(needed=()) as recorded, streams.device.create_stream() as stream:
        recorded.launch(stream)
        with pytest.raises(CudaError, match="not ordered by edges"):
            stream.synchronize()


def test_a_plan_without_its_transfers_is_refused(streams: Streams) -> None:
    plan = streams.plan([0, 1])
    with pytest.raises(LaunchError, match=r"add 0: 'array 0' is not in its slot"):
        bind(plan, streams.device)
    plan.add_transfers()
    late = Plan("late", [*plan, *streams.plan([2]), *plan[-1:]])
    with pytest.raises(LaunchError, match=r"add 2: 'array 2' is not in its slot"):
        bind(late, streams.device)
    taken = Plan(
        "taken",
        [plan[0], Copy(streams.arrays[2], streams.arrays[2].source, "other"), *streams.plan([0])],
    )
    with pytest.raises(LaunchError, match=r"add 0: 'array 0' is not in its slot"):
        bind(taken, streams.device)


def test_a_launch_cannot_read_two_arrays_of_a_slot(streams: Streams) -> None:
    plan = Plan("both")
    first, other = streams.arrays[0], streams.arrays[2]
    plan.launch(ADD, "both", a=first, b=other, y=streams.memory["y"])
    with pytest.raises(LaunchError, match="take turns in one slot"):
        plan.add_transfers()


def test_a_launch_may_fill_a_slot(streams: Streams) -> None:
    """It is not copied then, until others were there; these come after the last reader."""
    plan, memory, arrays = Plan("filled"), streams.memory, streams.arrays
    plan.launch(ADD, "fill", a=memory["x"], b=arrays[1], y=arrays[0])
    plan.launch(ADD, "read 0", a=memory["x"], b=arrays[0], y=memory["y"])
    plan.launch(ADD, "read 2", a=memory["y"], b=arrays[2], y=memory["z"])
    plan.launch(ADD, "again", a=memory["z"], b=arrays[0], y=memory["y"])
    plan.add_transfers()
    assert [operation.label for operation in plan] == [
        *("transfer array 1", "fill", "read 0", "transfer array 2", "read 2"),
        *("transfer array 0", "again"),
    ]
    with record(plan, streams.device) as graph, streams.device.create_stream() as stream:
        graph.launch(stream)
        stream.synchronize()
    np.testing.assert_array_equal(streams.result(), streams.values[1] + streams.values[2])


def test_parts_of_a_slot_come_with_it(streams: Streams) -> None:
    half = Add(n=COUNT // 2)
    part = streams.arrays[1].slice(NBYTES // 2, NBYTES // 2)
    plan = Plan("half")
    memory = streams.memory
    plan.launch(half, "half", a=memory["x"], b=part, y=memory["z"].slice(0, NBYTES // 2))
    plan.add_transfers()
    assert [operation.label for operation in plan] == ["transfer array 1", "half"]
    with streams.device.create_stream() as stream:
        run(plan, streams.device, stream)
        stream.synchronize()
    np.testing.assert_array_equal(streams.result()[: COUNT // 2], streams.values[1, COUNT // 2 :])


@pytest.mark.parametrize("nbytes", [NBYTES, (32 << 20) + 4096 + 16])
def test_much_pinned_memory_is_mapped_by_the_process(
    device: Device, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        pinned_memory, "MAPPED_NBYTES", 1 if nbytes == NBYTES else pinned_memory.MAPPED_NBYTES
    )
    values = np.random.default_rng(0).standard_normal(nbytes // 4).astype(np.float32)
    pinned = device.pinned(nbytes, "mapped")
    pinned.view(np.float32, len(values))[:] = values
    add = Add(n=COUNT)
    with device.allocate(nbytes, "target") as target, device.create_stream() as stream:
        target.upload_async(pinned, nbytes, 0, stream)
        stream.synchronize()
        np.testing.assert_array_equal(target.download(np.float32), values)
        plan = Plan("read in place")
        plan.launch(add, "add", a=pinned, b=pinned, y=target)
        run(plan, device, stream)
        stream.synchronize()
        found = target.download(np.float32, COUNT)
        np.testing.assert_array_equal(found, 2 * values[:COUNT])
        target.fill(0)
        target.download_async(pinned, nbytes, 0, stream)
        stream.synchronize()
        assert not pinned.array.any()
    pinned.close()
    pinned.close()
    assert pinned.closed


def test_memory_that_cannot_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_memory, "MAPPED_NBYTES", 1)
    api = bindings.emulated()
    with Device.open("emulator", api=api) as device:
        api.inject("cuMemHostRegister")
        with pytest.raises(CudaError, match="cuMemHostRegister 4096 bytes for 'much'"):
            device.pinned(4096, "much")
        device.pinned(4096, "much").close()
    assert api.live() == {}
