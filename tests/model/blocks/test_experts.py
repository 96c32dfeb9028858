"""Mixtures of experts against numpy, in every mode and for any rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from tests.model.blocks.workbench import Workbench
from urdir.driver import execute
from urdir.driver.device import Device
from urdir.driver.memory import Slice
from urdir.model.blocks import experts_together
from urdir.model.blocks import router as routers
from urdir.model.blocks.activations import Activations
from urdir.model.blocks.expert_products import MixtureCall
from urdir.model.blocks.experts import append_experts
from urdir.model.blocks.mixtures import (
    MixtureLayer,
    RouterLayer,
)
from urdir.model.blocks.router import append_router
from urdir.model.memory.mixture_workspace import mixture_workspace, most_workspace
from urdir.model.memory.norms import NormLayer
from urdir.model.memory.weights import Matrix
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.experts import choice
from urdir.ptxgen.kernels.experts.gemm_small import expected_experts
from urdir.ptxgen.kernels.experts.selection import Selection
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.weights.formats import FORMATS, random_blocks
from urdir.ptxgen.weights.layout import Layout
from urdir.ptxgen.weights.packed import packed_nbytes

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
    """Buffers, random matrices and vectors, and a plan of mixtures for some rows."""

    def __init__(self, device: Device, rows: int, exact: bool, count: int = EXPERTS) -> None:
        shapes = [mixture_workspace(Selection(count, 4), WIDTH, HIDDEN, rows, exact)]
        sizes = most_workspace(shapes) | {"normed": 4 * rows * HIDDEN}
        sizes["packed"] = packed_nbytes(rows, HIDDEN)
        super().__init__(device, rows, exact, sizes, seed=5)
        self.work["experts arrived"].fill(0)

    def vectors(self, *shape: int) -> tuple[Slice, Floats]:
        """Random numbers: where they are, and what they are."""
        values = self.random.standard_normal(shape).astype(np.float32)
        return self.place(values), values.astype(np.float64)

    def matrix(
        self, rows: int, cols: int, bias: bool, each: int = EXPERTS, fmt: str = "Q8_0"
    ) -> tuple[Matrix, Floats, Floats]:
        """Random matrices (each, rows, cols), as numbers, and their biases (each, rows)."""
        layout = Layout(FORMATS[fmt], each * rows, cols)
        blocks = each * rows * cols // layout.format.block
        packed = layout.pack(random_blocks(layout.format, blocks, self.random, cols**-0.5))
        weights = layout.unpack(packed).astype(np.float64).reshape(each, rows, cols)
        at, values = self.vectors(each, rows) if bias else (None, np.zeros((each, rows)))
        return Matrix(layout, self.place(packed), at), weights, values

    def norm(self, norm: Norm) -> tuple[NormLayer, dict[str, Floats]]:
        """A norm with random weights, and these."""
        names = [n for n, has in (("weight", norm.weight), ("bias", norm.bias)) if has]
        found = {name: self.vectors(HIDDEN) for name in names}
        layer = NormLayer(norm, **{name: at for name, (at, _) in found.items()})
        return layer, {name: values for name, (_, values) in found.items()}

    def run(self) -> None:
        """All of the plan, twice: a launch leaves what the next one expects."""
        with self.device.create_stream() as stream:
            for _ in range(2):
                execute.run(self.plan, self.device, stream)
            stream.synchronize()


@pytest.fixture
def bench(
    emulator: Device, rows: int, exact: bool, together: bool, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ExpertsBench]:
    monkeypatch.setattr(experts_together, "pays_together", lambda *_: together)
    made = ExpertsBench(emulator, rows, exact)
    yield made
    made.close()


def deviation(y: Slice, expected: Floats) -> float:
    """The RMS deviation, relative to that of what is expected."""
    found = y.download(np.float32, expected.shape)
    return float(np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2)))


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
        selection = Selection(EXPERTS, 2)
        router, _, _ = made.matrix(1, HIDDEN, bias=False, fmt="F32")
        up, _, _ = made.matrix(WIDTH, HIDDEN, bias=False)
        down, _, _ = made.matrix(HIDDEN, WIDTH, bias=False)
        x, _ = made.vectors(rows, HIDDEN)
        y, _ = made.vectors(rows, HIDDEN)
        norm, _ = made.norm(RMS)
        append_router(made.linear, "router", RouterLayer(selection, router), Activations(x), norm)
        mixture = MixtureLayer(selection, up, down, up, Activation("silu"))
        append_experts(made.linear, MixtureCall("ffn", mixture, Activations(x), norm, x, y))
        assert len(made.kernels()) == count, made.kernels()
        made.close()


@pytest.mark.parametrize(
    ("rows", "many_logits", "together"),
    [
        (1, 99, False),
        pytest.param(2, 99, False, marks=pytest.mark.full),
        (2, 99, True),
        (11, 99, False),
        pytest.param(11, 8, False, marks=pytest.mark.full),
    ],
)
def test_layers_in_a_graph_read_nothing_too_early(
    urdir_sanitizer: Device,
    rows: int,
    many_logits: int,
    together: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two layers share all buffers. Replays give what launches one after the other give, and the
    emulator finds no race of kernels that overlap."""
    monkeypatch.setattr(routers, "MANY_LOGITS", many_logits)
    monkeypatch.setattr(experts_together, "pays_together", lambda *_: together)
    made = ExpertsBench(urdir_sanitizer, rows, exact=False)
    selection = Selection(EXPERTS, 2, normalised=True)
    streams = [made.vectors(rows, HIDDEN)[0] for _ in range(3)]
    norm, _ = made.norm(RMS)
    for number, (x, y) in enumerate(itertools.pairwise(streams)):
        router, _, _ = made.matrix(1, HIDDEN, bias=False, fmt="F32")
        gate, _, _ = made.matrix(WIDTH, HIDDEN, bias=False)
        up, _, _ = made.matrix(WIDTH, HIDDEN, bias=False)
        down, _, _ = made.matrix(HIDDEN, WIDTH, bias=False)
        layer, vectors = RouterLayer(selection, router), Activations(x)
        append_router(made.linear, f"{number}.router", layer, vectors, norm)
        mixture = MixtureLayer(selection, up, down, gate, Activation("silu"))
        append_experts(made.linear, MixtureCall(f"{number}.ffn", mixture, vectors, norm, x, y))
    made.run()
    expected = streams[-1].download(np.float32, (rows, HIDDEN))
    streams[-1].fill(0)
    with (
        execute.record(made.plan, made.device) as graph,
        made.device.create_stream() as stream,
    ):
        for _ in range(3):
            graph.launch(stream)
        stream.synchronize()
    np.testing.assert_array_equal(streams[-1].download(np.float32, (rows, HIDDEN)), expected)
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
        up, _, _ = made.matrix(WIDTH, HIDDEN, bias=False)
        back, _, _ = made.matrix(HIDDEN, WIDTH, bias=False, fmt=down)
        x, _ = made.vectors(rows, HIDDEN)
        mixture = MixtureLayer(selection, up, back, None, Activation("silu"))
        append_experts(made.linear, MixtureCall("ffn", mixture, Activations(x), None, None, x))
        kernels.append(made.kernels())
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
@pytest.mark.parametrize("case", CASES)
def test_a_mixture_is_the_weighted_sum_of_its_experts(
    bench: ExpertsBench, case: str, allowed: float
) -> None:
    check_mixture(bench, case, allowed)


