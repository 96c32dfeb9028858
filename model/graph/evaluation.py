"""Evaluation of a graph in numpy: all tokens of one sequence at once, in float64.

It is the reference of layers and of rules; nothing of it runs in a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from urdir.model.families.rope import RopeConfig
from urdir.model.families.stored import Linear, RelativeBias, StoredMatrix, StoredVector
from urdir.ptxgen.kernels.rotation import turns_table

Floats = np.ndarray[Any, np.dtype[np.float64]]


class WeightValues(Protocol):
    """Weights by their references in a description, in float64."""

    def matrix(self, stored: StoredMatrix) -> Floats:
        """(rows, cols)."""

    def vector(self, stored: StoredVector) -> Floats:
        """(size,)."""


class Evaluation:
    """What operations are evaluated with: the rows' ``tokens``, at positions 0, 1, ...; the
    ``weights``; and which rows' ``outputs`` are wanted. ``cached`` are keys and values (rows,
    heads, dim) by layer. ``adapters`` are the A and B, scaled, of one adapter by tensor."""

    def __init__(
        self,
        weights: WeightValues,
        tokens: Any,
        outputs: Any = slice(None),
        adapters: Mapping[str, tuple[Floats, Floats]] | None = None,
    ) -> None:
        self._weights = weights
        self._adapters = adapters or {}
        self.tokens = np.asarray(tokens)
        self.types = np.zeros(len(self.tokens), np.intp)  # of one text
        self.positions = np.arange(len(self.tokens))
        self.outputs = outputs
        self.cached: dict[int, tuple[Floats, Floats]] = {}

    def matrix(self, of: StoredMatrix) -> Floats:
        """A matrix (rows, cols)."""
        return self._weights.matrix(of)

    def vector(self, of: StoredVector) -> Floats:
        """A vector (size,)."""
        return self._weights.vector(of)

    def linear(self, of: Linear, x: Floats) -> Floats:
        """x W^T (+ bias)."""
        y: Floats = x @ self.matrix(of.matrix).T
        return y if of.bias is None else y + self.vector(of.bias)

    def shrunk(self, of: Sequence[Linear], x: Floats, rank: int) -> Floats:
        """A x of each matrix, side by side, in ``rank`` columns each."""
        found = []
        for linear in of:
            a, _ = self._adapters.get(linear.matrix.name, (np.zeros((0, x.shape[1])),) * 2)
            found.append(np.pad(x @ a.T, ((0, 0), (0, rank - len(a)))))
        return np.concatenate(found, axis=1)

    def expanded(self, of: Linear, low: Floats) -> Floats:
        """B a of a matrix that is a whole tensor."""
        _, b = self._adapters.get(of.matrix.name, (None, np.zeros((of.rows, 0))))
        y: Floats = low[:, : b.shape[1]] @ b.T
        return y

    def adapted(self, of: Linear, expert: int, part: slice, x: Floats) -> Floats:
        """B (A x) of one expert, with A (experts, rank, in) and B of all experts' rows."""
        if of.matrix.name not in self._adapters:
            return np.zeros(part.stop - part.start)
        a, b = self._adapters[of.matrix.name]
        y: Floats = b.reshape(-1, b.shape[-1])[part] @ (a[expert] @ x)
        return y

    def bias(self, of: RelativeBias) -> Floats:
        """A bias by distance, (heads, 2 n + 1)."""
        table: Floats = of.table(self.vector(of.weight).astype(np.float32)).astype(np.float64)
        return table

    def turns(self, rope: RopeConfig) -> Any:
        """The table by which heads are rotated."""
        factors = None
        if rope.factors is not None:
            factors = self.vector(rope.factors).astype(np.float32)
        return turns_table(rope.frequencies(factors))

    def sum_of_ranks(self, x: Floats) -> Floats:
        """Of one rank, which has all."""
        return x

    def columns_of_ranks(self, x: Floats) -> Floats:
        """Of one rank, which has all."""
        return x
