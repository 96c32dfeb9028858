"""Mixtures of experts against numpy, in every mode and for any rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.model.lower.workbench import Workbench
from urdir.driver import execute
from urdir.driver.device import Device
from urdir.driver.operation import Launch
from urdir.model.families.feed_forward import Router
from urdir.model.families.stored import Linear
from urdir.model.graph.experts import Experts, Route
from urdir.model.graph.ops import Add, Scale
from urdir.model.graph.ops import Norm as Normed
from urdir.model.graph.tensor import Tensor
from urdir.model.lower import router as router_rules
from urdir.model.lower.experts import shared_read
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.advance import IDLE
from urdir.ptxgen.kernels.experts import choice
from urdir.ptxgen.kernels.experts.gemm_small import expected_experts
from urdir.ptxgen.kernels.experts.selection import Selection
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.weights.formats import FORMATS
from urdir.ptxgen.weights.layout import Layout

Floats = npt.NDArray[np.float64]

HIDDEN, WIDTH, EXPERTS = 96, 64, 6
RMS, LAYER = Norm("rms", 1e-5), Norm("layer", 1e-5, bias=True)
#: Rows, exact, whether those with the same expert read it together, allowed deviation; f16 rounds
#: many rows, 16-bit integers few.
MODES = [
    pytest.param(1, True, False, 1e-5, id="one row, exact"),
    pytest.param(1, False, False, 1e-3, id="one row"),
    pytest.param(3, True, True, 1e-5, id="three rows, exact"),
    pytest.param(3, False, False, 1e-3, id="three rows"),
    pytest.param(3, False, True, 1e-3, id="three rows, together"),
    pytest.param(12, True, False, 1e-5, id="many rows, exact"),
    pytest.param(21, False, False, 4e-3, id="many rows"),
]
every_mode = pytest.mark.parametrize(("rows", "exact", "together", "allowed"), MODES)


class ExpertsBench(Workbench):
    """Buffers, random matrices and vectors, and a graph of mixtures for some rows."""

    def __init__(self, device: Device, rows: int, exact: bool, count: int = EXPERTS) -> None:
        kept = {"expert": 4 * rows * 4, "router logits": 4 * rows * count}
        super().__init__(device, rows, exact, 5, kept, {"experts arrived": 4 * rows})

    def experts(
        self, rows: int, cols: int, bias: bool, each: int = EXPERTS, fmt: str = "Q8_0"
    ) -> tuple[Linear, Floats, Floats]:
        """Random matrices (each, rows, cols), as numbers, and their biases (each, rows)."""
        matrix, weights, biases = self.linear(each * rows, cols, bias, fmt)
        return matrix, weights.reshape(each, rows, cols), biases.reshape(each, rows)

    def mixture(
        self,
        label: str,
        router: Router,
        matrices: tuple[Linear | None, Linear, Linear],
        x: Tensor,
        y: Tensor,
        *,
        activation: Activation,
        **more: Any,
    ) -> None:
        """Append a router, and the experts (gate, up, down) that it chooses; y is x plus their sum
        where it ``adds`` that."""
        gate, up, down = matrices
        read, norm, adds = x, more.get("norm"), more.get("adds", True)
        weigh_input = more.get("weigh_input", False)
        if norm is not None:
            read = self.add(Normed, "norm", Tensor("normed", self.rows, HIDDEN), x, norm)
        routing = Tensor("routing", self.rows, router.experts)
        self.add(Route, f"{label}.router", routing, read, router)
        total = Tensor("branch", self.rows, HIDDEN) if adds else y
        given = read, routing, router.selection, up, down, gate, activation, weigh_input
        self.add(Experts, label, total, *given)
        if adds:
            self.add(Add, "sum", y, x, total)

    def run(self) -> list[str]:
        """All of the plan, twice: a launch leaves what the next one expects."""
        super().run()
        return super().run()


def router_of(matrix: Linear, selection: Selection, **more: Any) -> Router:
    """A router that chooses so."""
    return Router(
        matrix,
        selection.used,
        selection.scoring,
        normalize=selection.normalised,
        scale=selection.scale,
        by_logits=selection.by_logits,
        groups=selection.groups,
        groups_used=selection.groups_used,
        **more,
    )


@pytest.fixture
def bench(
    emulator: Device, rows: int, exact: bool, together: bool, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ExpertsBench]:
    monkeypatch.setattr(shared_read, "pays_together", lambda *_: together)
    made = ExpertsBench(emulator, rows, exact)
    yield made
    made.close()


def in_columns(stored: Floats, columns: npt.NDArray[np.intp]) -> Floats:
    """Matrices whose column ``columns[e, i]`` is column i of the stored ones."""
    weights = np.empty_like(stored)
    np.put_along_axis(weights, np.broadcast_to(columns[:, None], stored.shape), stored, axis=2)
    return weights


def through(weights: Floats, bias: Floats, expert: Floats, x: Floats) -> Floats:
    """Products (rows, used, out) of x (rows, used or 1, in) with the experts of each slot."""
    product: Floats = np.einsum(
        "bsoi,bsi->bso", weights[expert], np.broadcast_to(x, (*expert.shape, x.shape[2]))
    )
    return product + bias[expert]


def test_one_row_takes_three_launches(emulator: Device) -> None:
    """Router, gate and up, down; many rows take seven: norm, groups, packing and the sum too."""
    for rows, count in ((1, 3), (16, 7)):
        made = ExpertsBench(emulator, rows, exact=False)
        router, _, _ = made.experts(1, HIDDEN, bias=False, fmt="F32")
        up, _, _ = made.experts(WIDTH, HIDDEN, bias=False)
        down, _, _ = made.experts(HIDDEN, WIDTH, bias=False)
        x, _ = made.input(HIDDEN)
        norm, _ = made.norm(RMS, HIDDEN)
        chosen = router_of(router, Selection(EXPERTS, 2))
        silu = Activation("silu")
        matrices = (up, up, down)
        made.mixture("ffn", chosen, matrices, x, made.out(HIDDEN), activation=silu, norm=norm)
        kernels = made.lower()
        assert len(kernels) == count, kernels
        made.close()


@pytest.mark.parametrize(
    ("rows", "many_logits", "together", "ordered"),
    [
        (1, 99, False, False),
        pytest.param(2, 99, False, False, marks=pytest.mark.full),
        (2, 99, True, False),
        pytest.param(11, 99, False, False, marks=pytest.mark.full),
        pytest.param(11, 8, False, False, marks=pytest.mark.full),
        (1, 99, False, True),
        pytest.param(2, 99, True, True, marks=pytest.mark.full),
        pytest.param(11, 99, False, True, marks=pytest.mark.full),
    ],
)
def test_layers_in_a_graph_read_nothing_too_early(
    urdir_sanitizer: Device,
    rows: int,
    many_logits: int,
    together: bool,
    ordered: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two layers share all buffers. Replays give what launches one after the other give, and the
    emulator finds no race of kernels that overlap."""
    monkeypatch.setattr(router_rules, "MANY_LOGITS", many_logits)
    monkeypatch.setattr(shared_read, "pays_together", lambda *_: together)
    made = ExpertsBench(urdir_sanitizer, rows, exact=False)
    selection = Selection(EXPERTS, 2, normalised=True)
    streams = [made.input(HIDDEN)[0], made.out(HIDDEN), made.out(HIDDEN)]
    norm, _ = made.norm(RMS, HIDDEN)
    for number, (x, y) in enumerate(itertools.pairwise(streams)):
        router, _, _ = made.experts(1, HIDDEN, bias=False, fmt="F32")
        gate, _, _ = made.experts(WIDTH, HIDDEN, bias=False)
        up, _, _ = made.experts(WIDTH, HIDDEN, bias=False)
        down, _, _ = made.experts(HIDDEN, WIDTH, bias=False)
        if ordered:
            gate, _ = made.orders(gate, EXPERTS)
            up = replace(up, order=gate.order)
        chosen, silu = router_of(router, selection), Activation("silu")
        matrices = (gate, up, down)
        made.mixture(f"{number}", chosen, matrices, x, y, activation=silu, norm=norm)
    made.run()
    expected = made.values(streams[-1])
    made.fixed[streams[-1]].fill(0)
    with (
        execute.record(made.plan, made.device) as graph,
        made.device.create_stream() as stream,
    ):
        for _ in range(3):
            graph.launch(stream)
        stream.synchronize()
    np.testing.assert_array_equal(made.values(streams[-1]), expected)
    made.close()


