"""Routers whose logits the product before leaves in parts, against numpy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.model.lower.test_experts import router_of
from tests.model.lower.workbench import Workbench
from urdir.driver import execute
from urdir.driver.device import Device
from urdir.driver.operation import Launch
from urdir.model.graph.experts import Experts, Route
from urdir.model.graph.ops import Add, Product
from urdir.model.graph.ops import Norm as Normed
from urdir.model.graph.tensor import Tensor
from urdir.model.lower import lowering
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.experts.selection import Selection
from urdir.ptxgen.kernels.norm import Norm

Floats = npt.NDArray[np.float64]

HIDDEN, INNER, WIDTH = 544, 1056, 64
RMS, LAYER = Norm("rms", 1e-5), Norm("layer", 1e-5, bias=True)
SILU = Activation("silu")


@dataclass(frozen=True)
class Case:
    """How a mixture is chosen from: see `Selection`."""

    selection: Selection
    bias: bool = False
    scale: float = 1.0
    norm: Norm = RMS
    router_type: str = "F32"


CASES = {
    "32 experts, bias": Case(Selection(32, 4, "softmax_selected"), bias=True),
    "32 experts, scaled": Case(Selection(32, 6), scale=0.5),
    "32 experts, normalised": Case(Selection(32, 8, normalised=True)),
}
#: Routers with a launch of their own.
OTHERS = {
    "33 experts": Case(Selection(33, 4)),
    "64 experts": Case(Selection(64, 4)),
    "sigmoid": Case(Selection(32, 4, "sigmoid", by_logits=True)),
    "layer norm": Case(Selection(32, 4), norm=LAYER),
    "F16": Case(Selection(32, 4), router_type="F16"),
}


@pytest.fixture(autouse=True)
def many_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CTA has 16 rows, as on a GPU."""
    of = lowering.device_limits
    monkeypatch.setattr(lowering, "device_limits", lambda device: replace(of(device), sms=48))


class PartsBench(Workbench):
    """A product that is added to the stream, and a mixture after it."""

    def __init__(self, device: Device, rows: int, exact: bool, count: int) -> None:
        kept = {"expert": 4 * rows * 8, "router logits": 4 * 8 * rows * count}
        super().__init__(device, rows, exact, 5, kept, {"experts arrived": 4 * rows}, 1 << 21)

    def experts(self, count: int, rows: int, cols: int) -> tuple[Any, Floats]:
        """Random matrices (count, rows, cols), and their numbers."""
        matrix, weights, _ = self.linear(count * rows, cols)
        return matrix, weights.reshape(count, rows, cols)

    def check_replays(self, y: Tensor, times: int) -> None:
        """A graph that is replayed some ``times`` gives what the launches gave."""
        once = self.values(y)
        self.fixed[y].fill(0)
        with execute.record(self.plan, self.device) as graph, self.device.create_stream() as stream:
            for _ in range(times):
                graph.launch(stream)
            stream.synchronize()
        np.testing.assert_array_equal(self.values(y), once)

    def layer(
        self, label: str, case: Case, read: tuple[Tensor, Floats], stream: tuple[Tensor, Floats],
        y: Tensor,
    ) -> Floats:  # fmt: skip
        """Append stream + W read, and the mixture of its norm; what y should be."""
        of, rows = case.selection, self.rows
        w, weights, _ = self.linear(HIDDEN, INNER)
        total = Tensor(f"{label} product", rows, HIDDEN)
        self.add(Product, f"{label}.attn_output", total, read[0], w)
        added = self.add(Add, f"{label}.add", Tensor("attended", rows, HIDDEN), stream[0], total)
        expected: Floats = stream[1] + read[1] @ weights.T

        norm, norm_weights = self.norm(case.norm, HIDDEN)
        normed = self.add(Normed, "norm", Tensor("normed", rows, HIDDEN), added, norm)
        matrix, router, bias = self.linear(of.experts, HIDDEN, case.bias, case.router_type)
        how = router_of(matrix, of, norm_scale=case.scale)
        routing = Tensor("routing", rows, of.experts)
        self.add(Route, f"{label}.router", routing, normed, how)
        gate, g = self.experts(of.experts, WIDTH, HIDDEN)
        up, u = self.experts(of.experts, WIDTH, HIDDEN)
        down, d = self.experts(of.experts, HIDDEN, WIDTH)
        mixed = Tensor("mixed", rows, HIDDEN)
        given = normed, routing, of, up, down, gate, SILU, False
        self.add(Experts, label, mixed, *given)
        self.add(Add, f"{label}.sum", y, added, mixed)

        x = case.norm(expected, **norm_weights)
        expert, weight = of(case.scale * x @ router.T + bias)
        middle = SILU.gated(
            np.einsum("bsoi,bi->bso", g[expert], x), np.einsum("bsoi,bi->bso", u[expert], x)
        )
        return expected + np.einsum("bsoi,bsi,bs->bo", d[expert], middle, weight)


