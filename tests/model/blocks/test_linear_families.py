"""Linear layers as other families have them: against numpy, in every mode and for any rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from tests.model.blocks.workbench import Workbench
from urdir.driver import execute
from urdir.driver.device import Device
from urdir.driver.memory import Slice
from urdir.model.blocks.activations import Activations
from urdir.model.memory.norms import NormLayer
from urdir.model.memory.weights import Matrix
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.weights.formats import FORMATS, random_blocks
from urdir.ptxgen.weights.layout import Layout
from urdir.ptxgen.weights.packed import packed_nbytes

Floats = npt.NDArray[np.float64]

HIDDEN, WIDTH, MOST = 96, 160, 12
LAYER, RMS = Norm("layer", 1e-5, bias=True), Norm("rms", 1e-5)
#: Rows, exact, allowed deviation; f16 rounds many rows, 16-bit integers few.
MODES = [
    pytest.param(1, True, 1e-5, id="one row, exact"),
    pytest.param(1, False, 1e-3, id="one row"),
    pytest.param(3, True, 1e-5, id="three rows, exact"),
    pytest.param(3, False, 1e-3, id="three rows"),
    pytest.param(12, True, 1e-5, id="many rows, exact", marks=pytest.mark.slow),
    pytest.param(12, False, 4e-3, id="many rows"),
]
every_mode = pytest.mark.parametrize(("rows", "exact", "allowed"), MODES)


class LinearBench(Workbench):
    """Buffers, random matrices and vectors, and a plan of linear layers for some rows."""

    def __init__(self, device: Device, rows: int, exact: bool) -> None:
        names = ("normed", "delta", "scaled", "summary", "gate", "up")
        sizes = dict.fromkeys(names, 4 * MOST * WIDTH)
        sizes["packed"] = packed_nbytes(MOST, WIDTH)
        super().__init__(device, rows, exact, sizes, seed=3)

    def vectors(self, cols: int, rows: int | None = None) -> tuple[Slice, Floats]:
        """Random vectors: where they are, and what they are."""
        values = self.random.standard_normal((self.rows if rows is None else rows, cols))
        values = values.astype(np.float32)
        return self.place(values), values.astype(np.float64)

    def matrix(self, rows: int, cols: int, bias: bool) -> tuple[Matrix, Floats, Floats]:
        """A random matrix, as numbers, and its bias (zeros if it has none)."""
        layout = Layout(FORMATS["Q8_0"], rows, cols)
        packed = layout.pack(random_blocks(layout.format, rows * cols // 32, self.random))
        at, values = self.vectors(rows, 1) if bias else (None, np.zeros((1, rows)))
        weights = layout.unpack(packed).astype(np.float64)
        return Matrix(layout, self.place(packed), at), weights, values

    def norm(self, norm: Norm, cols: int = HIDDEN) -> tuple[NormLayer, dict[str, Floats]]:
        """A norm with random weights, and these."""
        found = {
            name: self.vectors(cols, 1)
            for name, present in (("weight", norm.weight), ("bias", norm.bias))
            if present
        }
        layer = NormLayer(norm, **{name: at for name, (at, _) in found.items()})
        return layer, {name: values for name, (_, values) in found.items()}

    def out(self, cols: int) -> Slice:
        """Room for a result."""
        return self.place(np.zeros((self.rows, cols), np.float32))

    def run(self) -> None:
        """All of the plan."""
        with self.device.create_stream() as stream:
            execute.run(self.plan, self.device, stream)
            stream.synchronize()

    def compare(self, y: Slice, expected: Floats, allowed: float) -> None:
        """The RMS deviation, relative to that of what is expected."""
        found = y.download(np.float32, expected.shape)
        error = np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2))
        assert error < allowed, f"{error} of {allowed}"


@pytest.fixture
def bench(emulator: Device, rows: int, exact: bool) -> Iterator[LinearBench]:
    made = LinearBench(emulator, rows, exact)
    yield made
    made.close()


@every_mode
def test_layer_norm_gelu_and_biases(bench: LinearBench, allowed: float) -> None:
    """As in gpt2 and starcoder2: x + down(gelu(up(norm(x)) + b)) + c."""
    x_at, x = bench.vectors(HIDDEN)
    up, u, u_bias = bench.matrix(WIDTH, HIDDEN, bias=True)
    down, d, d_bias = bench.matrix(HIDDEN, WIDTH, bias=True)
    norm, weights = bench.norm(LAYER)
    middle, y = bench.out(WIDTH), bench.out(HIDDEN)
    gelu = Activation("gelu")
    bench.linear.append("up", [(up, middle)], Activations(x_at), norm, gelu)
    bench.linear.append_residual("down", down, Activations(middle), x_at, y, None, scale=0.5)
    bench.run()
    inner = gelu(LAYER(x, **weights) @ u.T + u_bias)
    bench.compare(middle, inner, allowed)
    bench.compare(y, x + 0.5 * (inner @ d.T + d_bias), allowed)
    if bench.rows == 1:
        assert bench.kernels() == ["gemv", "gemv"]


@every_mode
@pytest.mark.parametrize("bias", [False, True])
def test_gated_by_another_activation(bench: LinearBench, bias: bool, allowed: float) -> None:
    """As in gemma; with biases as in gpt-oss."""
    x_at, x = bench.vectors(HIDDEN)
    gate, g, g_bias = bench.matrix(WIDTH, HIDDEN, bias)
    up, u, u_bias = bench.matrix(WIDTH, HIDDEN, bias)
    norm, weights = bench.norm(RMS)
    y, gelu = bench.out(WIDTH), Activation("gelu")
    bench.linear.append_inner("gate_up", gate, up, Activations(x_at), norm, y, gelu)
    bench.run()
    normed = RMS(x, **weights)
    bench.compare(y, gelu.gated(normed @ g.T + g_bias, normed @ u.T + u_bias), 2 * allowed)
    if bench.rows < 12:
        assert len(bench.kernels()) == 1


@every_mode
def test_only_one_of_two_gated_matrices_has_a_bias(bench: LinearBench, allowed: float) -> None:
    x_at, x = bench.vectors(HIDDEN)
    gate, g, g_bias = bench.matrix(WIDTH, HIDDEN, bias=True)
    up, u, _ = bench.matrix(WIDTH, HIDDEN, bias=False)
    y, silu = bench.out(WIDTH), Activation("silu")
    bench.linear.append_inner("gate_up", gate, up, Activations(x_at), None, y)
    bench.run()
    bench.compare(y, silu.gated(x @ g.T + g_bias, x @ u.T), 2 * allowed)


@every_mode
def test_some_matrices_have_biases_and_all_a_clamp(bench: LinearBench, allowed: float) -> None:
    """Without weights of the norm, as in olmo."""
    x_at, x = bench.vectors(HIDDEN)
    given = [bench.matrix(rows, HIDDEN, bias) for rows, bias in ((48, False), (16, True))]
    outs = [bench.out(48), bench.out(16)]
    norm, _ = bench.norm(bare := Norm("layer", 1e-5, weight=False))
    products = [(matrix, out) for (matrix, _, _), out in zip(given, outs, strict=True)]
    bench.linear.append("qkv", products, Activations(x_at), norm, clamp=20.0)
    bench.run()
    for out, (_, weights, bias) in zip(outs, given, strict=True):
        plain = bare(x) @ weights.T + bias
        assert np.abs(plain).max() > 20
        bench.compare(out, np.clip(plain, -20, 20), allowed)
    if bench.rows == 1:
        assert bench.kernels() == ["gemv"]


@pytest.mark.turns(2)
@every_mode
def test_norms_after_a_block_complete_the_next_one(bench: LinearBench, allowed: float) -> None:
    """As in gemma2: y = x + norm(o h); logits = cap(next(y)), with no launch for the next norm."""
    x_at, x = bench.vectors(HIDDEN)
    heads_at, heads = bench.vectors(WIDTH)
    o, w, _ = bench.matrix(HIDDEN, WIDTH, bias=False)
    head, logit_weights, _ = bench.matrix(64, HIDDEN, bias=False)
    after, after_weights = bench.norm(RMS)
    following, following_weights = bench.norm(LAYER)
    delta, y, logits = bench.out(HIDDEN), bench.out(HIDDEN), bench.out(64)
    linear = bench.linear
    linear.append("o", [(o, delta)], Activations(heads_at))
    made = linear.append_norm_after("post", HIDDEN, delta, after, x_at, y, following, scale=0.5)
    assert made.has_completed(following)
    assert not made.has_completed(after)
    assert not made.has_begun(following)
    linear.append("head", [(head, logits)], made, following, scale=0.25, softcap=30.0)
    bench.run()
    hidden = x + 0.5 * RMS(heads @ w.T, **after_weights)
    bench.compare(y, hidden, allowed)
    capped = 30 * np.tanh(0.25 * (LAYER(hidden, **following_weights) @ logit_weights.T) / 30)
    bench.compare(logits, capped, 2 * allowed)
    assert bench.kernels().count("normalise") == 1


@every_mode
def test_norms_after_a_block_are_left_to_the_next_product(
    bench: LinearBench, exact: bool, allowed: float
) -> None:
    """Of one row without a scale: y = x + norm(delta) is made by the launch of next(y) times U."""
    x_at, x = bench.vectors(HIDDEN)
    delta_at, delta = bench.vectors(HIDDEN)
    gate, g, g_bias = bench.matrix(WIDTH, HIDDEN, bias=True)
    up, u, u_bias = bench.matrix(WIDTH, HIDDEN, bias=True)
    after, after_weights = bench.norm(LAYER)
    following, following_weights = bench.norm(RMS)
    y, out, read = bench.out(HIDDEN), bench.out(WIDTH), bench.out(WIDTH)
    linear = bench.linear
    made = linear.defer_norm_after("post", HIDDEN, delta_at, after, x_at, y, following)
    linear.append_inner("gate_up", gate, up, made, following, out)
    linear.append("up", [(up, read)], Activations(y))
    bench.run()
    hidden = x + LAYER(delta, **after_weights)
    bench.compare(y, hidden, 1e-5)
    normed = RMS(hidden, **following_weights)
    activated = Activation("silu").gated(normed @ g.T + g_bias, normed @ u.T + u_bias)
    bench.compare(out, activated, 2 * allowed)
    bench.compare(read, hidden @ u.T + u_bias, allowed)
    if bench.rows == 1:
        assert bench.kernels() == ["gemv", "gemv"]
    else:
        assert bench.kernels()[0] == "normalise"


@pytest.mark.parametrize(("rows", "exact"), [(1, False)])
def test_a_sum_that_is_due_is_made_where_no_product_takes_it(bench: LinearBench) -> None:
    x_at, x = bench.vectors(HIDDEN)
    delta_at, delta = bench.vectors(HIDDEN)
    after, weights = bench.norm(RMS)
    following, following_weights = bench.norm(RMS)
    y = bench.out(HIDDEN)
    linear = bench.linear
    due = linear.defer_norm_after("post", HIDDEN, delta_at, after, x_at, y, following)
    assert not bench.kernels()
    assert not due.has_completed(following)
    made = linear.complete(due)
    assert made.has_completed(following)
    assert linear.complete(made) is made
    scaled = linear.defer_norm_after("scaled", HIDDEN, delta_at, after, x_at, y, None, scale=0.5)
    assert scaled == Activations(y)
    assert bench.kernels() == ["normalise"] * 2
    factor_at, factor = bench.vectors(1, 1)
    other = bench.out(HIDDEN)
    due = linear.defer_norm_after("post", HIDDEN, delta_at, after, x_at, other, following)
    assert due.due is not None
    factored = linear.complete(replace(due, due=replace(due.due, scale=factor_at)))
    assert factored == Activations(other)
    bench.run()
    bench.compare(other, factor * (x + RMS(delta, **weights)), 1e-5)
    bench.compare(y, x + 0.5 * RMS(delta, **weights), 1e-5)
    hidden = x + RMS(delta, **weights)
    assert made.normed is not None
    bench.compare(made.normed, RMS(hidden, **following_weights), 1e-5)


@pytest.mark.parametrize(("rows", "exact"), [(1, False)])
def test_a_row_too_long_for_the_norms_has_launches_for_them(bench: LinearBench) -> None:
    """Two launches, the second with the norm of the first."""
    cols = 16384
    x_at, x = bench.vectors(cols)
    delta_at, delta = bench.vectors(cols)
    head, w, _ = bench.matrix(3, cols, bias=False)
    after, weights = bench.norm(RMS, cols)
    y, out = bench.out(cols), bench.out(3)
    linear = bench.linear
    due = linear.defer_norm_after("post", cols, delta_at, after, x_at, y, None)
    linear.append("head", [(head, out)], due)
    assert bench.kernels()[0] == "normalise"
    bench.run()
    hidden = x + RMS(delta, **weights)
    bench.compare(y, hidden, 1e-5)
    bench.compare(out, hidden @ w.T, 1e-3)


@every_mode
def test_two_layers_share_a_norm(bench: LinearBench, allowed: float) -> None:
    """Attention and feed-forward side by side, as in phi2."""
    x_at, x = bench.vectors(HIDDEN)
    left, lw, _ = bench.matrix(32, HIDDEN, bias=False)
    right, rw, _ = bench.matrix(WIDTH, HIDDEN, bias=False)
    norm, weights = bench.norm(LAYER)
    a, b, room = bench.out(32), bench.out(WIDTH), bench.out(HIDDEN)
    shared = bench.linear.append_norm("norm", HIDDEN, Activations(x_at), norm, room)
    bench.linear.append("left", [(left, a)], shared, norm)
    bench.linear.append("right", [(right, b)], shared, norm)
    bench.run()
    bench.compare(a, LAYER(x, **weights) @ lw.T, allowed)
    bench.compare(b, LAYER(x, **weights) @ rw.T, allowed)
    assert bench.kernels().count("normalise") == 1


@pytest.mark.parametrize(("rows", "exact"), [(4, False)])
def test_a_begun_norm_is_that_norm_alone(bench: LinearBench) -> None:
    """With other weights or another epsilon it is computed anew."""
    x_at, _ = bench.vectors(HIDDEN)
    matrix, _, _ = bench.matrix(HIDDEN, HIDDEN, bias=False)
    norm, _ = bench.norm(RMS)
    y = bench.out(HIDDEN)
    made = bench.linear.append_residual("o", matrix, Activations(x_at), x_at, y, norm)
    assert made.has_begun(norm)
    assert made.has_begun(NormLayer(RMS, norm.weight))
    assert not made.has_begun(NormLayer(Norm("rms", 1e-6), norm.weight))
    assert not made.has_begun(NormLayer(RMS, bench.norm(RMS)[0].weight))
    assert not made.has_completed(norm)
    other, _ = bench.norm(LAYER)
    again = bench.linear.append_residual("o", matrix, Activations(x_at), x_at, y, other)
    assert not again.has_begun(other)
