"""A shared expert beside the experts that a row chooses, against numpy."""

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
from urdir.model.graph.ops import Add, Gate, Product, Scale
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
#: Where the last matrix of the shared expert has another type.
LAST_APART = ["route_experts", "experts_up", "gemv", "experts_down"]


@dataclass(frozen=True)
class Case:
    """A mixture, and what its shared expert is: gated, or times a ``factor``."""

    selection: Selection
    gated: bool = True
    factor: float = 1.0
    down: str = "Q8_0"
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
    "sigmoids": Case(Selection(24, 3, "sigmoid", normalised=True, bias=True), bias=True),
    "many sigmoids": Case(Selection(260, 6, "sigmoid", scale=2.5, bias=True)),
    "ungated": Case(Selection(24, 3), gated=False),
    "ungated, chosen before": Case(
        Selection(24, 3, "sigmoid", bias=True, groups=4, groups_used=2), gated=False
    ),
    "five widths": Case(Selection(24, 3), gated=False, width=5 * WIDTH),
    "three widths, chosen before": Case(
        Selection(24, 3, by_best=True, groups=4, groups_used=2), gated=False, width=3 * WIDTH
    ),
    "gated, two widths": Case(Selection(24, 3), width=2 * WIDTH),
    "a factor": Case(Selection(24, 3), gated=False, factor=0.22, width=2 * WIDTH),
}
#: Those whose last product has a launch of its own.
PARTS = {
    "another last type": Case(Selection(24, 3), gated=False, down="Q5_0"),
    "another last type, two widths": Case(
        Selection(24, 3, "sigmoid", bias=True), gated=False, down="Q5_1", width=2 * WIDTH
    ),
    "another last type, a factor": Case(Selection(24, 3), gated=False, factor=0.5, down="F16"),
}
#: Shared experts with launches of their own.
OTHERS = {
    "several rows": Case(Selection(24, 3), rows=2),
    "groups": Case(Selection(24, 3, groups=4, groups_used=2)),
    "ungated, several rows": Case(Selection(24, 3), gated=False, rows=2),
    "ungated, another width": Case(Selection(24, 3), gated=False, width=96),
    "ungated, another type": Case(Selection(24, 3), gated=False, weights="Q5_0", down="Q5_0"),
    "ungated, another activation": Case(Selection(24, 3), gated=False, activation=GELU),
    "ungated, its result is read": Case(Selection(24, 3), gated=False, is_read=True),
    "ungated, too many slots": Case(Selection(24, 8), gated=False, width=25 * WIDTH),
    "gated, another last type": Case(Selection(24, 3), down="Q5_0"),
    "another width": Case(Selection(24, 3), width=32),
    "another type": Case(Selection(24, 3), weights="Q5_0", down="Q5_0"),
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
        choice, choice_bias = self.vector(of.experts) if of.bias else (None, None)
        how = router_of(matrix, of, norm_scale=case.scale, choice_bias=choice, by_best=of.by_best)
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
        expert, weight = of(case.scale * x @ router.T + bias, choice_bias)
        middle = SILU.gated(
            np.einsum("bsoi,bi->bso", g[expert], x), np.einsum("bsoi,bi->bso", u[expert], x)
        )
        return before + shared + np.einsum("bsoi,bsi,bs->bo", d[expert], middle, weight)

    def _shared(self, normed: Tensor, x: Floats, label: str) -> tuple[Floats, Tensor]:
        case, rows = self.case, self.rows
        (first, w), (second, u) = (self.linear(case.width, HIDDEN, False, case.weights)[:2]
                                   for _ in range(2))  # fmt: skip
        down, d, _ = self.linear(HIDDEN, case.width, False, case.down)
        own = Tensor("shared gate", rows, 1)
        if case.gated:
            gate, g, g_bias = self.linear(1, HIDDEN, case.gate_bias, case.gate_weights)
            self.add(Product, f"{label}.gate", own, normed, gate)
        inner = [Tensor(name, rows, case.width) for name in ("gate", "up", "activated")]
        self.add(Product, f"{label}.gate_up", inner[0], normed, first)
        self.add(Product, f"{label}.gate_up", inner[1], normed, second)
        self.add(Gate, f"{label}.act", inner[2], inner[0], inner[1], case.activation)
        made = self.add(Product, f"{label}.down", Tensor("made", rows, HIDDEN), inner[2], down)
        expected = case.activation.gated(x @ w.T, x @ u.T) @ d.T
        weighted = Tensor("weighted", rows, HIDDEN)
        if case.gated:
            self.add(Gate, f"{label}.gated", weighted, own, made, case.gated_by)
            return case.gated_by.gated(x @ g.T + g_bias, expected), weighted
        if case.factor != 1.0:
            self.add(Scale, f"{label}.scaled", weighted, made, case.factor)
            return case.factor * expected, weighted
        return expected, made


@pytest.mark.parametrize(("exact", "allowed"), [(True, 1e-5), (False, 2e-3)])
@pytest.mark.parametrize("case", CASES)
def test_it_is_further_slots(emulator: Device, case: str, exact: bool, allowed: float) -> None:
    """Without a launch of its own."""
    made = SharedBench(emulator, CASES[case], exact)
    y = made.out(HIDDEN)
    expected = made.layer(made.input(HIDDEN), y)
    assert made.run() == TOGETHER
    made.compare(y, expected, allowed)
    made.close()


@pytest.mark.parametrize(("exact", "allowed"), [(True, 1e-5), (False, 2e-3)])
@pytest.mark.parametrize("case", PARTS)
def test_its_last_product_may_stand_apart(
    emulator: Device, case: str, exact: bool, allowed: float
) -> None:
    """Where its last matrix has another type."""
    made = SharedBench(emulator, PARTS[case], exact)
    y = made.out(HIDDEN)
    expected = made.layer(made.input(HIDDEN), y)
    names = made.run()
    assert [name.removesuffix("_f32") for name in names] == LAST_APART
    made.compare(y, expected, allowed)
    made.close()


@pytest.mark.parametrize("case", OTHERS)
def test_it_stands_apart(emulator: Device, case: str) -> None:
    """Where products of the experts cannot take it, or something else reads it."""
    made = SharedBench(emulator, OTHERS[case])
    y = made.out(HIDDEN)
    expected = made.layer(made.input(HIDDEN), y)
    assert len(made.run()) >= 5
    made.compare(y, expected, 2e-3)
    made.close()


@pytest.mark.parametrize("case", ["many experts", "many sigmoids", "another last type, two widths"])
def test_layers_in_a_graph_read_nothing_too_early(urdir_sanitizer: Device, case: str) -> None:
    """Replays of two layers give what launches one after the other give, and the emulator finds no
    race of kernels that overlap."""
    made = SharedBench(urdir_sanitizer, (CASES | PARTS)[case])
    first, last = made.out(HIDDEN, "first"), made.out(HIDDEN, "last")
    between = made.layer(made.input(HIDDEN), first, "0")
    expected = made.layer((first, between), last, "1")
    assert made.run() == 2 * (TOGETHER if case in CASES else LAST_APART)
    made.compare(last, expected, 2e-3)
    once = made.values(last)
    made.fixed[last].fill(0)
    with execute.record(made.plan, made.device) as graph, made.device.create_stream() as stream:
        for _ in range(3):
            graph.launch(stream)
        stream.synchronize()
    np.testing.assert_array_equal(made.values(last), once)
    made.close()
