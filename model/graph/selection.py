"""Operations that choose which cached tokens a row attends to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from urdir.model.families.attention import Indexer
from urdir.model.graph.evaluation import Evaluation, Floats
from urdir.model.graph.op import Op
from urdir.model.graph.tensor import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Select(Op):
    """y (rows, width) u32 = the tokens with the highest index scores of each row.

    ``q`` (rows, heads * dim) and ``k`` (rows, dim), normed, are turned; k goes into the index cache
    of ``layer``. ``weights`` (rows, heads), 1 without them; ``gate`` (rows, dim), of keys
    that are pooled. Keys of which means are pooled (`Indexer.pool_rope`) come as products.

    While evaluated, y are positions in order, and the number of rows where a row has fewer tokens;
    on the device slots in the layer's cache.
    """

    word = "select"
    q: Tensor
    k: Tensor
    weights: Tensor | None
    gate: Tensor | None
    indexer: Indexer
    layer: int

    def __post_init__(self) -> None:
        of = self.indexer
        widths = (self.q.width, self.k.width, self.weights.width if self.weights else of.heads)
        self._check(widths == (of.heads * of.dim, of.dim, of.heads), "the widths differ")

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        of, rows = self.indexer, len(x[0])
        q, k = x[0].reshape(rows, of.heads, of.dim), x[1][:, None]
        if of.rope is not None:
            table = at.turns(of.rope)
            q = of.rope.rotation.turn(q, at.positions, table)
            if of.pool_rope is None:
                k = of.rope.rotation.turn(k, at.positions, table)
        if of.pool_rope is not None:
            keys = self._means(at, x[1])
        elif of.places is not None:
            keys = pooled(k[:, 0], x[3], at.vector(of.places))
        else:
            keys = k[:, 0]
        products = np.maximum(np.einsum("rhd,kd->rhk", q, keys), 0)
        weights = np.ones((rows, of.heads)) if self.weights is None else x[2]
        scores = np.einsum("rhk,rh->rk", products, weights)
        chosen = np.full((rows, of.width), float(rows))
        for row, position in enumerate(at.positions.tolist()):
            count = (position + 1) // of.pool
            best = np.argsort(-scores[row, :count], kind="stable")[: of.most // of.pool]
            tokens = np.sort(best)[:, None] * of.pool + np.arange(of.pool)
            tail = np.arange(count * of.pool, position + 1)
            tokens = np.concatenate([tokens.ravel(), tail])
            chosen[row, : len(tokens)] = tokens
        return chosen

    def _means(self, at: Evaluation, keys: Floats) -> Floats:
        """Keys (pools, dim) of whole pools of tokens, as means, normed and turned."""
        of = self.indexer
        assert of.pool_rope is not None
        assert of.k_norm.weight is not None
        count = len(keys) // of.pool
        made = keys[: count * of.pool].reshape(count, of.pool, of.dim).mean(axis=1)
        made = of.k_norm.norm(made, at.vector(of.k_norm.weight))[:, None]
        turns, first = at.turns(of.pool_rope), np.arange(count) * of.pool
        turned: Floats = of.pool_rope.rotation.turn(made, first, turns)[:, 0]
        return turned


def pooled(keys: Floats, gates: Floats, places: Floats) -> Floats:
    """Keys (pools, dim) of whole pools of tokens, of those of tokens (rows, dim)."""
    dim = keys.shape[1]
    places = places.reshape(-1, dim)
    whole = len(keys) // len(places) * len(places)
    logits = gates[:whole].reshape(-1, *places.shape) + places
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    made: Floats = (weights * keys[:whole].reshape(logits.shape)).sum(axis=1) / weights.sum(axis=1)
    return made


@dataclass(frozen=True, slots=True, eq=False)
class CacheIndex(Select):
    """Index keys alone, into the cache; y are the queries, which nothing reads."""

    word = "cache_index"

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        return x[0]
