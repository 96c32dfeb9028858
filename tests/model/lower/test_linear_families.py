"""Products as families have them, with what goes before and after: against numpy, in every mode and
for any rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.model.lower.workbench import Workbench
from urdir.driver.device import Device
from urdir.driver.operation import Launch
from urdir.model.graph.ops import Activate, Add, Bound, Gate, Product, Scale, ScaleBy
from urdir.model.graph.ops import Norm as Normed
from urdir.model.graph.tensor import Tensor
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.linear.epilogue.norm import BeginNorm
from urdir.ptxgen.kernels.linear.prologue.norm import BegunNorm
from urdir.ptxgen.kernels.norm import Norm

HIDDEN, WIDTH = 96, 160
SILU = Activation("silu")
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
    """Buffers, random matrices and vectors, and a graph of products for some rows."""

    def __init__(self, device: Device, rows: int, exact: bool, width: int = WIDTH) -> None:
        super().__init__(device, rows, exact, seed=3)

    def tensor(self, name: str, cols: int) -> Tensor:
        return Tensor(name, self.rows, cols)

    def normed(self, x: Tensor, of: Any, name: str = "normed") -> Tensor:
        return self.add(Normed, "norm", self.tensor(name, x.width), x, of)

    def product(self, label: str, x: Tensor, of: Any, y: Tensor | str) -> Tensor:
        to = self.tensor(y, of.rows) if isinstance(y, str) else y
        return self.add(Product, label, to, x, of)


@pytest.fixture
def bench(emulator: Device, rows: int, exact: bool) -> Iterator[LinearBench]:
    made = LinearBench(emulator, rows, exact)
    yield made
    made.close()


@every_mode
def test_layer_norm_gelu_and_biases(bench: LinearBench, allowed: float) -> None:
    """As in gpt2 and starcoder2: x + down(gelu(up(norm(x)) + b)) + c."""
    x, xs = bench.input(HIDDEN)
    up, u, u_bias = bench.linear(WIDTH, HIDDEN, bias=True)
    down, d, d_bias = bench.linear(HIDDEN, WIDTH, bias=True)
    norm, weights = bench.norm(LAYER, HIDDEN)
    gelu = Activation("gelu")
    before = bench.product("up", bench.normed(x, norm), up, "gate")
    # many rows are left packed for the next product
    own = bench.out(WIDTH) if bench.rows < 12 else bench.tensor("up", WIDTH)
    middle = bench.add(Activate, "up", own, before, gelu)
    product = bench.product("down", middle, down, "branch")
    half = bench.add(Scale, "down", bench.tensor("branch", HIDDEN), product, 0.5)
    y = bench.add(Add, "sum", bench.out(HIDDEN), x, half)
    kernels = bench.run()
    inner = gelu(LAYER(xs, **weights) @ u.T + u_bias)
    if bench.rows < 12:
        bench.compare(middle, inner, allowed)
    bench.compare(y, xs + 0.5 * (inner @ d.T + d_bias), allowed)
    if bench.rows == 1:
        assert kernels == ["gemv", "gemv"]


@pytest.mark.turns(5)
@every_mode
@pytest.mark.parametrize("biases", [(False, False), (True, True), (True, False)])
def test_gated_by_another_activation(
    bench: LinearBench, biases: tuple[bool, bool], allowed: float
) -> None:
    """As in gemma; with biases as in gpt-oss. One bias of two takes two products."""
    x, xs = bench.input(HIDDEN)
    gate, g, g_bias = bench.linear(WIDTH, HIDDEN, biases[0])
    up, u, u_bias = bench.linear(WIDTH, HIDDEN, biases[1])
    norm, weights = bench.norm(RMS, HIDDEN)
    gelu, vectors = Activation("gelu"), bench.normed(x, norm)
    pair = bench.product("pair", vectors, gate, "gate"), bench.product("pair", vectors, up, "up")
    y = bench.add(Gate, "gate", bench.out(WIDTH), *pair, gelu)
    kernels = bench.run()
    values = RMS(xs, **weights)
    bench.compare(y, gelu.gated(values @ g.T + g_bias, values @ u.T + u_bias), 2 * allowed)
    if bench.rows < 12:
        assert len(kernels) == (1 if biases[0] == biases[1] else 2)


@every_mode
def test_some_matrices_have_biases_and_all_a_clamp(bench: LinearBench, allowed: float) -> None:
    """Without weights of the norm, as in olmo."""
    x, xs = bench.input(HIDDEN)
    given = [bench.linear(rows, HIDDEN, bias) for rows, bias in ((48, False), (16, True))]
    norm, _ = bench.norm(bare := Norm("layer", 1e-5, weight=False), HIDDEN)
    vectors, outs = bench.normed(x, norm), []
    for name, (matrix, _, _) in zip(("gate", "up"), given, strict=True):
        product = bench.product("qkv", vectors, matrix, name)
        outs.append(bench.add(Bound, "qkv", bench.out(matrix.rows), product, clamp=1.0))
    kernels = bench.run()
    for out, (_, weights, bias) in zip(outs, given, strict=True):
        plain = bare(xs) @ weights.T + bias
        assert np.abs(plain).max() > 1
        bench.compare(out, np.clip(plain, -1, 1), allowed)
    if bench.rows == 1:
        assert kernels == ["gemv"]


@pytest.mark.turns(6, which=(0, 3, 5))
@every_mode
def test_norms_after_a_block_complete_the_next_one(bench: LinearBench, allowed: float) -> None:
    """As in gemma2: y = x + norm(o h); logits = cap(next(y)), with no launch for the next norm."""
    x, xs = bench.input(HIDDEN)
    heads, hs = bench.input(WIDTH, "heads")
    o, w, _ = bench.linear(HIDDEN, WIDTH)
    head, logit_weights, _ = bench.linear(64, HIDDEN)
    after, after_weights = bench.norm(RMS, HIDDEN)
    following, following_weights = bench.norm(LAYER, HIDDEN)
    made = bench.normed(bench.product("o", heads, o, bench.out(HIDDEN)), after)
    half = bench.add(Scale, "post", bench.tensor("normed", HIDDEN), made, 0.5)
    y = bench.add(Add, "post", bench.out(HIDDEN), x, half)
    product = bench.product("head", bench.normed(y, following), head, "gate")
    quarter = bench.add(Scale, "head", bench.tensor("gate", 64), product, 0.25)
    logits = bench.add(Bound, "head", bench.out(64), quarter, softcap=30.0)
    kernels = bench.run()
    hidden = xs + 0.5 * RMS(hs @ w.T, **after_weights)
    bench.compare(y, hidden, allowed)
    capped = 30 * np.tanh(0.25 * (LAYER(hidden, **following_weights) @ logit_weights.T) / 30)
    bench.compare(logits, capped, 2 * allowed)
    assert kernels.count("normalise") + kernels.count("pack_after") == 1


@pytest.mark.parametrize(("rows", "exact"), [(1, True), (3, True)])
def test_a_norm_after_a_block_that_others_read_is_made(bench: LinearBench) -> None:
    """y = x + norm(h); logits = U norm(h)."""
    x, xs = bench.input(HIDDEN)
    h, hs = bench.input(HIDDEN, "branch")
    head, w, _ = bench.linear(64, HIDDEN)
    after, after_weights = bench.norm(RMS, HIDDEN)
    made = bench.normed(h, after)
    y = bench.add(Add, "post", bench.out(HIDDEN), x, made)
    logits = bench.product("head", made, head, bench.out(64))
    bench.run()
    normed = RMS(hs, **after_weights)
    bench.compare(y, xs + normed, 1e-5)
    bench.compare(logits, normed @ w.T, 1e-5)


@every_mode
def test_norms_after_a_block_are_left_to_the_next_product(
    bench: LinearBench, allowed: float
) -> None:
    """Of one row without a scale: y = x + norm(delta) is made by the launch of next(y) times U."""
    x, xs = bench.input(HIDDEN)
    delta, ds = bench.input(HIDDEN, "branch")
    gate, g, g_bias = bench.linear(WIDTH, HIDDEN, bias=True)
    up, u, u_bias = bench.linear(WIDTH, HIDDEN, bias=True)
    after, after_weights = bench.norm(LAYER, HIDDEN)
    following, following_weights = bench.norm(RMS, HIDDEN)
    y = bench.add(Add, "post", bench.out(HIDDEN), x, bench.normed(delta, after))
    vectors = bench.normed(y, following)
    pair = bench.product("pair", vectors, gate, "gate"), bench.product("pair", vectors, up, "up")
    out = bench.add(Gate, "gate", bench.out(WIDTH), *pair, Activation("silu"))
    kernels = bench.run()
    hidden = xs + LAYER(ds, **after_weights)
    bench.compare(y, hidden, 1e-5)
    values = RMS(hidden, **following_weights)
    activated = Activation("silu").gated(values @ g.T + g_bias, values @ u.T + u_bias)
    bench.compare(out, activated, 2 * allowed)
    assert (kernels == ["gemv"]) == (bench.rows == 1)
    assert (kernels[0] in ("normalise", "pack_after")) == (bench.rows > 1)


@pytest.mark.parametrize(("rows", "exact"), [(6, False), (8, False)])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "NVFP4"])
def test_norms_after_a_block_leave_few_rows_packed(bench: LinearBench, kind: str) -> None:
    """y = x + norm(delta), and next(y) for a gated pair, and for three products."""
    x, xs = bench.input(256)
    delta, ds = bench.input(256, "branch")
    matrices = [bench.linear(256, 256, fmt=kind) for _ in range(5)]
    gate, up, *others = (matrix for matrix, _, _ in matrices)
    g, u, *ws = (weights for _, weights, _ in matrices)
    (after, afters), (first, firsts), (second, seconds) = (bench.norm(RMS, 256) for _ in range(3))
    y = bench.add(Add, "post", bench.out(256), x, bench.normed(delta, after))
    pair = bench.normed(y, first)
    products = bench.product("pair", pair, gate, "gate"), bench.product("pair", pair, up, "up")
    middle = bench.add(Gate, "gate", bench.tensor("activated", 256), *products, SILU)
    down, d, _ = bench.linear(256, 256, fmt=kind)
    branch = bench.product("down", middle, down, bench.tensor("down", 256))
    z = bench.add(Add, "post", bench.out(256), y, bench.normed(branch, after))
    vectors = bench.normed(z, second)
    outs = [bench.product("qkv", vectors, of, bench.out(256)) for of in others]
    kernels = bench.run()
    hidden = xs + RMS(ds, **afters)
    bench.compare(y, hidden, 1e-5)
    values = RMS(hidden, **firsts)
    result = SILU.gated(values @ g.T, values @ u.T) @ d.T
    hidden = hidden + RMS(result, **afters)
    bench.compare(z, hidden, 4e-3)
    for out, w in zip(outs, ws, strict=True):
        bench.compare(out, RMS(hidden, **seconds) @ w.T, 8e-3)
    assert kernels == ["pack_after", "gemm_small", "gemm_small", "pack_after", "gemm_small"]


@pytest.mark.parametrize(("rows", "exact"), [(1, False)])
def test_a_sum_is_made_where_no_product_takes_it(bench: LinearBench) -> None:
    """With the factor that follows in place; or with another reader beside the product."""
    x, xs = bench.input(HIDDEN)
    delta, ds = bench.input(HIDDEN, "branch")
    after, weights = bench.norm(RMS, HIDDEN)
    factor, times = bench.vector(1)
    total = bench.add(Add, "post", bench.out(HIDDEN), x, bench.normed(delta, after))
    y = bench.add(ScaleBy, "scale", Tensor("out", 1, HIDDEN), total, factor)
    assert bench.run() == ["normalise", "rescale"]
    bench.compare(total, times * (xs + RMS(ds, **weights)), 1e-5)
    assert y.width == HIDDEN

    matrix, w, _ = bench.linear(WIDTH, HIDDEN)
    total = bench.add(Add, "post", bench.out(HIDDEN), x, bench.normed(delta, after))
    outs = [bench.product(label, total, matrix, bench.out(WIDTH)) for label in ("a", "b")]
    assert bench.run()[2:] == ["normalise", "gemv", "gemv"]
    for out in outs:
        bench.compare(out, (xs + RMS(ds, **weights)) @ w.T, 1e-3)


@pytest.mark.parametrize(("rows", "exact"), [(1, False)])
def test_a_row_too_long_for_the_norms_has_launches_for_them(bench: LinearBench) -> None:
    """Two launches, the second with the norm of the first."""
    cols = 16384
    x, xs = bench.input(cols)
    delta, ds = bench.input(cols, "branch")
    head, w, _ = bench.linear(3, cols)
    after, weights = bench.norm(RMS, cols)
    y = bench.add(Add, "post", bench.out(cols), x, bench.normed(delta, after))
    out = bench.product("head", y, head, bench.out(3))
    assert bench.run()[0] == "normalise"
    hidden = xs + RMS(ds, **weights)
    bench.compare(y, hidden, 1e-5)
    bench.compare(out, hidden @ w.T, 1e-3)


@every_mode
def test_two_products_share_a_norm(bench: LinearBench, allowed: float) -> None:
    """Attention and feed-forward side by side, as in phi2: at most one launch for the norm."""
    x, xs = bench.input(HIDDEN)
    left, lw, _ = bench.linear(32, HIDDEN)
    right, rw, _ = bench.linear(WIDTH, HIDDEN)
    norm, weights = bench.norm(LAYER, HIDDEN)
    a = bench.product("left", bench.normed(x, norm), left, bench.out(32))
    b = bench.product("right", bench.normed(x, norm), right, bench.out(WIDTH))
    kernels = bench.run()
    bench.compare(a, LAYER(xs, **weights) @ lw.T, allowed)
    bench.compare(b, LAYER(xs, **weights) @ rw.T, allowed)
    assert kernels.count("normalise") <= 1


@pytest.mark.parametrize(("rows", "exact"), [(4, False)])
def test_a_begun_norm_is_that_norm_alone(bench: LinearBench) -> None:
    """With other weights it is computed anew."""
    x, _ = bench.input(HIDDEN)
    matrix, _, _ = bench.linear(HIDDEN, HIDDEN)
    norm, _ = bench.norm(RMS, HIDDEN)
    other, _ = bench.norm(RMS, HIDDEN)
    y = bench.add(Add, "o", bench.out(HIDDEN), x, bench.product("o", x, matrix, "branch"))
    for number, of in enumerate((norm, other)):
        bench.product(f"next {number}", bench.normed(y, of), matrix, bench.out(HIDDEN))
    bench.lower()
    made: list[Any] = [op.kernel for op in bench.plan if isinstance(op, Launch)]
    assert made[0].steps.has(BeginNorm)
    assert [kernel.steps.has(BegunNorm) for kernel in made[1:]] == [True, False]


@pytest.mark.parametrize(("rows", "exact"), [(4, False)])
def test_a_norm_that_is_subtracted_from_is_not_begun(bench: LinearBench) -> None:
    x, _ = bench.input(HIDDEN)
    matrix, _, _ = bench.linear(HIDDEN, HIDDEN)
    norm, _ = bench.norm(LAYER, HIDDEN)
    y = bench.add(Add, "o", bench.out(HIDDEN), x, bench.product("o", x, matrix, "branch"))
    bench.product("next", bench.normed(y, norm), matrix, bench.out(HIDDEN))
    assert bench.lower() == ["gemm_small", "normalise", "gemm_small"]


@every_mode
def test_a_norm_that_others_read_is_made(bench: LinearBench, allowed: float) -> None:
    """As where a norm takes the place of the stream: the product does not keep it to itself."""
    x, xs = bench.input(HIDDEN)
    matrix, w, _ = bench.linear(HIDDEN, HIDDEN)
    norm, weights = bench.norm(RMS, HIDDEN)
    stream = bench.add(Normed, "stream_norm", bench.out(HIDDEN, "stream"), x, norm)
    y = bench.add(Add, "o", bench.out(HIDDEN), stream, bench.product("o", stream, matrix, "branch"))
    kernels = bench.run()
    values = RMS(xs, **weights)
    bench.compare(stream, values, 1e-5)
    bench.compare(y, values + values @ w.T, allowed)
    assert kernels[0] in ("normalise", "pack")  # which also leaves the values


@pytest.mark.parametrize(
    ("rows", "fmt", "kernels"),
    [
        (1, "BF16", ["gemv"] * 3),
        (3, "F16", ["gemm_small"] * 3),
        (8, "BF16", ["gemm_small"] * 3),
        (9, "BF16", ["pack"] + ["gemm_wgmma"] * 3),
    ],
)
def test_large_matrices_of_floats(
    emulator: Device, rows: int, fmt: str, kernels: list[str]
) -> None:
    """x + down(silu(gate(norm(x))) up(norm(x))), and another product of its norm, which the last
    but one begins."""
    width = 1024
    bench = LinearBench(emulator, rows, False, width)
    x, xs = bench.input(width)
    gate, up, down, last = (bench.linear(width, width, fmt=fmt) for _ in range(4))
    (norm, weights), (second, more) = bench.norm(RMS, width), bench.norm(RMS, width)
    vectors, silu = bench.normed(x, norm), Activation("silu")
    pair = [bench.product("pair", vectors, of[0], n) for of, n in ((gate, "gate"), (up, "up"))]
    inner = bench.add(Gate, "gate", bench.tensor("gate", width), *pair, silu)
    product = bench.product("down", inner, down[0], "branch")
    stream = bench.add(Add, "sum", bench.out(width, "stream"), x, product)
    y = bench.product("last", bench.normed(stream, second), last[0], bench.out(width))
    assert bench.run() == kernels
    values = RMS(xs, **weights)
    after = xs + silu.gated(values @ gate[1].T, values @ up[1].T) @ down[1].T
    allowed = 2e-3 if rows > 8 else 5e-5
    bench.compare(stream, after, allowed)
    bench.compare(y, RMS(after, **more) @ last[1].T, allowed)
    bench.close()
