"""A model on two devices, the second of which fails, in a process of its own: what is told of it.

`test_failing_rank.py` runs it: ``failing_rank.py DEVICE MODEL PHASE FAULT``. A GPU's context does
not recover within a process.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cuda.bindings.driver as cuda

from urdir.driver.device import Device
from urdir.driver.errors import DriverError
from urdir.driver.launch import launch, pack
from urdir.driver.stream import Stream
from urdir.model.engine.engine import Engine
from urdir.model.engine.realizar import EagerSteps
from urdir.model.memory import exchange
from urdir.model.memory.weights import Weights

LAST = 1  # the rank that fails
KEPT: list[Any] = []  # what is freed with its device


def main(name: str, model: str, phase: str, fault: str) -> None:
    """Fail in a phase, print what was raised."""
    if phase == "long prompt":  # all sums of prompts in two shots
        exchange.TWO_SHOTS_FROM = {16: 512}
    with telling("opened"):
        if phase == "loading":
            fail_while_loading(fault)
        with (
            Engine.open(model, device=name, gpus=2, context=64, chunk=16) as engine,
            EagerSteps(engine.session) as eager,
        ):
            work_until(phase, engine, eager)
            with telling("worked"):
                fail(engine, fault, phase == "idle")
                eager.feed([*range(2, 42)] if "prompt" in phase else [])
                [eager.step() for _ in range(5)]
            for device in engine.group:
                with telling("used"):
                    device.synchronize()
    print("closed")


def work_until(phase: str, engine: Engine, eager: EagerSteps) -> None:
    """What comes before the phase; all of it runs once, so that graphs are there."""
    eager.feed([*range(2, 42)])
    [eager.step() for _ in range(5)]
    eager.truncate(0)
    if "prompt" not in phase:
        eager.feed([5, 80, 13])
        eager.step()
    engine.group.synchronize()


@contextmanager
def telling(done: str) -> Iterator[None]:
    """Print what is raised within, and after how long; ``done`` where nothing is."""
    start = time.perf_counter()
    try:
        yield
        print(done)
    except DriverError as error:
        print(f"{time.perf_counter() - start:.1f} s: {type(error).__name__}: {error}")


def fail(engine: Engine, fault: str, is_idle: bool) -> None:
    """From now on, or with its next step, the last rank fails."""
    failing, (_, stream) = engine.group[LAST], engine.session.steps._followers[LAST - 1]
    fault_in_a_kernel = faulting_kernel(failing)
    if is_idle:
        fault_in_a_kernel(stream)
        return
    api = failing.api
    really, faults = api.cuGraphLaunch, [fault_in_a_kernel]

    def of_last_rank(graph: Any, handle: Any) -> Any:
        if not is_current(failing):
            return really(graph, handle)
        if fault == "refused":
            return really(cuda.CUgraphExec(0), handle)
        if fault == "absent":
            return (api.CUresult.CUDA_SUCCESS,)
        while faults:
            faults.pop()(stream)
        return really(graph, handle)

    api.cuGraphLaunch = of_last_rank


def fail_while_loading(fault: str) -> None:
    """The last rank fails when its weights are uploaded."""
    really: Callable[..., None] = Weights.upload

    def upload(weights: Weights, *rest: Any) -> None:
        device = weights.device
        if device.name.endswith(str(LAST)):
            if fault == "refused":
                refuse_kernels(device)
            else:
                faulting_kernel(device)(device.create_stream())
        really(weights, *rest)

    Weights.upload = upload  # type: ignore[method-assign]


def refuse_kernels(device: Device) -> None:
    """No kernel is launched on a device."""
    api, really = device.api, device.api.cuLaunchKernelEx

    def refused(config: Any, function: Any, *rest: Any) -> Any:
        return really(config, cuda.CUfunction(0) if is_current(device) else function, *rest)

    api.cuLaunchKernelEx = refused


def is_current(device: Device) -> bool:
    """Whether calls of this thread are about a device."""
    return int(device.api.cuCtxGetCurrent()[1]) == int(device.context.handle)


def faulting_kernel(device: Device) -> Callable[[Stream], None]:
    """What queues a kernel that writes where nothing is allocated."""
    path = Path(__file__).parents[2] / "driver" / "conftest.py"
    spec = importlib.util.spec_from_file_location("kernels", path)
    assert spec is not None
    assert spec.loader is not None
    kernels = sys.modules["kernels"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernels)
    kernel = kernels.TextKernel()
    x, y = (device.allocate(4 * kernels.N, name) for name in "xy")
    x.fill(0)
    args = pack(kernel, {"x": x, "n": kernels.N, "y": y, "scale": 1.0})
    args._storage[16:24] = (0x10).to_bytes(8, "little")  # y: no allocation there
    loaded = device.load(kernel)

    def queue(stream: Stream) -> None:
        KEPT.extend((x, y, stream))
        launch(loaded, args, stream)

    return queue


if __name__ == "__main__":
    main(*sys.argv[1:])
