"""Operations of mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from urdir.model.families.adapters import AdapterRoom
from urdir.model.families.feed_forward import Router
from urdir.model.families.stored import Linear
from urdir.model.graph.evaluation import Evaluation, Floats
from urdir.model.graph.op import Op
from urdir.model.graph.tensor import Tensor
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.experts.keep_experts import LEAST
from urdir.ptxgen.kernels.experts.selection import Selection


@dataclass(frozen=True, slots=True, eq=False)
class Route(Op):
    """y (rows, experts) = the weights of the experts that the ``router`` chooses for each row of x,
    times ``scale``; 0 of the others. The adapters of its matrix are as those of a `Product`."""

    word = "route"
    x: Tensor
    router: Router
    scale: float = 1.0
    low: Tensor | None = None
    room: AdapterRoom | None = None

    def __post_init__(self) -> None:
        self._check(self.y.width == self.router.experts, f"{self.router.experts} experts")
        self._check(self.x.width == self.router.linear.cols, "the matrix has other columns")
        self._check(self.router.linear.order is None, "the matrix has an order of columns")

    @property
    def selection(self) -> Selection:
        """How logits choose, with the scale."""
        of = self.router.selection
        return replace(of, scale=of.scale * self.scale)

    @property
    def of_networks(self) -> Selection:
        """What `Experts` need of the selection: numbers of networks."""
        return replace(self.selection, experts=self.router.experts, shares=1)

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        of = self.router
        logits = _with_bias(at, of.linear, x[0] @ at.matrix(of.linear.matrix).T * of.norm_scale)
        if self.room is not None:
            logits = logits + at.expanded(of.linear, x[1])
        if of.by_token is not None:
            table = at.vector(of.by_token).reshape(-1, of.used)
            kept = (table[at.tokens][:, :, None] == np.arange(of.linear.rows)).any(axis=1)
            logits = np.where(kept, logits, LEAST)
        bias = None if of.choice_bias is None else at.vector(of.choice_bias)
        factors = None if of.expert_scale is None else at.vector(of.expert_scale)
        chosen, weights = of.selection(logits, bias, factors)
        weights = weights * self.scale
        y = np.zeros((len(logits), of.experts))
        np.add.at(y, (np.arange(len(y))[:, None], chosen), weights)
        return y


@dataclass(frozen=True, slots=True, eq=False)
class Experts(Op):
    """y = the sum of the experts' down(f(gate x) * up x), or down(f(up x)) without a ``gate``, by
    the weights of ``routing``; ``weigh_input``: a weight multiplies x instead.

    Matrices have the rows of all experts, one after the other, and so have their biases; some may
    have ``room`` for adapters. The columns of gate and up may be in orders, one of each expert.
    """

    word = "experts"
    x: Tensor
    routing: Tensor
    selection: Selection
    up: Linear
    down: Linear
    gate: Linear | None
    activation: Activation
    weigh_input: bool = False
    room: AdapterRoom | None = None

    def __post_init__(self) -> None:
        count = self.selection.experts
        self._check(self.routing.width == count, f"{count} experts")
        self._check(self.x.width == self.up.cols, "the matrices have other columns")
        self._check(self.y.width == self.down.rows // count, "the matrices have other rows")
        self._check(self.down.order is None, "the last matrix has an order of columns")

    @property
    def is_ordered(self) -> bool:
        """Whether columns of gate or up are in orders of their own."""
        return any(of is not None and of.order is not None for of in self.matrices)

    @property
    def matrices(self) -> tuple[Linear | None, ...]:
        """Gate, up and down."""
        return (self.gate, self.up, self.down)

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        values, routing = x
        y = np.zeros((len(values), self.y.width))
        for row, expert in zip(*np.nonzero(routing), strict=True):
            weight = float(routing[row, expert])
            y[row] += self._expert(at, int(expert), values[row], weight)
        return y

    def _expert(self, at: Evaluation, expert: int, x: Floats, weight: float) -> Floats:
        before = weight if self.weigh_input else 1.0
        up = self._product(at, self.up, expert, x * before)
        if self.gate is None:
            hidden = np.asarray(self.activation(up), np.float64)
        else:
            gate = self._product(at, self.gate, expert, x * before)
            hidden = self.activation.gated(gate, up)
        down = self._product(at, self.down, expert, hidden)
        return down if self.weigh_input else down * weight

    def _product(self, at: Evaluation, of: Linear, expert: int, x: Floats) -> Floats:
        rows = of.rows // self.selection.experts
        part = slice(expert * rows, (expert + 1) * rows)
        ordered = x
        if of.order is not None:
            ordered = x[at.vector(of.order).reshape(-1, len(x))[expert].astype(np.intp)]
        y: Floats = at.matrix(of.matrix)[part] @ ordered
        if self.room is not None and self.room.has(of):
            y = y + at.adapted(of, expert, part, x)
        return y if of.bias is None else y + at.vector(of.bias)[part]


def _with_bias(at: Evaluation, of: Linear, x: Floats) -> Floats:
    return x if of.bias is None else x + at.vector(of.bias)
