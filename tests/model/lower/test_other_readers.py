"""Tensors that a launch would not make, or would overwrite, while another operation reads them:
their operations are launched apart, and all results are those of numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.model.lower.workbench import Floats, Workbench
from urdir.driver.device import Device
from urdir.driver.operation import Launch
from urdir.driver.plan import Plan
from urdir.model.engine.realizar import describe
from urdir.model.engine.realizar.from_sizes import MadeFile
from urdir.model.engine.session import Session
from urdir.model.errors import ModelError
from urdir.model.graph.op import Op
from urdir.model.graph.ops import Activate, Add, Columns, Gate, Hide, Product, Rope, Scale, ScaleBy
from urdir.model.graph.ops import Norm as Normed
from urdir.model.graph.tensor import Tensor
from urdir.model.layers.attention import attention
from urdir.model.layers.builder import LayerOps, StepOps
from urdir.model.lower.rows import Rows
from urdir.model.lower.step import lower
from urdir.model.measure.paper_device import paper_device
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.weights import Weights
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.norm import Norm

HIDDEN, WIDTH = 96, 160
SILU, RMS = Activation("silu"), Norm("rms", 1e-5)


class Bench(Workbench):
    """A graph of which one tensor, ``shared``, has another reader if ``again``: its half."""

    def __init__(self, device: Device, rows: int, exact: bool, again: bool) -> None:
        super().__init__(device, rows, exact, seed=11)
        self.again = again
        self.expected: list[tuple[Tensor, Floats]] = []

    def make(self, kind: type[Op], label: str, cols: int, *given: Any, **more: Any) -> Tensor:
        """A tensor with a register of its own."""
        y = Tensor(f"made {len(self.graph)}", self.rows, cols)
        return self.add(kind, label, y, *given, **more)

    def product(self, x: Tensor, xs: Floats, rows: int, label: str) -> tuple[Tensor, Floats]:
        linear, weights, _ = self.linear(rows, x.width)
        return self.make(Product, label, rows, x, linear), xs @ weights.T

    def shared(self, of: Tensor, values: Floats) -> None:
        """The tensor that the other operation reads, once the graph is made."""
        self.other = of, values

    def result(self, kind: type[Op], cols: int, values: Floats, *given: Any, **more: Any) -> None:
        """The last operation of the graph, and the other reader."""
        self.expected.append((self.add(kind, "last", self.out(cols), *given, **more), values))
        if self.again:
            of, half = self.other
            y = self.add(Scale, "half", self.out(of.width, "half"), of, 0.5)
            self.expected.append((y, 0.5 * half))


def gated_pair(bench: Bench) -> None:
    x, xs = bench.input(HIDDEN)
    gate, g = bench.product(x, xs, WIDTH, "pair")
    up, u = bench.product(x, xs, WIDTH, "pair")
    bench.shared(gate, g)
    bench.result(Gate, WIDTH, SILU.gated(g, u), gate, up, SILU)


def activated(bench: Bench) -> None:
    x, xs = bench.input(HIDDEN)
    y, ys = bench.product(x, xs, WIDTH, "up")
    bench.shared(y, ys)
    bench.result(Activate, WIDTH, SILU(ys), y, SILU)


def packed(bench: Bench) -> None:
    """The result of a gated pair, which many rows leave packed for the product that follows."""
    x, xs = bench.input(HIDDEN)
    gate, g = bench.product(x, xs, 256, "pair")
    up, u = bench.product(x, xs, 256, "pair")
    middle, values = bench.make(Gate, "pair", 256, gate, up, SILU), SILU.gated(g, u)
    down, d, _ = bench.linear(HIDDEN, 256)
    bench.shared(middle, values)
    bench.result(Product, HIDDEN, values @ d.T, middle, down)


def residual(bench: Bench) -> None:
    x, xs = bench.input(HIDDEN)
    h, hs = bench.input(WIDTH, "branch")
    y, ys = bench.product(h, hs, HIDDEN, "down")
    bench.shared(y, ys)
    bench.result(Add, HIDDEN, xs + ys, x, y)


def gain(bench: Bench) -> None:
    """The product times sigmoid of a number a row, as of a shared expert."""
    x, xs = bench.input(HIDDEN)
    number, values = bench.input(1, "number")
    y, ys = bench.product(x, xs, WIDTH, "shared")
    bench.shared(y, ys)
    sigmoid = Activation("sigmoid")
    bench.result(Gate, WIDTH, ys / (1 + np.exp(-values)), number, y, sigmoid)


def gate_before(bench: Bench) -> None:
    x, xs = bench.input(WIDTH)
    gate, gs = bench.input(WIDTH, "gate")
    middle, values = bench.make(Gate, "gate", WIDTH, gate, x, SILU), SILU.gated(gs, xs)
    stream, before = bench.input(HIDDEN, "before")
    y, ys = bench.product(middle, values, HIDDEN, "down")
    bench.shared(middle, values)
    bench.result(Add, HIDDEN, before + ys, stream, y)


def gate_and_sum(bench: Bench) -> None:
    x, xs = bench.input(HIDDEN)
    (a, a_values), (b, b_values) = bench.input(HIDDEN, "a"), bench.input(HIDDEN, "b")
    gated, values = bench.make(Gate, "gate", HIDDEN, a, b, SILU), SILU.gated(a_values, b_values)
    bench.shared(gated, values)
    bench.result(Add, HIDDEN, xs + values, x, gated)


def scale_and_sum(bench: Bench) -> None:
    (x, xs), (h, hs) = bench.input(HIDDEN), bench.input(HIDDEN, "branch")
    scaled = bench.make(Scale, "scale", HIDDEN, h, 0.25)
    bench.shared(scaled, 0.25 * hs)
    bench.result(Add, HIDDEN, xs + 0.25 * hs, x, scaled)


def norm_scale_and_sum(bench: Bench) -> None:
    (x, xs), (h, hs) = bench.input(HIDDEN), bench.input(HIDDEN, "branch")
    norm, weights = bench.norm(RMS, HIDDEN)
    values = 0.25 * RMS(hs, **weights)
    normed = bench.make(Normed, "norm", HIDDEN, h, norm)
    scaled = bench.make(Scale, "norm", HIDDEN, normed, 0.25)
    bench.shared(scaled, values)
    bench.result(Add, HIDDEN, xs + values, x, scaled)


def sum_times_stored_factor(bench: Bench) -> None:
    (x, xs), (h, hs) = bench.input(HIDDEN), bench.input(HIDDEN, "branch")
    norm, weights = bench.norm(RMS, HIDDEN)
    factor, values = bench.vector(1)
    total = xs + RMS(hs, **weights)
    normed = bench.make(Normed, "norm", HIDDEN, h, norm)
    added = bench.make(Add, "sum", HIDDEN, x, normed)
    scaled = bench.make(ScaleBy, "factor", HIDDEN, added, factor)
    bench.shared(added, total)
    bench.result(Gate, HIDDEN, SILU.gated(xs, values * total), x, scaled, SILU)


def scale_in_place(bench: Bench) -> None:
    """A product of one matrix beside others is scaled by a launch of its own."""
    (a, a_values), (b, b_values) = bench.input(HIDDEN, "a"), bench.input(HIDDEN, "b")
    total = bench.make(Add, "sum", HIDDEN, a, b)
    scaled = bench.make(Scale, "scale", HIDDEN, total, 4.0)
    bench.shared(total, a_values + b_values)
    bench.result(Gate, HIDDEN, SILU.gated(a_values, 4 * (a_values + b_values)), a, scaled, SILU)


#: Launches that another reader adds to those of one row, of few and of many; one is its own.
MORE: dict[Callable[[Bench], None], tuple[int, int, int]] = {
    gated_pair: (2, 2, 2),
    activated: (2, 2, 2),
    packed: (1, 1, 2),
    residual: (2, 2, 2),
    gain: (2, 1, 1),
    gate_before: (2, 1, 2),
    gate_and_sum: (2, 2, 2),
    scale_and_sum: (2, 2, 2),
    norm_scale_and_sum: (3, 3, 3),
    sum_times_stored_factor: (1, 1, 1),
    scale_in_place: (1, 1, 1),
}
#: Rows, exact, and the allowed deviation.
MODES = [
    pytest.param(1, True, 1e-5, id="one row, exact"),
    pytest.param(1, False, 1e-3, id="one row"),
    pytest.param(3, False, 1e-3, id="three rows"),
    pytest.param(8, False, 1e-3, id="eight rows"),
    pytest.param(12, False, 4e-3, id="many rows"),
]


@pytest.fixture
def benches(emulator: Device) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def bench(*fields: Any) -> Bench:
        made.append(Bench(emulator, *fields))
        return made[-1]

    yield bench
    for each in made:
        each.close()


@pytest.mark.parametrize(("rows", "exact", "allowed"), MODES)
@pytest.mark.parametrize("graph", MORE)
def test_what_another_operation_reads_is_made(
    benches: Callable[..., Bench],
    graph: Callable[[Bench], None],
    rows: int,
    exact: bool,
    allowed: float,
) -> None:
    launches = []
    for again in (False, True):
        bench = benches(rows, exact, again)
        graph(bench)
        launches.append(len(bench.run()))
        for y, values in bench.expected:
            bench.compare(y, values, 2 * allowed)
    assert launches[1] - launches[0] == MORE[graph][0 if rows == 1 else 1 if rows <= 8 else 2]


def test_what_no_launch_makes_and_another_operation_reads_is_refused(
    benches: Callable[..., Bench],
) -> None:
    bench = benches(1, False, True)
    x, xs = bench.input(HIDDEN)
    y, ys = bench.product(x, xs, WIDTH, "logits")
    bench.shared(y, ys)
    bench.result(Hide, WIDTH, ys, y, 3, 7)
    with pytest.raises(ModelError, match="no rule for last: hide made 0"):
        bench.lower()
    bench = benches(1, False, True)
    wide, values = bench.input(2 * WIDTH)
    part = bench.make(Columns, "columns", WIDTH, wide, 0)
    bench.shared(part, values[:, :WIDTH])
    bench.result(Gate, WIDTH, values[:, :WIDTH], *bench.input(WIDTH, "gate")[:1], part, SILU)
    with pytest.raises(ModelError, match="no rule for columns: columns stream"):
        bench.lower()


@pytest.mark.parametrize("turned", [True, False])
def test_attention_turns_no_queries_that_another_operation_reads(turned: bool) -> None:
    """Turned queries are then made by a launch of their own; those before it, which attention may
    overwrite, are refused."""
    config = describe(layers=2, hidden=256, heads=4, ffn=512, vocab=64, context=512)
    mixer = config.layers[1].attention
    assert mixer is not None
    with (
        paper_device("sm_90a", 132) as device,
        Weights(MadeFile(config, "Q4_0", {}), config, device) as weights,
        Session(device, weights, SessionSettings(512, sequences=4)) as session,
    ):

        def labels(again: bool) -> list[str]:
            step = StepOps(config, 4)
            layer = LayerOps(step, 1)
            attention(layer, mixer, step.graph.input(step.stream()), 1.0)
            (rope, *_) = (op for op in step.graph if isinstance(op, Rope))
            if again:
                of = rope.y if turned else rope.x
                step.graph.add(Scale("half", Tensor("half", 4, of.width), of, 0.5))
            plan = Plan("attention")
            lower(plan, session.parts, Rows.of(session.parts.state, 4, 512), step.graph)
            return [op.label.removeprefix("blk.1.") for op in plan if isinstance(op, Launch)]

        fused = ["attn_qkv", "attention", "attn_output"]
        assert labels(False) == fused
        if turned:
            ropes = ["attention.q_rope", "attention.k_rope"]
            assert labels(True) == [fused[0], *ropes, *fused[1:], "half"]
        else:
            with pytest.raises(ModelError, match=r"no rule for blk\.1\.attention"):
                labels(True)
