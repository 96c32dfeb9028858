"""Operations that choose which cached tokens a row attends to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from urdir.model.families.attention import Indexer
from urdir.model.graph.evaluation import Evaluation, Floats
from urdir.model.graph.ops import Op
from urdir.model.graph.tensor import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Select(Op):
    """y (rows, most) u32 = the tokens with the highest index scores of each row.

    ``q`` (rows, heads * dim) and ``k`` (rows, dim), normed, are turned; k goes into the index cache
    of ``layer``. ``weights`` (rows, heads). While evaluated, y are positions in order, and the
    number of rows where a row has fewer tokens; on the device slots in the layer's cache.
    """

    word = "select"
    q: Tensor
    k: Tensor
    weights: Tensor
    indexer: Indexer
    layer: int

    def __post_init__(self) -> None:
        of = self.indexer
        widths = (self.q.width, self.k.width, self.weights.width)
        self._check(widths == (of.heads * of.dim, of.dim, of.heads), "the widths differ")

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        of, rows = self.indexer, len(x[0])
        table = at.turns(of.rope)
        turn = of.rope.rotation.turn
        q = turn(x[0].reshape(rows, of.heads, of.dim), at.positions, table)
        k = turn(x[1][:, None], at.positions, table)[:, 0]
        products = np.maximum(np.einsum("rhd,kd->rhk", q, k), 0)
        scores = np.einsum("rhk,rh->rk", products, x[2])
        scores[at.positions[None, :] > at.positions[:, None]] = -np.inf
        chosen = np.full((rows, of.most), float(rows))
        for row, position in enumerate(at.positions.tolist()):
            best = np.argsort(-scores[row, : position + 1], kind="stable")[: of.most]
            chosen[row, : len(best)] = np.sort(best)
        return chosen


@dataclass(frozen=True, slots=True, eq=False)
class CacheIndex(Select):
    """Index keys alone, into the cache; y are the queries, which nothing reads."""

    word = "cache_index"

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        return x[0]