@pytest.mark.parametrize(
    ("rows", "selection", "chooses"),
    [
        (1, Selection(EXPERTS, 2), True),
        (3, Selection(EXPERTS, 2, "softmax_selected", scale=2.0), True),
        (1, Selection(EXPERTS, 2, "sigmoid", by_logits=True), False),
        (1, Selection(EXPERTS, 2, groups=2, groups_used=1), False),
        (9, Selection(EXPERTS, 2), False),
    ],
)
def test_whether_products_choose_for_themselves(
    emulator: Device,
    rows: int,
    selection: Selection,
    chooses: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of few rows, by logits alone."""
    monkeypatch.setattr(shared_read, "pays_together", lambda *_: False)
    made = ExpertsBench(emulator, rows, exact=False)
    router, _, _ = made.experts(1, HIDDEN, bias=False, fmt="F32")
    up, _, _ = made.experts(WIDTH, HIDDEN, bias=False)
    down, _, _ = made.experts(HIDDEN, WIDTH, bias=False)
    x, _ = made.input(HIDDEN)
    chosen, silu = router_of(router, selection), Activation("silu")
    made.mixture("ffn", chosen, (up, up, down), x, made.out(HIDDEN), activation=silu)
    made.lower()
    launches = [op for op in made.plan if isinstance(op, Launch)]
    products = [op for op in launches if op.kernel.name in ("experts_up", "experts_down")]
    assert len(products) == (0 if rows == 9 else 2)
    assert all(("logits" in op.args) is chooses for op in products)
    assert any("expert" in op.args for op in launches) is not chooses
    made.close()


@pytest.mark.parametrize(
    ("rows", "exact", "down", "taken"),
    [
        (5, False, "Q8_0", True),
        (1, False, "Q8_0", False),
        (5, True, "Q8_0", False),
        (5, False, "F16", False),
        (9, False, "Q8_0", False),
    ],
)
def test_who_reads_experts_together(
    emulator: Device,
    rows: int,
    exact: bool,
    down: str,
    taken: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Few rows that may be rounded, of quantised experts, where it spares as many bytes."""
    selection = Selection(EXPERTS, 4)
    kernels = []
    layouts = [
        Layout(FORMATS[t], EXPERTS * n, m)
        for t, n, m in (("Q8_0", WIDTH, HIDDEN), (down, HIDDEN, WIDTH))
    ]
    expert_nbytes = sum(layout.nbytes for layout in layouts) // EXPERTS
    spared = expert_nbytes * (rows * selection.used - expected_experts(rows, EXPERTS, 4))
    for least in (max(1, int(spared)), int(spared) + 1):
        monkeypatch.setattr(choice, "SPARED_NBYTES", least)
        made = ExpertsBench(emulator, rows, exact)
        router, _, _ = made.experts(1, HIDDEN, bias=False, fmt="F32")
        up, _, _ = made.experts(WIDTH, HIDDEN, bias=False)
        back, _, _ = made.experts(HIDDEN, WIDTH, bias=False, fmt=down)
        x, _ = made.input(HIDDEN)
        chosen, silu = router_of(router, selection), Activation("silu")
        y, matrices = made.out(HIDDEN), (None, up, back)
        made.mixture("ffn", chosen, matrices, x, y, activation=silu, adds=False)
        kernels.append(made.lower()[1:])
        made.close()
    names = ["experts_gemm_small", "experts_gemm_small", "combine_experts"]
    assert (kernels[0] == names) is taken
    assert "experts_gemm_small" not in kernels[1]


CASES = {
    "qwen3": (Selection(EXPERTS, 4, normalised=True), "silu", RMS, "F32", False, False),
    "gpt-oss": (Selection(EXPERTS, 2, "softmax_selected"), "swiglu_oai", RMS, "F32", True, False),
    "llama 4": (Selection(EXPERTS, 1, "sigmoid", by_logits=True), "silu", RMS, "F32", False, True),
    "layer norm": (Selection(EXPERTS, 2, scale=2.0), "gelu", LAYER, "F16", True, False),
}


@every_mode
@pytest.mark.turns(3)
@pytest.mark.parametrize("case", CASES)
def test_a_mixture_is_the_weighted_sum_of_its_experts(
    bench: ExpertsBench, case: str, allowed: float
) -> None:
    check_mixture(bench, case, allowed)


any_number_of_rows = pytest.mark.parametrize(
    ("rows", "exact", "together", "allowed"),
    [
        *((rows, False, together, 1e-3) for rows in (2, 5, 8) for together in (False, True)),
        *((rows, False, False, 4e-3) for rows in (9, 16, 40)),
        (40, True, False, 1e-5),
    ],
)


@pytest.mark.turns(3)
@pytest.mark.parametrize("case", ["qwen3", "llama 4"])
@any_number_of_rows
def test_any_number_of_rows(
    bench: ExpertsBench, case: str, allowed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many logits as well: from 9 rows on."""
    monkeypatch.setattr(router_rules, "MANY_LOGITS", 8 * EXPERTS)
    check_mixture(bench, case, allowed)


@every_mode
@pytest.mark.turns(2)
@pytest.mark.parametrize("case", ["qwen3", "llama 4", "layer norm"])
@pytest.mark.parametrize("orders", ["one", "apart"])
def test_columns_in_orders_of_the_experts(
    bench: ExpertsBench, case: str, orders: str, allowed: float
) -> None:
    """Of an expert's gate and up together or of each; these are launched apart."""
    check_mixture(bench, case, allowed, orders)
    takes = [op.kernel.name for op in bench.plan if isinstance(op, Launch) and "order" in op.args]
    if bench.rows == 1 and case == "qwen3":  # whose products choose for themselves
        taken = "experts_up"
    else:
        packs = orders == "one" and "gemm_wgmma" in bench.kernels()
        taken = "pack" if packs else "reorder_experts"
    assert takes == [taken] * (1 if orders == "one" else 2)


@pytest.mark.turns(3)
@any_number_of_rows
def test_columns_in_orders_of_any_number_of_rows(bench: ExpertsBench, allowed: float) -> None:
    check_mixture(bench, "qwen3", allowed, "one")


def check_mixture(bench: ExpertsBench, case: str, allowed: float, orders: str = "") -> None:
    """A router and its experts against numpy; columns of gate and up in ``orders``, "one" for
    both or "apart"."""
    selection, kind, norm, router_type, bias, weigh_input = CASES[case]
    f = Activation(kind, limit=1.5 if kind == "swiglu_oai" else 0.0)  # type: ignore[arg-type]
    router, r, r_bias = bench.experts(1, HIDDEN, bias, fmt=router_type)
    gate, g, g_bias = bench.experts(WIDTH, HIDDEN, bias)
    up, u, u_bias = bench.experts(WIDTH, HIDDEN, bias)
    down, d, d_bias = bench.experts(HIDDEN, WIDTH, bias, fmt="Q5_0")
    if orders:
        gate, columns = bench.orders(gate, EXPERTS)
        g = in_columns(g, columns)
        up = replace(up, order=gate.order)
        if orders == "apart":
            up, columns = bench.orders(up, EXPERTS)
        u = in_columns(u, columns)
    x, xs = bench.input(HIDDEN)
    y = bench.out(HIDDEN)
    layer, weights = bench.norm(norm, HIDDEN)
    bench.mixture(
        "ffn",
        router_of(router, selection),
        (gate, up, down),
        x,
        y,
        activation=f,
        norm=layer,
        weigh_input=weigh_input,
    )
    bench.run()

    normed = norm(xs, **weights)
    logits = normed @ r[:, 0].T + r_bias[:, 0]
    expert, weight = selection(logits)
    found, _ = selection(bench.work["router logits"].download(np.float32, logits.shape))
    if any("expert" in op.args for op in bench.plan if isinstance(op, Launch)):
        found = bench.work["expert"].download(np.uint32, expert.shape)
    np.testing.assert_array_equal(found, expert)
    before, after = (weight, 1.0) if weigh_input else (np.ones_like(weight), weight[:, :, None])
    scaled = normed[:, None] * before[:, :, None]
    middle = f.gated(through(g, g_bias, expert, scaled), through(u, u_bias, expert, scaled))
    expected = xs + (after * through(d, d_bias, expert, middle)).sum(axis=1)
    bench.compare(y, expected, allowed)


@pytest.mark.parametrize("rows", [1, 3, 12])
def test_a_sum_of_experts_that_another_operation_reads_is_made(emulator: Device, rows: int) -> None:
    made = ExpertsBench(emulator, rows, exact=False)
    router, _, _ = made.experts(1, HIDDEN, bias=False, fmt="F32")
    up, _, _ = made.experts(WIDTH, HIDDEN, bias=False)
    down, _, _ = made.experts(HIDDEN, WIDTH, bias=False)
    x, xs = made.input(HIDDEN)
    y, half = made.out(HIDDEN), made.out(HIDDEN, "half")
    chosen, silu = router_of(router, Selection(EXPERTS, 2)), Activation("silu")
    made.mixture("ffn", chosen, (up, up, down), x, y, activation=silu)
    add = made.graph.ops[-1]
    assert isinstance(add, Add)
    made.add(Scale, "half", half, add.b, 0.5)
    assert made.run()[-2:] == ["add", "rescale"]
    branch = made.values(y) - xs
    assert np.abs(branch).max() > 0.1
    np.testing.assert_allclose(2 * made.values(half), branch, atol=2e-6)
    made.close()


@every_mode
def test_without_a_gate_and_with_a_choice_bias(bench: ExpertsBench, allowed: float) -> None:
    """Of other experts than the logits alone would choose; nothing is added."""
    selection = Selection(
        EXPERTS, 2, "sigmoid", True, 2.5, bias=True, groups=3, groups_used=2, expert_scale=True
    )
    router, r, _ = bench.experts(1, HIDDEN, bias=False, fmt="F32")
    up, u, u_bias = bench.experts(WIDTH, HIDDEN, bias=False)
    down, d, d_bias = bench.experts(HIDDEN, WIDTH, bias=False, fmt="F16")
    choice_at, choice_bias = bench.vector(EXPERTS)
    scale_at, expert_scale = bench.vector(EXPERTS)
    x, xs = bench.input(HIDDEN)
    y, relu2 = bench.out(HIDDEN), Activation("relu2")
    more = {"choice_bias": choice_at, "expert_scale": scale_at, "norm_scale": 0.5}
    chosen = router_of(router, selection, **more)
    assert chosen.selection == selection
    bench.mixture("ffn", chosen, (None, up, down), x, y, activation=relu2, adds=False)
    bench.run()
    expert, weight = selection(0.5 * xs @ r[:, 0].T, choice_bias, expert_scale)
    middle = relu2(through(u, u_bias, expert, xs[:, None]))
    expected = (weight[:, :, None] * through(d, d_bias, expert, middle)).sum(axis=1)
    bench.compare(y, expected, 2 * allowed)


@every_mode
def test_gate_and_up_of_different_types(bench: ExpertsBench, allowed: float) -> None:
    selection = Selection(EXPERTS, 2)
    router, r, _ = bench.experts(1, HIDDEN, bias=False, fmt="F32")
    gate, g, none = bench.experts(WIDTH, HIDDEN, bias=False, fmt="Q4_0")
    up, u, _ = bench.experts(WIDTH, HIDDEN, bias=False)
    down, d, d_bias = bench.experts(HIDDEN, WIDTH, bias=False)
    x, xs = bench.input(HIDDEN)
    y, silu = bench.out(HIDDEN), Activation("silu")
    bench.mixture("ffn", router_of(router, selection), (gate, up, down), x, y, activation=silu)
    bench.run()
    expert, weight = selection(xs @ r[:, 0].T)
    rows = xs[:, None]
    middle = silu.gated(through(g, none, expert, rows), through(u, none, expert, rows))
    expected = xs + (weight[:, :, None] * through(d, d_bias, expert, middle)).sum(axis=1)
    bench.compare(y, expected, 2 * allowed)


@pytest.mark.turns(2)
@pytest.mark.parametrize("case", ["qwen3", "deepseek", "ordered"])
@pytest.mark.parametrize(
    ("rows", "exact", "together"),
    [(3, True, False), (3, False, False), (5, False, True), (12, True, False), (21, False, False)],
)
def test_padding_rows_have_no_experts(bench: ExpertsBench, case: str) -> None:
    """To them nothing is added; results of others have the same bits as without padding."""
    selection = {
        "qwen3": Selection(EXPERTS, 2, normalised=True),
        "deepseek": Selection(EXPERTS, 2, "sigmoid", True, 2.5, groups=3, groups_used=2),
        "ordered": Selection(EXPERTS, 3),
    }[case]
    router, _, _ = bench.experts(1, HIDDEN, bias=False, fmt="F32")
    gate, _, _ = bench.experts(WIDTH, HIDDEN, bias=True)
    up, _, _ = bench.experts(WIDTH, HIDDEN, bias=True)
    down, _, _ = bench.experts(HIDDEN, WIDTH, bias=True)
    if case == "ordered":
        gate, _ = bench.orders(gate, EXPERTS)
        up = replace(up, order=gate.order)
    x, xs = bench.input(HIDDEN)
    y, silu = bench.out(HIDDEN), Activation("silu")
    bench.mixture("ffn", router_of(router, selection), (gate, up, down), x, y, activation=silu)
    bench.run()
    expected = bench.values(y)
    padding = np.arange(bench.rows) % 3 == 1
    assert not np.any(expected[padding] == xs[padding])
    bench.position.upload(np.where(padding, IDLE, 5).astype(np.uint32))
    bench.run()
    np.testing.assert_array_equal(bench.values(y)[~padding], expected[~padding])
    np.testing.assert_array_equal(bench.values(y)[padding], xs[padding])


@pytest.mark.parametrize(
    ("rows", "exact", "together"), [(3, False, False), (5, False, True), (12, True, False)]
)
@pytest.mark.parametrize("ordered", [False, True])
def test_padding_rows_are_as_others_where_products_are_apart(
    bench: ExpertsBench, ordered: bool
) -> None:
    """The activation, a launch of its own, reads the products of all rows."""
    router, _, _ = bench.experts(1, HIDDEN, bias=False, fmt="F32")
    gate, _, _ = bench.experts(WIDTH, HIDDEN, bias=False, fmt="Q8_0" if ordered else "Q4_0")
    up, _, _ = bench.experts(WIDTH, HIDDEN, bias=False)
    if ordered:
        gate, _ = bench.orders(gate, EXPERTS)
    down, _, _ = bench.experts(HIDDEN, WIDTH, bias=False)
    x, _ = bench.input(HIDDEN)
    y = bench.out(HIDDEN)
    silu = Activation("silu")
    chosen = router_of(router, Selection(EXPERTS, 2))
    bench.mixture("ffn", chosen, (gate, up, down), x, y, activation=silu)
    bench.position.upload(np.full(bench.rows, IDLE, np.uint32))
    bench.run()
    expected = bench.values(y)
    bench.position.upload(np.zeros(bench.rows, np.uint32))
    bench.run()
    np.testing.assert_array_equal(bench.values(y), expected)


def append_route(made: ExpertsBench, router: Router, x: Tensor, norm: Any = None) -> None:
    """A router alone, of a norm of its own where there is one."""
    if norm is not None:
        x = made.add(Normed, "norm", Tensor("normed", made.rows, HIDDEN), x, norm)
    made.add(Route, "router", Tensor("routing", made.rows, router.experts), x, router)


@pytest.mark.parametrize("rows", [9, 16, 40])
@pytest.mark.parametrize("norm", [None, RMS, LAYER], ids=["no norm", "rms", "layer norm"])
def test_many_logits_are_a_product_of_their_own(
    emulator: Device, rows: int, norm: Norm | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In f32: with weights rounded to f16 the logits would be off by 3e-4."""
    monkeypatch.setattr(router_rules, "MANY_LOGITS", 8 * EXPERTS)
    made = ExpertsBench(emulator, rows, exact=False)
    selection = Selection(EXPERTS, 3)
    router, r, bias = made.experts(1, HIDDEN, bias=True, fmt="F32")
    at, x = made.input(HIDDEN)
    layer, weights = (None, {}) if norm is None else made.norm(norm, HIDDEN)
    append_route(made, router_of(router, selection, norm_scale=0.5), at, layer)
    names = ["router_logits", "select_experts"]
    assert made.lower() == (["normalise", *names] if norm else names)
    made.run()
    logits = 0.5 * (x if norm is None else norm(x, **weights)) @ r[:, 0].T + bias[:, 0]
    found = made.work["router logits"].download(np.float32, logits.shape)
    assert np.sqrt(np.mean((found - logits) ** 2) / np.mean(logits**2)) < 2e-6
    expert, _ = selection(logits)
    np.testing.assert_array_equal(made.work["expert"].download(np.uint32, expert.shape), expert)
    made.close()


@pytest.mark.parametrize(
    ("rows", "exact", "kernel"),
    [
        (512, False, "router_logits"),
        (8, False, "route_experts"),
        (64, False, "router_logits"),
        (16, False, "route_experts"),
        (512, True, "route_experts"),
    ],
)
def test_who_makes_the_logits(emulator: Device, rows: int, exact: bool, kernel: str) -> None:
    made = ExpertsBench(emulator, rows, exact, count=128)
    router, _, _ = made.experts(1, HIDDEN, bias=False, each=128, fmt="F32")
    x, _ = made.input(HIDDEN)
    append_route(made, router_of(router, Selection(128, 4)), x)
    assert made.lower()[0] == kernel
    made.close()