@pytest.mark.parametrize("case", ["qwen3", "llama 4"])
@pytest.mark.parametrize(
    ("rows", "exact", "together", "allowed"),
    [
        *((rows, False, together, 1e-3) for rows in (2, 5, 8) for together in (False, True)),
        *((rows, False, False, 4e-3) for rows in (9, 16, 40)),
        (40, True, False, 1e-5),
    ],
)
def test_any_number_of_rows(
    bench: ExpertsBench, case: str, allowed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many logits as well: from 9 rows on."""
    monkeypatch.setattr(routers, "MANY_LOGITS", 8 * EXPERTS)
    check_mixture(bench, case, allowed)


def check_mixture(bench: ExpertsBench, case: str, allowed: float) -> None:
    """A router and its experts against numpy."""
    selection, kind, norm, router_type, bias, weigh_input = CASES[case]
    f = Activation(kind, limit=1.5 if kind == "swiglu_oai" else 0.0)  # type: ignore[arg-type]
    router, r, r_bias = bench.matrix(1, HIDDEN, bias, fmt=router_type)
    gate, g, g_bias = bench.matrix(WIDTH, HIDDEN, bias)
    up, u, u_bias = bench.matrix(WIDTH, HIDDEN, bias)
    down, d, d_bias = bench.matrix(HIDDEN, WIDTH, bias, fmt="Q5_0")
    x_at, x = bench.vectors(bench.rows, HIDDEN)
    y, _ = bench.vectors(bench.rows, HIDDEN)
    layer, weights = bench.norm(norm)
    vectors = Activations(x_at)
    append_router(bench.linear, "router", RouterLayer(selection, router), vectors, layer)
    mixture = MixtureLayer(selection, up, down, gate, f, weigh_input)
    append_experts(bench.linear, MixtureCall("ffn", mixture, vectors, layer, x_at, y))
    bench.run()

    normed = norm(x, **weights)
    logits = normed @ r[:, 0].T + r_bias[:, 0]
    expert, weight = selection(logits)
    found = bench.work["expert"].download(np.uint32, expert.shape)
    np.testing.assert_array_equal(found, expert)
    before, after = (weight, 1.0) if weigh_input else (np.ones_like(weight), weight[:, :, None])
    scaled = normed[:, None] * before[:, :, None]
    middle = f.gated(through(g, g_bias, expert, scaled), through(u, u_bias, expert, scaled))
    expected = x + (after * through(d, d_bias, expert, middle)).sum(axis=1)
    assert deviation(y, expected) < allowed


@every_mode
def test_without_a_gate_and_with_a_choice_bias(bench: ExpertsBench, allowed: float) -> None:
    """Of other experts than the logits alone would choose; nothing is added."""
    selection = Selection(
        EXPERTS, 2, "sigmoid", True, 2.5, bias=True, groups=3, groups_used=2, expert_scale=True
    )
    router, r, _ = bench.matrix(1, HIDDEN, bias=False, fmt="F32")
    up, u, u_bias = bench.matrix(WIDTH, HIDDEN, bias=False)
    down, d, d_bias = bench.matrix(HIDDEN, WIDTH, bias=False, fmt="F16")
    choice_at, choice_bias = bench.vectors(EXPERTS)
    scale_at, expert_scale = bench.vectors(EXPERTS)
    x_at, x = bench.vectors(bench.rows, HIDDEN)
    y, _ = bench.vectors(bench.rows, HIDDEN)
    vectors, relu2 = Activations(x_at), Activation("relu2")
    layer = RouterLayer(selection, router, choice_at, scale_at, scale=0.5)
    append_router(bench.linear, "router", layer, vectors, None)
    mixture = MixtureLayer(selection, up, down, None, relu2)
    append_experts(bench.linear, MixtureCall("ffn", mixture, vectors, None, None, y))
    bench.run()
    expert, weight = selection(0.5 * x @ r[:, 0].T, choice_bias, expert_scale)
    middle = relu2(through(u, u_bias, expert, x[:, None]))
    expected = (weight[:, :, None] * through(d, d_bias, expert, middle)).sum(axis=1)
    assert deviation(y, expected) < 2 * allowed


@every_mode
def test_gate_and_up_of_different_types(bench: ExpertsBench, allowed: float) -> None:
    selection = Selection(EXPERTS, 2)
    router, r, _ = bench.matrix(1, HIDDEN, bias=False, fmt="F32")
    gate, g, none = bench.matrix(WIDTH, HIDDEN, bias=False, fmt="Q4_0")
    up, u, _ = bench.matrix(WIDTH, HIDDEN, bias=False)
    down, d, d_bias = bench.matrix(HIDDEN, WIDTH, bias=False)
    x_at, x = bench.vectors(bench.rows, HIDDEN)
    y, _ = bench.vectors(bench.rows, HIDDEN)
    silu, vectors = Activation("silu"), Activations(x_at)
    append_router(bench.linear, "router", RouterLayer(selection, router), vectors, None)
    mixture = MixtureLayer(selection, up, down, gate, silu)
    append_experts(bench.linear, MixtureCall("ffn", mixture, vectors, None, x_at, y))
    bench.run()
    expert, weight = selection(x @ r[:, 0].T)
    rows = x[:, None]
    middle = silu.gated(through(g, none, expert, rows), through(u, none, expert, rows))
    expected = x + (weight[:, :, None] * through(d, d_bias, expert, middle)).sum(axis=1)
    assert deviation(y, expected) < 2 * allowed


@pytest.mark.parametrize("rows", [9, 16, 40])
@pytest.mark.parametrize("norm", [None, RMS, LAYER], ids=["no norm", "rms", "layer norm"])
def test_many_logits_are_a_product_of_their_own(
    emulator: Device, rows: int, norm: Norm | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In f32: with weights rounded to f16 the logits would be off by 3e-4."""
    monkeypatch.setattr(routers, "MANY_LOGITS", 8 * EXPERTS)
    made = ExpertsBench(emulator, rows, exact=False)
    selection = Selection(EXPERTS, 3)
    router, r, bias = made.matrix(1, HIDDEN, bias=True, fmt="F32")
    x_at, x = made.vectors(rows, HIDDEN)
    layer, weights = (None, {}) if norm is None else made.norm(norm)
    before = RouterLayer(selection, router, scale=0.5)
    append_router(made.linear, "router", before, Activations(x_at), layer)
    names = ["router_logits", "select_experts"]
    assert made.kernels() == (["normalise", *names] if norm else names)
    made.run()
    logits = 0.5 * (x if norm is None else norm(x, **weights)) @ r[:, 0].T + bias[:, 0]
    assert deviation(made.work["router logits"], logits) < 2e-6
    expert, _ = selection(logits)
    np.testing.assert_array_equal(made.work["expert"].download(np.uint32, expert.shape), expert)
    made.close()


@pytest.mark.parametrize(
    ("rows", "exact", "kernel"),
    [
        (512, False, "router_logits"),
        (8, False, "route_experts"),
        (64, False, "route_experts"),
        (512, True, "route_experts"),
    ],
)
def test_who_makes_the_logits(emulator: Device, rows: int, exact: bool, kernel: str) -> None:
    made = ExpertsBench(emulator, rows, exact, count=128)
    router, _, _ = made.matrix(1, HIDDEN, bias=False, each=128, fmt="F32")
    x, _ = made.vectors(rows, HIDDEN)
    layer = RouterLayer(Selection(128, 4), router)
    append_router(made.linear, "router", layer, Activations(x), None)
    assert made.kernels()[0] == kernel
    made.close()
