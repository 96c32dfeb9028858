"""Foreign machine code as a kernel: harness, plan and graph, and declarations that are wrong."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from urdir.driver import execute
from urdir.driver.cubin import CubinKernel
from urdir.driver.device import Device
from urdir.driver.errors import CudaError, DriverError, LaunchError, MismatchError, PtxLoadError
from urdir.driver.harness import check_kernel, run_kernel
from urdir.driver.plan import Plan
from urdir.ptxgen.kernels.add import Add
from urdir.ptxgen.spec import Access, LaunchShape, Param
from urdir.ptxgen.tools import assemble

N = 1000
SPEC = Add(n=N)


def declared(cubin: bytes, **fields: Any) -> CubinKernel:
    """The code of `SPEC`, declared by hand."""
    names = (("a", Access.IN), ("b", Access.IN), ("y", Access.OUT))
    kernel = CubinKernel(
        cubin,
        "add",
        tuple(Param(name, "f32", (N,), access) for name, access in names),
        LaunchShape((2, 1, 1), (128, 1, 1)),
        reference_of=lambda a, b: {"y": a + b},
        inputs_of=lambda rng: {n: rng.standard_normal(N).astype(np.float32) for n in "ab"},
    )
    return dataclasses.replace(kernel, **fields)


@pytest.fixture
def cubin(urdir_emulator: Device) -> bytes:
    """What the emulator has for machine code."""
    return urdir_emulator.compile(SPEC.ptx(urdir_emulator.native_target), "add")


def check_everywhere(device: Device, kernel: CubinKernel) -> None:
    """Harness, plan and replayed graph, with a dependency between two launches."""
    assert check_kernel(device, kernel)[0].param == "y"
    x = np.random.default_rng(1).standard_normal(N).astype(np.float32)
    sizes = dict.fromkeys(("x", "twice", "y"), 4 * N)
    with device.arena(sizes, "work") as memory, device.create_stream() as stream:
        memory["x"].upload(x)
        plan = Plan("foreign")
        plan.launch(kernel, "double", a=memory["x"], b=memory["x"], y=memory["twice"])
        plan.launch(kernel, "residual", a=memory["twice"], b=memory["x"], y=memory["y"])
        assert [(edge.before, edge.after) for edge in plan.edges()] == [(0, 1)]
        execute.run(plan, device, stream)
        eager = memory["y"].download(np.float32)
        memory["y"].fill(0)
        with execute.record(plan, device) as graph:
            graph.launch(stream)
            stream.synchronize()
        np.testing.assert_array_equal(eager, x + x + x)
        np.testing.assert_array_equal(memory["y"].download(np.float32), eager)


def test_the_emulator_runs_it(urdir_emulator: Device, cubin: bytes) -> None:
    check_everywhere(urdir_emulator, declared(cubin))


@pytest.mark.urdir_gpu
def test_a_gpu_runs_it(urdir_gpu: Device) -> None:
    if not assemble.is_available():
        pytest.skip("nvJitLink is not installed")
    target = urdir_gpu.native_target
    check_everywhere(urdir_gpu, declared(assemble.assemble(SPEC.ptx(target), target).cubin))


def test_declarations_that_are_wrong(urdir_emulator: Device, cubin: bytes) -> None:
    right = declared(cubin)
    fewer = dataclasses.replace(right, params=right.params[:2])
    with pytest.raises(PtxLoadError, match="disagree about the parameters"):
        urdir_emulator.load(fewer)
    with pytest.raises(PtxLoadError, match="has no entry of that name"):
        urdir_emulator.load(dataclasses.replace(right, name="other"))
    wide = LaunchShape((2, 1, 1), (256, 1, 1))
    with pytest.raises(LaunchError, match="threads of a block"):
        urdir_emulator.load(dataclasses.replace(right, launch_shape=wide))
    with pytest.raises(CudaError, match="cuModuleLoadData of kernel add"):
        urdir_emulator.load(declared(b"\x7fELF" + bytes(64)))
    check_kernel(urdir_emulator, right)  # nothing of these was kept


def test_what_the_harness_needs(urdir_emulator: Device, cubin: bytes) -> None:
    bare = declared(cubin, reference_of=None, inputs_of=None)
    with pytest.raises(DriverError, match="give inputs_of"):
        check_kernel(urdir_emulator, bare)
    a = np.ones(N, np.float32)
    np.testing.assert_array_equal(run_kernel(urdir_emulator, bare, {"a": a, "b": a})["y"], 2 * a)
    wrong = declared(cubin, reference_of=lambda a, b: {"y": a - b})
    with pytest.raises(MismatchError):
        check_kernel(urdir_emulator, wrong)
