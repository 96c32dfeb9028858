"""Attention, described: query, key and value heads, and the steps between them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from urdir.model.families.compression import Compression
from urdir.model.families.rope import RopeConfig
from urdir.model.families.stored import (
    MOST_DISTANCE,
    Linear,
    Normalization,
    RelativeBias,
    StoredVector,
)
from urdir.ptxgen.kernels.attention.own_token import Temperature
from urdir.ptxgen.kernels.attention.scores import Scores
from urdir.ptxgen.kernels.norm import Norm


@dataclass(frozen=True, slots=True)
class QkNorm:
    """RMSNorm (or LayerNorm) of queries and keys: per head, or over all heads together.

    Weights are (head_dim,), (heads, head_dim) or (heads * head_dim,).
    """

    q: Normalization
    k: Normalization
    over: Literal["head", "row"] = "head"
    after_rope: bool = False


@dataclass(frozen=True, slots=True)
class OutputGate:
    """A gate on the result of attention: times activation(linear x'), per element or per head."""

    linear: Linear
    activation: Literal["sigmoid", "softplus"]


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (MLA, arXiv 2405.04434) in its absorbed form.

    All heads share one latent vector l = norm(``down`` x). The single KV head has the value l and a
    key of the rotated part, then l. `Attention` has the rotated projections, which come first.

    The rotated part of the key is normed by ``k_norm``, if given, before it rotates.
    Queries read x, or ``q_norm`` (``q_down`` x). ``q_still`` (heads, still) makes their unrotated
    parts; ``absorb`` (heads * latent, still) maps each into the latent space. Without these two a
    head rotates as a whole, and l is the value only. ``expand`` (heads * value, latent) maps each
    head's result to its values.

    In the non-absorbed form every head has its own keys and values: ``keys`` (heads * still,
    latent) and ``expand`` compute them from l. This is less work for prompt rows that attend to
    each other (`Attention.written_out`).
    """

    down: Linear
    norm: Normalization
    q_still: Linear | None
    absorb: Linear | None
    expand: Linear
    keys: Linear | None = None
    q_down: Linear | None = None
    q_norm: Normalization | None = None
    k_norm: Normalization | None = None


@dataclass(frozen=True, slots=True)
class Indexer:
    """Lightning indexer (DeepSeek V3.2, arXiv 2512.02556): a row attends to the ``most`` tokens
    with the highest scores, the sum over ``heads`` of w max(0, q . k).

    ``q`` (heads * dim, latent q) reads the normed latent vector of queries, ``k`` (dim, hidden) and
    ``weights`` (heads, hidden) read what attention reads. The one key head is normed, and q and k
    rotate as ``rope`` says. Positive factors of all scores, and a Hadamard rotation of q and k,
    change no choice and are left out.

    With a ``pool`` above 1 this many tokens side by side have one key, the sum of theirs weighted
    by value: by the softmax of ``gate`` (dim, hidden) x plus the ``places`` (pool, dim) of the
    tokens. Whole pools are selected, ``most`` tokens in all, beside the last tokens, which are no
    pool yet. With a ``pool_rope`` the key of a pool is the mean of theirs, normed then, and rotates
    as that says by the position of its first token (Qwen 4).

    Without a latent vector ``q`` reads what attention reads, too, and ``q_norm`` is of each query
    head. Without ``weights`` all are 1.
    """

    heads: int
    dim: int
    most: int
    q: Linear
    k: Linear
    k_norm: Normalization
    weights: Linear | None
    rope: RopeConfig | None
    pool: int = 1
    gate: Linear | None = None
    places: StoredVector | None = None
    q_norm: Normalization | None = None
    pool_rope: RopeConfig | None = None

    @property
    def raw_width(self) -> int:
        """Values of a token from which keys of pools are made: its key, and a gate if there is
        one; 0 without pools."""
        return 0 if self.pool == 1 else self.dim if self.gate is None else 2 * self.dim

    @property
    def width(self) -> int:
        """The most tokens that a row attends to."""
        return self.most + self.pool - 1


@dataclass(frozen=True, slots=True)
class CrossKeys:
    """Keys and values of cross attention: products of the states of a `SourceText`."""

    k: Linear
    v: Linear


@dataclass(frozen=True, slots=True)
class Attention:
    """Causal softmax attention (GQA) with scores scale * q . k; or where it is not ``causal``, of
    each token to all of its text, within a window to ``window`` // 2 tokens on either side.

    A row at position p attends to positions above p - ``window``, or from the start of its
    ``chunk`` (0: unlimited). ``softcap`` c > 0 turns scores s into c * tanh(s / c). ``sinks``
    (heads,) add one logit per head, without a value. ``max_bias`` > 0 adds ALiBi (Press et al.
    2021, arXiv 2108.12409). Without ``v`` the product of ``k`` is K and V; without both, the layer
    reads the cache of layer ``shares_cache_of``. Q, K and V are clamped to +- ``clamp``. A ``norm``
    (heads * value_dim,) normalises all heads of the result together. With a ``latent``, q and k are
    the rotated parts. With an ``indexer``, or as the last layer that has one selected
    (``follows_indexer``), rows attend to some tokens alone. With a ``compression`` to the last
    tokens and to blocks of tokens. With ``cross`` they attend to all of the sequence's source,
    whose keys and values its layer's cache has; there are no k and v.
    """

    heads: int  # query heads
    kv_heads: int  # divides heads
    key_dim: int  # dimension of query and key heads
    value_dim: int  # dimension of value heads
    scale: float
    q: Linear
    k: Linear | None
    v: Linear | None
    o: Linear
    rope: RopeConfig | None = None
    qk_norm: QkNorm | None = None
    v_norm: Norm | None = None  # per value head, without weights
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    sinks: StoredVector | None = None
    max_bias: float = 0.0
    clamp: float = 0.0
    temperature: Temperature | None = None
    gate: OutputGate | None = None
    value_scale: float = 1.0  # multiplies the result
    shares_cache_of: int | None = None
    latent: Latent | None = None
    causal: bool = True
    relative: RelativeBias | None = None  # is added to scores
    cross: CrossKeys | None = None
    indexer: Indexer | None = None
    follows_indexer: bool = False
    norm: Normalization | None = None
    compression: Compression | None = None

    @property
    def written_out(self) -> Attention | None:
        """The non-absorbed form: keys and values per head, a key's shared part first. None without
        a latent vector, if the file lacks its matrices, and for the few keys of a window."""
        latent = self.latent
        if latent is None or latent.keys is None or self.window:
            return None
        return replace(
            self,
            kv_heads=self.heads,
            key_dim=self.key_dim - self.value_dim + latent.keys.rows // self.heads,
            value_dim=latent.expand.rows // self.heads,
            latent=None,
        )

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rotations of heads, and of an indexer."""
        of = self.indexer
        ropes = [self.rope] if of is None else [self.rope, of.rope, of.pool_rope]
        return tuple(rope for rope in ropes if rope is not None)

    @property
    def key_is_latent(self) -> bool:
        """Whether the key of a latent vector is that vector alone: nothing rotates."""
        return self.latent is not None and self.key_dim == self.value_dim

    @property
    def scores(self) -> Scores:
        """The transformation of scores between q . k and the softmax."""
        return Scores(
            scale=self.scale,
            softcap=self.softcap,
            window=self.window,
            chunk=self.chunk,
            sinks=self.sinks is not None,
            max_bias=self.max_bias,
            causal=self.causal,
            relative=0 if self.relative is None else MOST_DISTANCE,
        )

    @property
    def span(self) -> int:
        """The largest number of keys that a row attends to; 0: every key up to its own."""
        return min(filter(None, (self.window, self.chunk)), default=0)

    @property
    def query_width(self) -> int:
        """Width of all query heads."""
        return self.heads * self.key_dim

    @property
    def output_width(self) -> int:
        """Width of all heads of the result."""
        return self.heads * self.value_dim
