"""Operations of attention to latent vectors (MLA)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from urdir.model.families.attention import Attention, Latent
from urdir.model.families.stored import Linear
from urdir.model.graph.attention import attention, selected_of
from urdir.model.graph.evaluation import Evaluation, Floats
from urdir.model.graph.op import Op
from urdir.model.graph.tensor import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AttendLatent(Op):
    """y (rows, heads * latent) = causal attention whose values are latent vectors.

    The value of a row is the norm of ``latent``; its key is ``k``, turned, beside that vector, and
    both go into the cache of ``layer``. Queries are ``q`` (heads, n), turned, beside what
    `Latent.absorb` makes of ``q_still``; without that all of a head turns, and without ``q`` and
    ``k`` none. Rows attend to the tokens that are ``selected``, if given.
    """

    word = "attend_latent"
    q: Tensor | None
    k: Tensor | None
    latent: Tensor
    q_still: Tensor | None
    mixer: Attention
    layer: int
    selected: Tensor | None = None

    def __post_init__(self) -> None:
        heads, q = self.mixer.heads, self.q or self.q_still
        self._check(q is not None and q.width % heads == 0, f"not {heads} query heads")
        self._check(self.latent.width == self.mixer.value_dim, "the latent vector differs")

    @property
    def of(self) -> Latent:
        """The latent vector's description."""
        assert self.mixer.latent is not None
        return self.mixer.latent

    def name(self, of: str) -> str:
        """The label of a launch of this layer's attention."""
        return self.label.removesuffix("attention") + of

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        mixer, of, rows = self.mixer, self.of, len(x[0])
        names = [name for name in self._names() if getattr(self, name) is not None]
        given = dict(zip(names, x, strict=True))
        weight = None if of.norm.weight is None else at.vector(of.norm.weight)
        k = latent = of.norm.norm(given["latent"], weight)[:, None]
        if of.absorb is not None:
            still = given["q_still"].reshape(rows, mixer.heads, -1)
            q = _by_head(at, of.absorb, still)
        if self.q is not None:
            turned = self._turned(at, given["q"].reshape(rows, mixer.heads, -1))
            k_turned = self._turned(at, given["k"][:, None])
            whole = of.absorb is None
            q = turned if whole else np.concatenate([turned, q], axis=2)
            k = k_turned if whole else np.concatenate([k_turned, latent], axis=2)
        if mixer.temperature is not None:
            q = q * mixer.temperature(at.positions)[:, None, None]
        at.cached[self.layer] = k, latent
        seen = None if self.selected is None else selected_of(given["selected"])
        return attention(at, mixer.scores, mixer.sinks, q, k, latent, selected=seen).reshape(
            rows, -1
        )

    def _turned(self, at: Evaluation, x: Floats) -> Floats:
        rope = self.mixer.rope
        if rope is None:
            return x
        return np.asarray(rope.rotation.turn(x, at.positions, at.turns(rope)), np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class CacheLatent(AttendLatent):
    """Key and value of the rows alone, into the cache; y are the queries, which nothing reads."""

    word = "cache_latent"

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        return x[0]


@dataclass(frozen=True, slots=True, eq=False)
class HeadProduct(Op):
    """y (rows, heads * out) = the matrix (out, in) of each head, one after the other, times its
    part of x (rows, heads * in)."""

    word = "head_product"
    x: Tensor
    of: Linear
    heads: int

    def __post_init__(self) -> None:
        self._check(self.of.rows == self.y.width, f"the matrices have {self.of.rows} rows")
        self._check(self.of.cols * self.heads == self.x.width, "the matrices have other columns")
        self._check(self.of.order is None, "the matrices have an order of columns")

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        return _by_head(at, self.of, x[0].reshape(len(x[0]), self.heads, -1)).reshape(len(x[0]), -1)


def _by_head(at: Evaluation, of: Linear, x: Floats) -> Floats:
    """(rows, heads, out) of x (rows, heads, in)."""
    matrices = at.matrix(of.matrix).reshape(x.shape[1], -1, x.shape[2])
    made: Floats = np.einsum("rhi,hoi->rho", x, matrices)
    return made
