"""Operations on several streams, and sparse gates (Gemma 3n); see `ptxgen.kernels.altup`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from urdir.model.families.stored import StoredVector
from urdir.model.graph.evaluation import Evaluation, Floats
from urdir.model.graph.op import Op
from urdir.model.graph.tensor import Tensor
from urdir.ptxgen.kernels.altup.sparsify import sparse


@dataclass(frozen=True, slots=True, eq=False)
class PredictStreams(Op):
    """y and the other ``results``: x_i + sum over j of coefs[i * streams + j] x_j."""

    word = "predict_streams"
    x: tuple[Tensor, ...]
    coefs: Tensor
    results: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        self._check_same(*self.x, *self.results)
        self._check(self.results[:1] == (self.y,), "y is not the first result")
        self._check(self.coefs.width == len(self.x) ** 2, f"{len(self.x)} streams")

    @property
    def reads(self) -> tuple[Tensor, ...]:
        """The streams and the coefficients."""
        return (*self.x, self.coefs)

    @property
    def makes(self) -> tuple[Tensor, ...]:
        """The predictions."""
        return self.results

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        *streams, coefs = x
        each = coefs.reshape(len(coefs), len(streams), len(streams))
        y = np.stack(streams) + np.einsum("rij,jrc->irc", each, np.stack(streams))
        return np.concatenate(list(y), axis=1)


@dataclass(frozen=True, slots=True, eq=False)
class CorrectStreams(Op):
    """y and the other ``results``: x_i + (coefs[i] + 1) (made - x_0); then z = y * scale."""

    word = "correct_streams"
    x: tuple[Tensor, ...]
    made: Tensor
    coefs: Tensor
    scale: StoredVector
    results: tuple[Tensor, ...]
    z: Tensor

    def __post_init__(self) -> None:
        self._check_same(*self.x, self.made, *self.results, self.z)
        self._check(self.results[:1] == (self.y,), "y is not the first result")
        self._check(self.coefs.width == len(self.x), f"{len(self.x)} streams")

    @property
    def reads(self) -> tuple[Tensor, ...]:
        """The predictions, what the layer made, and the coefficients."""
        return (*self.x, self.made, self.coefs)

    @property
    def makes(self) -> tuple[Tensor, ...]:
        """The streams, and the first one scaled."""
        return (*self.results, self.z)

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        *streams, made, coefs = x
        change = made - streams[0]
        y = [of + (coefs[:, i : i + 1] + 1.0) * change for i, of in enumerate(streams)]
        return np.concatenate([*y, y[0] * at.vector(self.scale)], axis=1)


@dataclass(frozen=True, slots=True, eq=False)
class MatchLength(Op):
    """y = each row of x, as long as that of the ``target``."""

    word = "match_length"
    x: Tensor
    target: Tensor

    def __post_init__(self) -> None:
        self._check_same(self.x, self.target)

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        lengths = [np.linalg.norm(of, axis=1, keepdims=True) for of in x]
        return np.asarray(x[0] * lengths[1] / lengths[0])


@dataclass(frozen=True, slots=True, eq=False)
class Sparsify(Op):
    """y = max(0, x - (mean + ``deviations`` * standard deviation)) of each row of x."""

    word = "sparsify"
    x: Tensor
    deviations: float

    def __post_init__(self) -> None:
        self._check_same(self.x)

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        return sparse(x[0], self.deviations)
