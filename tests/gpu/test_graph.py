"""Graphs where order is at stake: kernels slow enough that a missing wait would show."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from urdir.driver.device import Device
from urdir.driver.execute import record, run
from urdir.driver.memory import Arena
from urdir.driver.plan import Plan
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.kernels.normalise import Normalise
from urdir.ptxgen.ptx.architecture import number_of
from urdir.ptxgen.spec import Access, LaunchShape, Param, Tolerance

N = 4096
COUNT = np.arange(N, dtype=np.int32)

TEXT = """
.version VERSION
.target TARGET
.address_size 64
.visible .entry slow_sum(.param .u64 x, .param .u64 z, .param .u64 y, .param .s32 amount)
.maxntid 128, 1, 1
{
    .reg .b32 %i, %block, %value, %other, %amount;
    .reg .b64 %x, %y, %z, %offset;
    ld.param.u64 %x, [x];
    ld.param.u64 %y, [y];
    ld.param.u64 %z, [z];
    ld.param.s32 %amount, [amount];
EARLY
    mov.u32 %i, %tid.x;
    mov.u32 %block, %ctaid.x;
    mad.lo.u32 %i, %block, 128, %i;
    mul.wide.u32 %offset, %i, 4;
    add.u64 %x, %x, %offset;
    add.u64 %y, %y, %offset;
    add.u64 %z, %z, %offset;
    ld.global.b32 %value, [%x];
    ld.global.b32 %other, [%z];
    add.s32 %value, %value, %other;
    add.s32 %value, %value, %amount;
    nanosleep.u32 20000;
    st.global.b32 [%y], %value;
    ret;
}
"""


@dataclass(frozen=True)
class SlowSum:
    """y = x + z + amount, writing late; lets its dependents start at once."""

    waits_for_dependencies: bool = True

    name = "slow_sum"
    params = (
        Param("x", "s32", (N,), Access.IN),
        Param("z", "s32", (N,), Access.IN),
        Param("y", "s32", (N,), Access.OUT),
        Param("amount", "s32"),
    )
    tolerance = Tolerance()
    launch_shape = LaunchShape((N // 128, 1, 1), (128, 1, 1))

    def key(self, target: str) -> str:
        return f"{self}-{target}"

    def ptx(self, target: str) -> str:
        sm = number_of(target)
        early = "    griddepcontrol.launch_dependents;\n    griddepcontrol.wait;"
        text = TEXT.replace("EARLY", early if self.waits_for_dependencies and sm >= 90 else "")
        return text.replace("VERSION", "8.0" if sm <= 90 else "8.8").replace("TARGET", target)

    def shape_of(self, param: Param) -> tuple[int, ...]:
        return (N,)

    def nbytes(self, param: Param) -> int:
        return 4 * N

    def reference(self, **inputs: Any) -> dict[str, Any]:
        return {"y": inputs["x"] + inputs["z"] + np.int32(inputs["amount"])}

    def bytes_moved(self) -> int:
        return 12 * N

    def flops(self) -> int:
        return 2 * N


@pytest.fixture
def memory(gpu_device: Device) -> Iterator[Arena]:
    names = ["zero", "start", "end", *(f"v{i}" for i in range(16))]
    with gpu_device.arena(dict.fromkeys(names, 4 * N), "work") as arena:
        arena["zero"].fill(0)
        arena["start"].upload(COUNT)
        yield arena


def add(plan: Plan, memory: Arena, x: str, z: str, y: str, amount: int, waits: bool = True) -> None:
    kernel = SlowSum(waits)
    label = f"{len(plan)} {x}+{z}->{y}"
    plan.launch(kernel, label, x=memory[x], z=memory[z], y=memory[y], amount=amount)


@pytest.mark.parametrize("programmatic", [True, False])
def test_a_long_chain_keeps_its_order(
    gpu_device: Device, memory: Arena, programmatic: bool
) -> None:
    plan = Plan("chain")
    add(plan, memory, "start", "zero", "v0", 0)
    for i in range(120):
        # Every fifth kernel does not wait: its edges are plain, the following ones are not.
        add(plan, memory, f"v{i % 2}", "zero", f"v{(i + 1) % 2}", i, waits=i % 5 != 0)
    with (
        record(plan, gpu_device, programmatic=programmatic) as graph,
        gpu_device.create_stream() as stream,
    ):
        hopper = gpu_device.properties.compute_capability >= (9, 0)
        assert any(edge.programmatic for edge in graph.edges) == (programmatic and hopper)
        for _ in range(5):
            memory["v0"].fill(0)
            graph.launch(stream)
            graph.launch(stream)
            stream.synchronize()
            assert np.array_equal(memory["v0"].download(np.int32), COUNT + sum(range(120)))


def test_branches_that_run_at_once_are_joined(gpu_device: Device, memory: Arena) -> None:
    plan = Plan("branches")
    plan.copy(memory["v0"], memory["start"], "copy")
    for i in range(1, 16):
        add(plan, memory, "v0", "zero", f"v{i}", i)
    plan.fill(memory["end"], 0, "clear")
    for i in range(1, 16):
        add(plan, memory, "end", f"v{i}", "end", 0)
    add(plan, memory, "end", "zero", "v0", 1)  # writes what all branches have read
    with record(plan, gpu_device) as graph, gpu_device.create_stream() as stream:
        for _ in range(5):
            graph.launch(stream)
        stream.synchronize()
        expected = COUNT * 15 + sum(range(16)) + 1
        assert np.array_equal(memory["v0"].download(np.int32), expected)


def test_replay_equals_eager_bit_for_bit(gpu_device: Device) -> None:
    rows, cols = 7, 4096
    norm = Normalise(rows, cols, Norm("rms", 1e-5))
    sizes = {"w": 4 * cols, "a": norm.nbytes(norm.param("x")), "b": norm.nbytes(norm.param("x"))}
    rng = np.random.default_rng(1)
    x = rng.standard_normal((rows, cols)).astype(np.float32)
    with gpu_device.arena(sizes, "work") as memory, gpu_device.create_stream() as stream:
        memory["w"].upload(rng.standard_normal(cols).astype(np.float32))
        plan = Plan("norms")
        for i in range(40):
            source, target = ("a", "b") if i % 2 == 0 else ("b", "a")
            plan.launch(norm, f"norm {i}", x=memory[source], weight=memory["w"], y=memory[target])
        memory["a"].upload(x)
        run(plan, gpu_device, stream)
        stream.synchronize()
        eager = memory["a"].download(np.uint32)
        with record(plan, gpu_device) as graph:
            for _ in range(10):
                memory["a"].upload(x)
                graph.launch(stream)
                stream.synchronize()
                assert np.array_equal(memory["a"].download(np.uint32), eager)
