"""One plan, many interpreters: they agree, bit for bit or within the kernels' tolerance."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from urdir.driver.device import Device
from urdir.driver.diff import diff, trace
from urdir.driver.errors import DriverError, LaunchError
from urdir.driver.execute import bind, evaluate, profile, record, run
from urdir.driver.memory import Arena
from urdir.driver.plan import Plan
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.kernels.normalise import Normalise
from urdir.ptxgen.spec import Array

ROWS, COLS = 2, 70
NORM = Normalise(rows=ROWS, cols=COLS, norm=Norm("rms", 1e-5))
NBYTES = ROWS * COLS * 4


@dataclass(frozen=True)
class WrongNorm(Normalise):
    """RMSNorm whose reference has another epsilon than its PTX."""

    def reference(self, **inputs: Any) -> dict[str, Array]:
        return Normalise(self.rows, self.cols, Norm("rms", 1e-2)).reference(**inputs)


@pytest.fixture
def memory(device: Device) -> Iterator[Arena]:
    sizes = {"x": NBYTES, "weight": COLS * 4, "a": NBYTES, "b": NBYTES, "out": NBYTES}
    with device.arena(sizes, "work") as arena:
        yield arena


def fill_inputs(memory: Arena, seed: int) -> None:
    rng = np.random.default_rng(seed)
    memory["x"].upload(rng.standard_normal((ROWS, COLS)).astype(np.float32) * 3)
    memory["weight"].upload(rng.standard_normal(COLS).astype(np.float32))
    for name in ("a", "b", "out"):
        memory[name].fill(0xFF)


def outputs(memory: Arena) -> np.ndarray[Any, Any]:
    return np.stack([memory[name].download(np.float32) for name in ("a", "b", "out")])


@pytest.fixture
def plan(memory: Arena) -> Plan:
    """norm -> copy -> norm in place of what was copied -> fill a part -> norm."""
    weight = memory["weight"]
    plan = Plan("norms")
    plan.launch(NORM, "first", x=memory["x"], weight=weight, y=memory["a"])
    plan.copy(memory["b"], memory["a"], "keep")
    plan.launch(NORM, "second", x=memory["b"], weight=weight, y=memory["b"])
    plan.fill(memory["a"].slice(16, 64), 0, "clear")
    plan.launch(NORM, "last", x=memory["a"], weight=weight, y=memory["out"])
    return plan


def rms_norm(x: Any, weight: Any) -> Any:
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(axis=1, keepdims=True) + NORM.norm.eps) * weight


def test_run_computes_what_the_plan_says(device: Device, memory: Arena, plan: Plan) -> None:
    fill_inputs(memory, 1)
    with device.create_stream() as stream:
        run(plan, device, stream)
        stream.synchronize()
    weight = memory["weight"].download(np.float32).astype(np.float64)
    a = rms_norm(memory["x"].download(np.float32, (ROWS, COLS)), weight)
    b = rms_norm(a, weight)
    a.reshape(-1)[4:20] = 0
    out = rms_norm(a, weight)
    expected = np.stack([array.reshape(-1) for array in (a, b, out)])
    assert np.abs(outputs(memory) - expected).max() < 1e-5


@pytest.mark.parametrize("seed", range(3))
def test_replay_equals_eager_bit_for_bit(
    device: Device, memory: Arena, plan: Plan, seed: int
) -> None:
    with device.create_stream() as stream, record(plan, device) as graph:
        assert graph.node_count == len(plan)
        fill_inputs(memory, seed)
        run(plan, device, stream)
        stream.synchronize()
        eager = outputs(memory)
        for _ in range(2):
            fill_inputs(memory, seed)
            graph.launch(stream)
            stream.synchronize()
            assert np.array_equal(outputs(memory).view(np.uint32), eager.view(np.uint32))


def test_evaluate_agrees_within_tolerance(device: Device, memory: Arena, plan: Plan) -> None:
    fill_inputs(memory, 5)
    evaluate(plan)
    expected = outputs(memory)
    fill_inputs(memory, 5)
    with device.create_stream() as stream:
        run(plan, device, stream)
        stream.synchronize()
    actual = outputs(memory)
    assert np.abs(actual - expected).max() <= 3 * NORM.tolerance.rtol * np.abs(expected).max()


@pytest.mark.parametrize("stop_after", ["first", 1, "second", 3, None])
def test_stop_after(
    device: Device, memory: Arena, plan: Plan, stop_after: int | str | None
) -> None:
    fill_inputs(memory, 2)
    with device.create_stream() as stream:
        run(plan, device, stream, stop_after)
        stream.synchronize()
    stopped = outputs(memory)
    fill_inputs(memory, 2)
    evaluate(plan, stop_after)
    expected = outputs(memory)
    assert np.array_equal(np.isnan(stopped), np.isnan(expected))  # the same part was written
    assert np.nanmax(np.abs(stopped - expected)) < 1e-5


def test_a_plan_is_bound_once(device: Device, memory: Arena, plan: Plan) -> None:
    bound = bind(plan, device)
    assert len(bound) == len(plan) == 5
    assert bound.kernels[0] is bound.kernels[4]
    assert bound.kernels[1] is None
    plan.fill(memory["out"], 0, "later")
    assert len(bound) == 5
    fill_inputs(memory, 0)
    with device.create_stream() as stream, record(bound, device) as graph:
        run(bound, device, stream)
        stream.synchronize()
        assert not (memory["out"].download(np.float32) == 0).all()
        assert graph.node_count == 5
    with Device.open("emulator") as other, pytest.raises(LaunchError, match="is bound to"):
        bind(bound, other)


def test_what_does_not_fit_the_device_is_refused_when_bound(device: Device, memory: Arena) -> None:
    @dataclass(frozen=True)
    class Huge(Normalise):
        @property
        def launch_shape(self) -> Any:
            shape = super().launch_shape
            return type(shape)(grid=shape.grid, block=(2048, 1, 1))

    plan = Plan("huge")
    huge = Huge(ROWS, COLS, NORM.norm)
    plan.launch(huge, "huge", x=memory["x"], weight=memory["weight"], y=memory["a"])
    with pytest.raises(LaunchError, match=r"normalise.*2,048"):
        bind(plan, device)


def test_profile_times_every_operation(device: Device, memory: Arena, plan: Plan) -> None:
    fill_inputs(memory, 3)
    with device.create_stream() as stream:
        rows = profile(plan, device, stream, repeats=3)
        with pytest.raises(LaunchError, match="0 repeats"):
            profile(plan, device, stream, repeats=0)
    assert [(r.index, r.label, r.what) for r in rows] == [
        (0, "first", "normalise"),
        (1, "keep", "copy"),
        (2, "second", "normalise"),
        (3, "clear", "fill"),
        (4, "last", "normalise"),
    ]
    assert [r.bytes_moved for r in rows[:2]] == [NORM.bytes_moved(), 2 * NBYTES]
    for row in rows:
        assert row.repeats == 3
        assert row.ms >= 0
        if row.ms:
            assert row.gb_per_s == pytest.approx(row.bytes_moved / (row.ms * 1e-3) / 1e9)


def test_trace_judges_each_launch_alone(device: Device, memory: Arena, plan: Plan) -> None:
    fill_inputs(memory, 4)
    with device.create_stream() as stream:
        rows = list(trace(plan, device, stream))
        traced = outputs(memory)
        assert diff(plan, device, stream) is None
        fill_inputs(memory, 4)
        run(plan, device, stream)
        stream.synchronize()
    assert [(row.index, row.deviation.param) for row in rows] == [(0, "y"), (2, "y"), (4, "y")]
    assert all(0 <= row.deviation.ratio <= 1 for row in rows)
    assert np.array_equal(traced, outputs(memory))


def test_diff_names_the_first_launch_that_is_wrong(
    device: Device, memory: Arena, plan: Plan
) -> None:
    wrong = WrongNorm(ROWS, COLS, NORM.norm)
    plan.launch(wrong, "wrong", x=memory["a"], weight=memory["weight"], y=memory["b"])
    plan.launch(wrong, "wrong too", x=memory["b"], weight=memory["weight"], y=memory["out"])
    fill_inputs(memory, 6)
    with device.create_stream() as stream:
        found = diff(plan, device, stream)
        assert diff(plan, device, stream, stop_after="last") is None
    assert found is not None
    assert (found.index, found.label) == (5, "wrong")
    assert found.deviation.wrong > 0
    assert "operation 5 wrong (normalise): y[" in str(found)


def test_a_reference_must_return_what_the_kernel_writes(memory: Arena) -> None:
    class Silent(Normalise):
        def reference(self, **inputs: Any) -> dict[str, Array]:
            return {}

    plan = Plan("silent")
    silent = Silent(ROWS, COLS, NORM.norm)
    plan.launch(silent, "s", x=memory["x"], weight=memory["weight"], y=memory["a"])
    with pytest.raises(DriverError, match="s: the reference of normalise gives nothing for y"):
        evaluate(plan)
