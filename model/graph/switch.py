"""The operation of adapters that tokens switch on (Granite Switch), and its evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.model.families.stored import Linear
from urdir.model.families.switch import Switch
from urdir.model.graph.evaluation import Evaluation, Floats, WeightValues
from urdir.model.graph.op import Op


@dataclass(frozen=True, slots=True, eq=False)
class SwitchRows(Op):
    """y (rows, 1) u32 = the tokens that the rows are embedded as. Products of the rows have the
    adapters that the rows' texts have switched on, of the model's own (`with_adapters`)."""

    word = "switch_rows"
    of: Switch
    vocab: int

    def __post_init__(self) -> None:
        self._check(self.y.width == 1, "a token a row")

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        embedded: Floats = self.of.tables(self.vocab)[1][at.tokens, None].astype(np.float64)
        return embedded


class SwitchedEvaluation(Evaluation):
    """An evaluation of a model with a ``switch``, whose products have the adapters of the rows."""

    def __init__(
        self, weights: WeightValues, tokens: Any, switch: Switch, vocab: int, outputs: Any
    ) -> None:
        super().__init__(weights, tokens, outputs)
        self._switch = switch
        self._of_rows = switch.adapters_of(self.tokens, vocab)

    def shrunk(self, of: Sequence[Linear], x: Floats, rank: int) -> Floats:
        """See `Evaluation`."""
        found = np.zeros((len(x), len(of), rank))
        for number, linear in enumerate(of):
            stored = self._switch.matrices_of(linear.matrix).a
            a = self.vector(stored).reshape(stored.shape)
            for row, adapter in enumerate(self._adapters_of(x)):
                found[row, number, : a.shape[1]] = a[adapter] @ x[row]
        return found.reshape(len(x), -1)

    def expanded(self, of: Linear, low: Floats) -> Floats:
        """See `Evaluation`."""
        stored = self._switch.matrices_of(of.matrix).b
        b = self.vector(stored).reshape(stored.shape)
        rows = zip(low[:, : b.shape[2]], self._adapters_of(low), strict=True)
        return np.stack([b[adapter] @ a for a, adapter in rows])

    def _adapters_of(self, x: Floats) -> Any:
        every = self._of_rows
        return every if len(x) == len(every) else every[self.outputs]
