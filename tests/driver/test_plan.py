"""Plans as data: what is refused, what is printed, which edges follow. No device is needed."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from urdir.driver.dependencies import Hazard
from urdir.driver.errors import LaunchError, LifetimeError
from urdir.driver.memory import Region
from urdir.driver.plan import Plan
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.kernels.normalise import Normalise
from urdir.ptxgen.spec import Access, KernelSpec, LaunchShape, Param

NORM = Normalise(rows=3, cols=64, norm=Norm("rms", 1e-6))
ROWS = 3 * 64 * 4


class FakeBuffer(Region):
    """A buffer of no device: an address and a size."""

    kind = "buffer"

    def __init__(self, address: int, nbytes: int, name: str) -> None:
        self.start, self.nbytes, self.offset, self.name = address, nbytes, 0, name
        self.closed = False

    @property
    def handle(self) -> int:
        if self.closed:
            raise LifetimeError(f"buffer {self.name!r} was used after it was closed")
        return self.start

    @property
    def buffer(self) -> Any:
        return self


class Scale(KernelSpec):
    """Two outputs and a scalar: y = a * x, z = x."""

    name = "scale"
    template = ("none", "none")
    params = (
        Param("x", "f32", (16,), Access.IN),
        Param("y", "f32", (16,), Access.OUT),
        Param("z", "f32", (16,), Access.OUT),
        Param("a", "f32"),
    )
    launch_shape = LaunchShape(grid=(1, 2, 1), block=(16, 1, 1))


@pytest.fixture
def memory() -> SimpleNamespace:
    return SimpleNamespace(
        x=FakeBuffer(0x1000, ROWS, "x"),
        weight=FakeBuffer(0x2000, 256, "weight"),
        work=FakeBuffer(0x10000, 4096, "work"),
    )


def test_a_plan_is_a_list_of_operations(memory: SimpleNamespace) -> None:
    plan = Plan("decode")
    y = memory.work.slice(256, ROWS, "y")
    plan.fill(memory.work, 0, "clear")
    plan.launch(NORM, "blk.0.attn_norm", y=y, x=memory.x, weight=memory.weight)
    plan.copy(memory.x, y, "back")
    assert len(plan) == 3
    assert [op.what for op in plan] == ["fill", "normalise", "copy"]
    assert plan[1].label == "blk.0.attn_norm"
    assert [op.label for op in plan[1:]] == ["blk.0.attn_norm", "back"]
    assert plan.kernels() == (NORM,)
    assert plan.allocations() == (memory.work, memory.x, memory.weight)
    assert [(e.before, e.after, e.hazard) for e in plan.edges()] == [
        (0, 1, Hazard.WRITE_AFTER_WRITE),
        (1, 2, Hazard.READ_AFTER_WRITE),
    ]


def test_printing_shows_every_argument_with_its_bytes(memory: SimpleNamespace) -> None:
    plan = Plan("decode")
    plan.launch(NORM, "norm", x=memory.x, weight=memory.weight, y=memory.work.slice(256, ROWS, "y"))
    plan.launch(
        Scale(),
        "scaled",
        x=memory.x,
        y=memory.work.slice(64, 64, "a"),
        z=memory.work.slice(0, 64, "b"),
        a=0.5,
    )
    plan.fill(memory.x, 7, "clear")
    assert str(plan).splitlines() == [
        "plan decode: 2 launches, 1 fill",
        "   0  norm    normalise  (3) x (32)     in x=x[0:768]  in weight=weight[0:256]"
        "  out y=work.y[256:1024]",
        "   1  scaled  scale      (1, 2) x (16)  in x=x[0:64]  out y=work.a[64:128]"
        "  out z=work.b[0:64]  a=0.5",
        "   2  clear   fill                      out dst=x[0:768]  byte=7",
    ]
    table = json.loads(json.dumps(plan.table()))
    assert table[0]["bytes_moved"] == NORM.bytes_moved()
    assert table[1]["grid"] == [1, 2, 1]
    assert table[1]["args"][3] == ["a", "", 0.5]
    assert str(Plan("nothing")) == "plan nothing: empty"


def test_stop_after_by_index_and_by_label(memory: SimpleNamespace) -> None:
    plan = Plan("p")
    for label in ("a", "b", "b", "c"):
        plan.fill(memory.x, 0, label)
    assert plan.position(None) == 4
    assert plan.position(0) == 1
    assert plan.position("b") == 3
    for unknown in (4, -1, "d"):
        with pytest.raises(LaunchError, match=f"no operation {unknown!r}"):
            plan.position(unknown)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": None}, "blk.3.norm: kernel normalise, argument 'y': .* not null"),
        ({"y": 12.5}, "argument 'y': a buffer or slice is needed, not float"),
        ({"weight": FakeBuffer(0x9000, 252, "short")}, "needs 256 bytes, 'short' has 252"),
        ({"eps": 1.0}, "unexpected eps"),
    ],
)
def test_wrong_arguments_are_refused(
    memory: SimpleNamespace, change: dict[str, Any], message: str
) -> None:
    args = {"x": memory.x, "weight": memory.weight, "y": memory.work} | change
    plan = Plan("p")
    with pytest.raises(LaunchError, match=message):
        plan.launch(NORM, "blk.3.norm", **args)
    assert len(plan) == 0


def test_what_is_no_kernel_is_refused(memory: SimpleNamespace) -> None:
    plan = Plan("mistakes")
    with pytest.raises(LaunchError, match=r"Scale is a class of kernels: launch one of them"):
        plan.launch(Scale, "scale", x=memory.x)  # type: ignore[arg-type]
    with pytest.raises(LaunchError, match=r"3 is not a kernel"):
        plan.launch(3, "three", x=memory.x)  # type: ignore[arg-type]


def test_a_missing_argument_is_refused(memory: SimpleNamespace) -> None:
    with pytest.raises(LaunchError, match=r"norm: kernel normalise .* missing weight, y"):
        Plan("p").launch(NORM, "norm", x=memory.x)


def test_a_buffer_in_place_of_a_scalar_is_refused(memory: SimpleNamespace) -> None:
    y, z = memory.work.slice(0, 64), memory.work.slice(64, 64)
    with pytest.raises(LaunchError, match="s: kernel scale, argument 'a'"):
        Plan("p").launch(Scale(), "s", x=memory.x, y=y, z=z, a=memory.x)


def test_outputs_that_share_memory_are_refused(memory: SimpleNamespace) -> None:
    y, z = memory.work.slice(0, 64), memory.work.slice(48, 64)
    with pytest.raises(LaunchError, match="writes 'y' and 'z', which share memory"):
        Plan("p").launch(Scale(), "s", x=memory.x, y=y, z=z, a=1)


def test_closed_buffers_are_refused(memory: SimpleNamespace) -> None:
    memory.weight.closed = True
    plan = Plan("p")
    with pytest.raises((LaunchError, LifetimeError), match=r"norm: .*weight.*closed"):
        plan.launch(NORM, "norm", x=memory.x, weight=memory.weight, y=memory.work)
    with pytest.raises(LifetimeError, match="weight"):
        plan.fill(memory.weight, 0, "clear")
    with pytest.raises(LifetimeError, match="weight"):
        plan.copy(memory.x, memory.weight, "copy")


def test_copies_and_fills_are_checked(memory: SimpleNamespace) -> None:
    plan = Plan("p")
    with pytest.raises(LaunchError, match=r"c: 'work' has 4,096 bytes, too many"):
        plan.copy(memory.x, memory.work, "c")
    with pytest.raises(LaunchError, match="overlaps"):
        plan.copy(memory.work.slice(0, 64), memory.work.slice(32, 64), "c")
    with pytest.raises(LaunchError, match="f: 'x' cannot be filled with 256"):
        plan.fill(memory.x, 256, "f")


def test_a_reused_slice_is_seen_whatever_it_is_called(memory: SimpleNamespace) -> None:
    first = memory.work.slice(0, ROWS, "first")
    second = memory.work.slice(ROWS - 256, ROWS, "second")  # its start is first's end
    plan = Plan("p")
    plan.launch(NORM, "a", x=memory.x, weight=memory.weight, y=first)
    plan.copy(memory.work.slice(2048, ROWS, "kept"), first, "b")
    plan.launch(NORM, "c", x=memory.x, weight=memory.weight, y=second)
    assert [(e.before, e.after, e.hazard) for e in plan.edges()] == [
        (0, 1, Hazard.READ_AFTER_WRITE),
        (1, 2, Hazard.WRITE_AFTER_READ),
    ]
