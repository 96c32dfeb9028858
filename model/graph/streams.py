"""Operations of hyper-connections: a residual of several streams, side by side in a row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from urdir.model.families.layers import HyperConnection, StreamJoin
from urdir.model.graph.evaluation import Evaluation, Floats
from urdir.model.graph.op import Op
from urdir.model.graph.tensor import Tensor
from urdir.ptxgen.kernels.streams import (
    STREAMS,
    adding_weights,
    joining_weights,
    mixes_of,
    weights_of,
)


@dataclass(frozen=True, slots=True, eq=False)
class Widen(Op):
    """y (rows, 4 * width) = x in each stream."""

    word = "widen"
    x: Tensor

    def __post_init__(self) -> None:
        self._check(self.y.width == STREAMS * self.x.width, "not four streams")

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        return np.tile(x[0], (1, STREAMS))


@dataclass(frozen=True, slots=True, eq=False)
class JoinStreams(Op):
    """y (rows, width) = the mean of the streams x, or their sum weighted by ``mixes`` (rows, 4)."""

    word = "join_streams"
    x: Tensor
    mixes: Tensor | None = None
    of: StreamJoin | None = None

    def __post_init__(self) -> None:
        self._check(self.x.width == STREAMS * self.y.width, "not four streams")
        self._check((self.mixes is None) == (self.of is None), "mixes go with weights")

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        if self.of is None:
            made: Floats = _apart(x[0]).mean(axis=1)
            return made
        scale, base = at.vector(self.of.scale), at.vector(self.of.base)
        weights = joining_weights(x[1], scale, base, self.of.eps)
        joined: Floats = np.einsum("rs,rsc->rc", weights, _apart(x[0]))
        return joined


@dataclass(frozen=True, slots=True, eq=False)
class ReadStreams(Op):
    """y (rows, width) = the sum of the streams x, weighted by ``mixes`` (rows, 24 or 8)."""

    word = "read_streams"
    x: Tensor
    mixes: Tensor
    of: HyperConnection

    def __post_init__(self) -> None:
        self._check(self.x.width == STREAMS * self.y.width, "not four streams")
        mixes = mixes_of(self.of.iterations)
        self._check(self.mixes.width == mixes, f"not {mixes} mixes")

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        made: Floats = np.einsum("rs,rsc->rc", _weights(at, self.of, x[1])[0], _apart(x[0]))
        return made


@dataclass(frozen=True, slots=True, eq=False)
class WriteStreams(Op):
    """y = the streams x mixed with each other, plus ``made`` (rows, width), the block's result, in
    each, all weighted by ``mixes``."""

    word = "write_streams"
    x: Tensor
    made: Tensor
    mixes: Tensor
    of: HyperConnection

    def __post_init__(self) -> None:
        self._check_same(self.x)
        self._check(self.x.width == STREAMS * self.made.width, "not four streams")

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        _, post, comb = _weights(at, self.of, x[2])
        mixed = np.einsum("rsd,rsc->rdc", comb, _apart(x[0]))
        made: Floats = (mixed + post[:, :, None] * x[1][:, None]).reshape(x[0].shape)
        return made


@dataclass(frozen=True, slots=True, eq=False)
class AddToStreams(Op):
    """y = the streams x plus ``made`` (rows, width), the block's result, weighted for each stream
    by 2 sigmoid(``mixes`` / 4), (rows, 4)."""

    word = "add_to_streams"
    x: Tensor
    made: Tensor
    mixes: Tensor

    def __post_init__(self) -> None:
        self._check_same(self.x)
        self._check(self.x.width == STREAMS * self.made.width, "not four streams")
        self._check(self.mixes.width == STREAMS, f"not {STREAMS} mixes")

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        added = adding_weights(x[2])[:, :, None] * x[1][:, None]
        made: Floats = x[0] + added.reshape(x[0].shape)
        return made


def _apart(x: Floats) -> Floats:
    return x.reshape(len(x), STREAMS, -1)


def _weights(at: Evaluation, of: HyperConnection, mixes: Floats) -> tuple[Floats, Floats, Floats]:
    scale, base = at.vector(of.scale), at.vector(of.base)
    return weights_of(mixes, scale, base, of.iterations, of.eps, of.magnitude)
