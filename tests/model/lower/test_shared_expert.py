"""A gated shared expert beside the experts that a row chooses, against numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.model.lower.test_experts import router_of
from tests.model.lower.workbench import Workbench
from urdir.driver import execute
from urdir.driver.device import Device
from urdir.model.graph.experts import Experts, Route
from urdir.model.graph.ops import Add, Gate, Product
from urdir.model.graph.ops import Norm as Normed
from urdir.model.graph.tensor import Tensor
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.experts.selection import Selection
from urdir.ptxgen.kernels.norm import Norm

Floats = npt.NDArray[np.float64]

HIDDEN, WIDTH = 544, 64
RMS = Norm("rms", 1e-5)
SILU, GELU, SIGMOID = (Activation(kind) for kind in ("silu", "gelu", "sigmoid"))
TOGETHER = ["route_experts", "experts_up", "experts_down"]


@dataclass(frozen=True)
class Case:
    """A mixture, and what its shared expert is."""

    selection: Selection
    bias: bool = False
    scale: float = 1.0
    width: int = WIDTH
    activation: Activation = SILU
    weights: str = "Q8_0"
    gate_weights: str = "F32"
    gate_bias: bool = False
    gated_by: Activation = SIGMOID
    is_read: bool = False
    rows: int = 1


CASES = {
    "few experts": Case(Selection(24, 3)),
    "bias, scaled": Case(Selection(40, 4, "softmax_selected", scale=1.5), bias=True, scale=0.5),
    "many experts": Case(Selection(260, 6, normalised=True)),
    "all of them": Case(Selection(3, 3)),
}
#: Shared experts with launches of their own.
OTHERS = {
    "several rows": Case(Selection(24, 3), rows=2),
    "a sigmoid of logits": Case(Selection(24, 3, "sigmoid")),
    "another width": Case(Selection(24, 3), width=32),
    "another type": Case(Selection(24, 3), weights="Q5_0"),
    "another activation": Case(Selection(24, 3), activation=GELU),
    "another gate": Case(Selection(24, 3), gated_by=SILU),
    "a quantised gate": Case(Selection(24, 3), gate_weights="F16"),
    "a gate's bias": Case(Selection(24, 3), gate_bias=True),
    "its result is read": Case(Selection(24, 3), is_read=True),
    "32 experts beside it": Case(Selection(40, 32)),
}


class SharedBench(Workbench):
    """A mixture with a shared expert."""

    def __init__(self, device: Device, case: Case, exact: bool = False) -> None:
        kept = {"expert": 4 * case.rows * 32, "router logits": 4 * case.rows * 512}
        zeroed = {"experts arrived": 4 * case.rows}
        super().__init__(device, case.rows, exact, 7, kept, zeroed, 1 << 21)
        self.case = case

    def experts(self, rows: int, cols: int) -> tuple[Any, Floats]:
        """Random matrices (experts, rows, cols), and their numbers."""
        count = self.case.selection.experts
        matrix, weights, _ = self.linear(count * rows, cols)
        return matrix, weights.reshape(count, rows, cols)

    def layer(self, stream: tuple[Tensor, Floats], y: Tensor, label: str = "ffn") -> Floats:
        """Append the mixture of the stream's norm, which is added to it; what y should be."""
        case, rows = self.case, self.rows
        before, of = stream[1], case.selection
        norm, norm_weights = self.norm(RMS, HIDDEN)
        normed = self.add(Normed, "norm", Tensor("normed", rows, HIDDEN), stream[0], norm)
        matrix, router, bias = self.linear(of.experts, HIDDEN, case.bias, "F32")
        how = router_of(matrix, of, norm_scale=case.scale)
        routing = Tensor("routing", rows, of.experts)
        self.add(Route, f"{label}.router", routing, normed, how)
        x = RMS(before, **norm_weights)
        shared, added = self._shared(normed, x, label)
        attended = self.add(Add, f"{label}.add", Tensor("attended", rows, HIDDEN), stream[0], added)

        gate, g = self.experts(WIDTH, HIDDEN)
        up, u = self.experts(WIDTH, HIDDEN)
        down, d = self.experts(HIDDEN, WIDTH)
        mixed = Tensor("mixed", rows, HIDDEN)
        self.add(Experts, label, mixed, normed, routing, of, up, down, gate, SILU, False)
        total = self.add(Add, f"{label}.sum", y, attended, mixed)
        if case.is_read:
            self.add(Add, f"{label}.again", self.out(HIDDEN, "again"), total, added)
        expert, weight = of(case.scale * x @ router.T + bias)
        middle = SILU.gated(
            np.einsum("bsoi,bi->bso", g[expert], x), np.einsum("bsoi,bi->bso", u[expert], x)
        )
        return before + shared + np.einsum("bsoi,bsi,bs->bo", d[expert], middle, weight)

    def _shared(self, normed: Tensor, x: Floats, label: str) -> tuple[Floats, Tensor]:
        case, rows = self.case, self.rows
        gate, g, g_bias = self.linear(1, HIDDEN, case.gate_bias, case.gate_weights)
        (first, w), (second, u) = (self.linear(case.width, HIDDEN, False, case.weights)[:2]
                                   for _ in range(2))  # fmt: skip
        down, d, _ = self.linear(HIDDEN, case.width, False, case.weights)
        own = Tensor("shared gate", rows, 1)
        self.add(Product, f"{label}.gate", own, normed, gate)
        inner = [Tensor(name, rows, case.width) for name in ("gate", "up", "activated")]
        self.add(Product, f"{label}.gate_up", inner[0], normed, first)
        self.add(Product, f"{label}.gate_up", inner[1], normed, second)
        self.add(Gate, f"{label}.act", inner[2], inner[0], inner[1], case.activation)
        made = self.add(Product, f"{label}.down", Tensor("made", rows, HIDDEN), inner[2], down)
        gated = Tensor("gated", rows, HIDDEN)
        self.add(Gate, f"{label}.gated", gated, own, made, case.gated_by)
        share = x @ g.T + g_bias
        return case.gated_by.gated(share, case.activation.gated(x @ w.T, x @ u.T) @ d.T), gated


