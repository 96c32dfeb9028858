"""Operations of attention over the keys and values of a sequence."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from urdir.model.families.stored import RelativeBias, StoredVector
from urdir.model.graph.evaluation import Evaluation, Floats
from urdir.model.graph.op import Op
from urdir.model.graph.tensor import Tensor
from urdir.ptxgen.kernels.attention.own_token import Temperature
from urdir.ptxgen.kernels.attention.scores import Scores
from urdir.ptxgen.kernels.norm import Norm as NormKind


@dataclass(frozen=True, slots=True, eq=False)
class Attend(Op):
    """y (rows, heads * value_dim) = attention of the rows to their sequences, causal unless
    ``scores`` say otherwise.

    ``q`` (rows, heads * key_dim); ``k`` and ``v``, by ``kv_heads``, go into the cache of ``layer``
    first, v after ``v_norm`` of each head. Without them the rows attend to what layer
    ``shares_cache_of`` has cached. Queries are multiplied by the ``temperature`` of their
    positions. ``sinks`` (heads,) are one more logit each, without a value; ``relative`` is added
    to scores. With ``cross`` the rows attend to all that the cache of ``layer`` has of their
    sequences' sources. Rows attend to the tokens that are ``selected``, if given.
    """

    word = "attend"
    q: Tensor
    k: Tensor | None
    v: Tensor | None
    layer: int
    heads: int
    kv_heads: int
    scores: Scores
    sinks: StoredVector | None = None
    v_norm: NormKind | None = None
    temperature: Temperature | None = None
    shares_cache_of: int | None = None
    relative: RelativeBias | None = None
    cross: bool = False
    selected: Tensor | None = None

    def __post_init__(self) -> None:
        self._check(self.q.width % self.heads == 0, f"not {self.heads} query heads")
        self._check((self.k is None) == (self.v is None), "keys go with values")
        if self.k is not None:
            same = self.k.width // self.kv_heads == self.key_dim
            self._check(same, "query heads and key heads differ")

    @property
    def key_dim(self) -> int:
        """Values of a query head."""
        return self.q.width // self.heads

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        q = x[0].reshape(len(x[0]), self.heads, -1)
        if self.cross:
            k, v = at.cached[self.layer]
            scores = replace(self.scores, causal=False)
            return attention(at, scores, self.sinks, q, k, v).reshape(len(q), -1)
        if self.k is None:
            assert self.shares_cache_of is not None
            k, v = at.cached[self.shares_cache_of]
        else:
            k, v = (each.reshape(len(each), self.kv_heads, -1) for each in x[1:3])
            v = v if self.v_norm is None else self.v_norm(v)
        at.cached[self.layer] = k, v
        if self.temperature is not None:
            q = q * self.temperature(at.positions)[:, None, None]
        bias = None if self.relative is None else at.bias(self.relative)
        seen = None if self.selected is None else selected_of(x[-1])
        return attention(at, self.scores, self.sinks, q, k, v, bias, seen).reshape(len(q), -1)


@dataclass(frozen=True, slots=True, eq=False)
class Cache(Attend):
    """The keys and values of the rows alone, into the cache; y are the queries, which nothing
    reads."""

    word = "cache"

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        k, v = (each.reshape(len(each), self.kv_heads, -1) for each in x[1:3])
        at.cached[self.layer] = k, v if self.v_norm is None else self.v_norm(v)
        return x[0]


def selected_of(positions: Floats) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which tokens (rows, rows) each row has selected, of their ``positions`` (rows, most), with
    the number of rows where there are fewer."""
    rows = len(positions)
    seen = np.zeros((rows, rows + 1), np.bool_)
    seen[np.arange(rows)[:, None], positions.astype(int)] = True
    return seen[:, :-1]


def attention(
    at: Evaluation,
    scores: Scores,
    sinks: StoredVector | None,
    q: Floats,
    k: Floats,
    v: Floats,
    bias: Floats | None = None,
    selected: np.ndarray[Any, np.dtype[np.bool_]] | None = None,
) -> Floats:
    """(rows, heads, value_dim): softmax over all positions up to a row's own, or all that it
    attends to, or those of them that are ``selected`` (rows, rows), of q (rows, heads, key_dim), k
    and v (rows, KV heads, ...), with a ``bias`` (heads, 2 n + 1) by distance."""
    heads = q.shape[1]
    k, v = (np.repeat(each, heads // each.shape[1], axis=1) for each in (k, v))
    logits = np.einsum("qhd,khd->hqk", q, k) * scores.scale
    if scores.softcap:
        logits = scores.softcap * np.tanh(logits / scores.softcap)
    behind = at.positions[:, None] - np.arange(len(k))[None, :]
    if scores.max_bias:
        logits = logits - _slopes(heads, scores.max_bias)[:, None, None] * np.abs(behind)
    if bias is not None:
        most = bias.shape[1] // 2
        logits = logits + bias[:, np.clip(-behind, -most, most) + most]
    if scores.causal:
        seen = (behind >= 0) & (behind < (scores.window or np.inf))
    else:
        seen = np.abs(behind) <= (scores.window // 2 or np.inf)
    if selected is not None:
        seen &= selected
    if scores.chunk:
        seen &= at.positions[None, :] >= at.positions[:, None] // scores.chunk * scores.chunk
    logits = np.where(seen, logits, -np.inf)
    most = logits.max(axis=-1, keepdims=True)
    extra = np.zeros_like(most)
    if sinks is not None:
        sink = at.vector(sinks)[:, None, None]
        most = np.maximum(most, sink)
        extra = np.exp(sink - most)
    weights = np.exp(logits - most)
    total = weights.sum(axis=-1, keepdims=True) + extra
    made: Floats = np.einsum("hqk,khd->qhd", weights / total, v)
    return made


def _slopes(heads: int, max_bias: float) -> Floats:
    """ALiBi's slope of each head, for any number of heads (ggml)."""
    power = 1 << (heads.bit_length() - 1)
    first, second = 2.0 ** (-max_bias / power), 2.0 ** (-max_bias / 2 / power)
    return np.array(
        [first ** (h + 1) if h < power else second ** (2 * (h - power) + 1) for h in range(heads)]
    )
