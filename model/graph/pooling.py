"""The operation that makes one vector of the states of a text."""

from __future__ import annotations

from dataclasses import dataclass

from urdir.model.graph.evaluation import Evaluation, Floats
from urdir.model.graph.op import Op
from urdir.model.graph.tensor import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Pool(Op):
    """y (texts, width) = the mean of the rows of each text."""

    word = "pool"
    x: Tensor

    def __post_init__(self) -> None:
        self._check(self.x.width == self.y.width, "the widths differ")

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        mean: Floats = x[0].mean(axis=0, keepdims=True)
        return mean