@pytest.mark.parametrize(("exact", "allowed"), [(True, 1e-5), (False, 2e-3)])
@pytest.mark.parametrize("case", CASES)
def test_it_is_one_more_slot(emulator: Device, case: str, exact: bool, allowed: float) -> None:
    """Without a launch of its own."""
    made = SharedBench(emulator, CASES[case], exact)
    y = made.out(HIDDEN)
    expected = made.layer(made.input(HIDDEN), y)
    assert made.run() == TOGETHER
    made.compare(y, expected, allowed)
    made.close()


@pytest.mark.parametrize("case", OTHERS)
def test_it_stands_apart(emulator: Device, case: str) -> None:
    """Where products of the experts cannot take it, or something else reads it."""
    made = SharedBench(emulator, OTHERS[case])
    y = made.out(HIDDEN)
    expected = made.layer(made.input(HIDDEN), y)
    assert len(made.run()) >= 6
    made.compare(y, expected, 2e-3)
    made.close()


def test_layers_in_a_graph_read_nothing_too_early(urdir_sanitizer: Device) -> None:
    """Replays of two layers give what launches one after the other give, and the emulator finds no
    race of kernels that overlap."""
    made = SharedBench(urdir_sanitizer, CASES["many experts"])
    first, last = made.out(HIDDEN, "first"), made.out(HIDDEN, "last")
    between = made.layer(made.input(HIDDEN), first, "0")
    expected = made.layer((first, between), last, "1")
    assert made.run() == 2 * TOGETHER
    made.compare(last, expected, 2e-3)
    once = made.values(last)
    made.fixed[last].fill(0)
    with execute.record(made.plan, made.device) as graph, made.device.create_stream() as stream:
        for _ in range(3):
            graph.launch(stream)
        stream.synchronize()
    np.testing.assert_array_equal(made.values(last), once)
    made.close()