@pytest.mark.parametrize(("exact", "allowed"), [(True, 1e-5), (False, 1e-3)])
@pytest.mark.parametrize("case", CASES)
def test_experts_are_chosen_by_parts(
    emulator: Device, case: str, exact: bool, allowed: float
) -> None:
    """Without a launch of the router."""
    made = PartsBench(emulator, 1, exact, CASES[case].selection.experts)
    y = made.out(HIDDEN)
    expected = made.layer("ffn", CASES[case], made.input(INNER), made.input(HIDDEN, "x"), y)
    assert made.run() == ["gemv", "experts_up", "experts_down"]
    made.compare(y, expected, allowed)
    made.close()


@pytest.mark.parametrize(
    ("case", "rows"), [*((case, 1) for case in OTHERS), ("32 experts, scaled", 2)]
)
def test_routers_with_a_launch(emulator: Device, case: str, rows: int) -> None:
    """Of other selections, norms and types, and of several rows."""
    of = (CASES | OTHERS)[case]
    made = PartsBench(emulator, rows, False, of.selection.experts)
    y = made.out(HIDDEN)
    expected = made.layer("ffn", of, made.input(INNER), made.input(HIDDEN, "x"), y)
    assert len(made.run()) >= 4
    assert not any("logit_parts" in op.args for op in made.plan if isinstance(op, Launch))
    made.compare(y, expected, 1e-3)
    made.close()


def test_layers_in_a_graph_read_nothing_too_early(urdir_sanitizer: Device) -> None:
    """Two layers share the parts. Replays give what launches one after the other give, and the
    emulator finds no race of kernels that overlap."""
    made = PartsBench(urdir_sanitizer, 1, False, 32)
    case, x = CASES["32 experts, bias"], made.input(HIDDEN, "x")
    first, last = made.out(HIDDEN, "first"), made.out(HIDDEN, "last")
    between = made.layer("0", case, made.input(INNER), x, first)
    expected = made.layer("1", case, made.input(INNER, "read"), (first, between), last)
    made.run()
    made.compare(last, expected, 1e-3)
    made.check_replays(last, 3)
    made.close()


def test_one_row_of_a_graph_chooses_nothing_too_early(urdir_sanitizer: Device) -> None:
    """Down may start before gate and up have chosen, by complete logits. The emulator finds
    no race, and replays give what launches one after the other give."""
    case = Case(Selection(40, 4))
    made = PartsBench(urdir_sanitizer, 1, False, case.selection.experts)
    x, last = made.input(HIDDEN, "x"), made.out(HIDDEN, "last")
    expected = made.layer("0", case, made.input(INNER), x, last)
    launches = made.run()
    assert launches[-3:] == ["route_experts", "experts_up", "experts_down"]
    made.compare(last, expected, 2e-3)
    made.check_replays(last, 3)
    made.close()
