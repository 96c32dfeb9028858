"""Attention, described: heads of queries, keys and values, and what may come between them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from urdir.model.families.rope import RopeConfig
from urdir.model.families.stored import Linear, Normalization, StoredVector
from urdir.ptxgen.kernels.attention.own_token import Temperature
from urdir.ptxgen.kernels.attention.scores import Scores
from urdir.ptxgen.kernels.norm import Norm


@dataclass(frozen=True, slots=True)
class QkNorm:
    """RMSNorm (or LayerNorm) of queries and keys: of each head, or of all heads as one row.

    Weights are (head_dim,), (heads, head_dim) or (heads * head_dim,).
    """

    q: Normalization
    k: Normalization
    over: Literal["head", "row"] = "head"
    after_rope: bool = False


@dataclass(frozen=True, slots=True)
class OutputGate:
    """The result of attention times activation(linear x'), by value or by head."""

    linear: Linear
    activation: Literal["sigmoid", "softplus"]


@dataclass(frozen=True, slots=True)
class Latent:
    """Heads that share one vector l = norm(``down`` x) (MLA, arXiv 2405.04434), in the absorbed
    form: l is the value, and the one key beside a part that rotates. That part comes first, and
    `Attention` has its products.

    Queries are made of x, or of ``q_norm`` (``q_down`` x). Their parts that stand still (heads,
    still) are ``q_still``; ``absorb`` (heads * latent, still) makes each head's fit for l. Without
    them all of a head rotates, and l is the value alone. ``expand`` (heads * value, latent) makes
    each head's values of its result.

    Written out, a head has keys and values of its own: ``keys`` (heads * still, latent) and
    ``expand`` make them of l. That is less work for the rows of a prompt that attend to each other
    (`Attention.written_out`).
    """

    down: Linear
    norm: Normalization
    q_still: Linear | None
    absorb: Linear | None
    expand: Linear
    keys: Linear | None = None
    q_down: Linear | None = None
    q_norm: Normalization | None = None


@dataclass(frozen=True, slots=True)
class Attention:
    """Causal softmax attention (GQA), scores scale * q . k.

    A row at position p attends to positions above p - ``window``, or from the beginning of its
    ``chunk`` on (0: none). ``softcap`` c > 0 turns scores s into c * tanh(s / c). ``sinks``
    (heads,) are one more logit each, without a value. ``max_bias`` > 0 adds ALiBi (Press et al.
    2021, arXiv 2108.12409). Without ``v`` the product of ``k`` is K and V; without both, the cache
    of layer ``shares_cache_of`` is used. Products are kept within +- ``clamp``. With a ``latent``
    q and k are the parts that rotate.
    """

    heads: int  # of queries
    kv_heads: int  # heads is a multiple
    key_dim: int  # of a head of queries and keys
    value_dim: int  # of a head of values
    scale: float
    q: Linear
    k: Linear | None
    v: Linear | None
    o: Linear
    rope: RopeConfig | None = None
    qk_norm: QkNorm | None = None
    v_norm: Norm | None = None  # of each head of values, without weights
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    sinks: StoredVector | None = None
    max_bias: float = 0.0
    clamp: float = 0.0
    temperature: Temperature | None = None
    gate: OutputGate | None = None
    value_scale: float = 1.0  # of the result
    shares_cache_of: int | None = None
    latent: Latent | None = None

    @property
    def written_out(self) -> Attention | None:
        """The same by keys and values of heads, where a latent vector has the matrices for it: a
        key's shared part comes first."""
        latent = self.latent
        if latent is None or latent.keys is None:
            return None
        return replace(
            self,
            kv_heads=self.heads,
            key_dim=self.key_dim - self.value_dim + latent.keys.rows // self.heads,
            value_dim=latent.expand.rows // self.heads,
            latent=None,
        )

    @property
    def scores(self) -> Scores:
        """What happens between q . k and the softmax."""
        return Scores(
            scale=self.scale,
            softcap=self.softcap,
            window=self.window,
            chunk=self.chunk,
            sinks=self.sinks is not None,
            max_bias=self.max_bias,
        )

    @property
    def span(self) -> int:
        """The most keys that a row attends to; 0: all up to its own."""
        return min(filter(None, (self.window, self.chunk)), default=0)

    @property
    def query_width(self) -> int:
        """Values of all heads of queries."""
        return self.heads * self.key_dim

    @property
    def key_width(self) -> int:
        """Values of all heads of keys."""
        return self.kv_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Values of all heads of values."""
        return self.kv_heads * self.value_dim

    @property
    def output_width(self) -> int:
        """Values of all heads of the result."""
        return self.heads * self.value_dim
