"""Hyper-connections: a residual of several streams, which each block reads and writes by weights of
its own (mHC, arXiv 2512.24880)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from urdir.ptxgen.limits import GRID_ROWS, POSITIVE, limited
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, Tolerance, ceil_div

#: How many streams there are.
STREAMS = 4
#: Numbers of a row that weights are made of: to read, to write, and from each stream to each.
MIXES = STREAMS * (2 + STREAMS)
THREADS = 128

Kind = Literal["widen", "read", "write", "mean", "join", "add"]


@dataclass(frozen=True)
class Streams(KernelSpec):
    """A step of hyper-connections, for each row of ``cols`` values.

    - "widen": y (rows, 4, cols) = x (rows, cols) in each stream;
    - "read": y (rows, cols) = the sum of pre[i] * x[i] over the streams x (rows, 4, cols);
    - "write": y[d] (rows, 4, cols) = post[d] * made + the sum of comb[s, d] * x[s];
    - "mean": y (rows, cols) = the mean of the streams;
    - "join": as "read", with ``mixes`` (rows, 4), ``scale`` (1,) and ``base`` (4,);
    - "add": y[d] (rows, 4, cols) = x[d] + ``magnitude`` sigmoid(mixes[d] / 4) * made, with
      ``mixes`` (rows, 4) alone.

    Weights are made of ``mixes`` (rows, 24), ``scale`` (3,) and ``base`` (24,): with m = mixes *
    scale + base, in three parts, pre = sigmoid(m[:4]) + ``eps``, post = 2 sigmoid(m[4:8]), and comb
    [source, target] the softmax of m[8:] over targets, plus ``eps``, made doubly stochastic by
    ``iterations`` of Sinkhorn: divided by the sums over sources, then in each further one by the
    sums over targets and over sources, all sums plus ``eps``.

    With 0 ``iterations`` comb is the identity, ``mixes`` and ``base`` have 8 numbers, ``scale`` has
    two, and post is ``magnitude`` sigmoid(m[4:8]) + ``eps``.
    """

    kind: Kind
    cols: int
    rows: int = 1
    iterations: int = 1
    eps: float = 1e-6
    magnitude: float = 2.0

    name = "streams"
    limits = limited(kind=get_args(Kind), cols=POSITIVE, rows=GRID_ROWS, iterations=range(1 << 31))

    @property
    def params(self) -> tuple[Param, ...]:
        wide, narrow = ("rows", STREAMS, "cols"), ("rows", "cols")
        x = Param("x", "f32", narrow if self.kind == "widen" else wide, Access.IN)
        is_wide = self.kind in ("widen", "write", "add")
        y = Param("y", "f32", wide if is_wide else narrow, Access.OUT)
        made = (Param("made", "f32", narrow, Access.IN),) if self.kind in ("write", "add") else ()
        weights: tuple[Param, ...] = ()
        if self.kind == "add":
            weights = (Param("mixes", "f32", ("rows", STREAMS), Access.IN),)
        if self.kind in ("read", "write", "join"):
            mixes = STREAMS if self.kind == "join" else mixes_of(self.iterations)
            scales = {STREAMS: 1, 2 * STREAMS: 2}.get(mixes, 3)
            weights = (
                Param("mixes", "f32", ("rows", mixes), Access.IN),
                Param("scale", "f32", (scales,), Access.IN),
                Param("base", "f32", (mixes,), Access.IN),
            )
        return (x, *made, *weights, y)

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(grid=(ceil_div(self.cols, THREADS), self.rows, 1), block=(THREADS, 1, 1))

    @property
    def tolerance(self) -> Tolerance:
        # ex2.approx, and divisions of each iteration
        return Tolerance(rtol=1e-6 if self.kind in ("widen", "mean") else 2e-6)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        x = inputs["x"].astype(np.float64)
        if self.kind == "widen":
            y = np.repeat(x[:, None], STREAMS, axis=1)
        elif self.kind == "mean":
            y = x.mean(axis=1)
        elif self.kind == "join":
            pre = joining_weights(inputs["mixes"], inputs["scale"], inputs["base"], self.eps)
            y = np.einsum("rs,rsc->rc", pre, x)
        elif self.kind == "add":
            post = adding_weights(inputs["mixes"], self.magnitude)
            y = x + post[:, :, None] * inputs["made"].astype(np.float64)[:, None]
        else:
            of = inputs["mixes"], inputs["scale"], inputs["base"]
            pre, post, comb = weights_of(*of, self.iterations, self.eps, self.magnitude)
            if self.kind == "read":
                y = np.einsum("rs,rsc->rc", pre, x)
            else:
                made = inputs["made"].astype(np.float64)
                y = post[:, :, None] * made[:, None] + np.einsum("rsd,rsc->rdc", comb, x)
        return {"y": y.astype(np.float32)}

    @classmethod
    def examples(cls) -> dict[str, Streams]:
        return {
            "read": cls("read", 131, 3),
            "write": cls("write", 131, 3, iterations=2),
            "widen": cls("widen", 37, 2),
            "mean": cls("mean", 130, 2),
            "join": cls("join", 133, 3, eps=1e-3),
            "add": cls("add", 133, 3, magnitude=1.5),
            "read unmixed": cls("read", 131, 3, iterations=0, eps=1e-3),
            "write unmixed": cls("write", 131, 3, iterations=0, eps=1e-3, magnitude=1.5),
            "twenty iterations": cls("write", 260, 2, iterations=20, eps=1e-5),
        }

    def flops(self) -> int:
        each = {
            "widen": 0,
            "read": 2 * STREAMS,
            "join": 2 * STREAMS,
            "write": 2 * STREAMS * (STREAMS + 1),
        }
        return self.rows * self.cols * each.get(self.kind, STREAMS)


def mixes_of(iterations: int) -> int:
    """Numbers of a row that weights are made of, with this many iterations."""
    return MIXES if iterations else 2 * STREAMS


def weights_of(
    mixes: Array, scale: Array, base: Array, iterations: int, eps: float, magnitude: float = 2.0
) -> tuple[Array, Array, Array]:
    """Weights in float64: pre and post (rows, 4), and comb (rows, source, target)."""
    n = STREAMS
    of = np.repeat(scale.astype(np.float64), [n, n, n * n][: len(scale)])
    m = mixes.astype(np.float64) * of + base
    pre, post = (1.0 / (1.0 + np.exp(-m[:, i : i + n])) for i in (0, n))
    if not iterations:
        return pre + eps, magnitude * post + eps, np.broadcast_to(np.eye(n), (len(m), n, n))
    comb = np.exp(m[:, 2 * n :].reshape(-1, n, n))
    comb = comb / comb.sum(axis=2, keepdims=True) + eps
    comb = comb / (comb.sum(axis=1, keepdims=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(axis=2, keepdims=True) + eps)
        comb = comb / (comb.sum(axis=1, keepdims=True) + eps)
    return pre + eps, magnitude * post, comb


def adding_weights(mixes: Array, magnitude: float = 2.0) -> Array:
    """Weights (rows, 4) of what a block adds to each stream, in float64."""
    weights: Array = magnitude / (1.0 + np.exp(-mixes.astype(np.float64) / STREAMS))
    return weights


def joining_weights(mixes: Array, scale: Array, base: Array, eps: float) -> Array:
    """Weights (rows, 4) of the streams where they are joined, in float64."""
    pre: Array = 1.0 / (1.0 + np.exp(-(mixes.astype(np.float64) * scale + base)))
    return pre + eps
