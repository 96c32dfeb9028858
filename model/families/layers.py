"""A layer, described: blocks of networks, and what happens to the residual stream after them.

The residual stream x is one vector per token. A layer is a few blocks; each adds the results of its
networks to the stream:

    x += scale * post_norm( sum over branches of post_norm(network(norm(x))) )

The usual layer has two blocks, attention and an FFN; a parallel layer has one block with both. The
description of a layer holds everything that may differ between layers, and the places of its
weights (`stored`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from urdir.model.families.attention import Attention
from urdir.model.families.feed_forward import Dense, Mixture
from urdir.model.families.recurrent import Recurrent
from urdir.model.families.stored import Linear, Normalization, StoredVector
from urdir.ptxgen.kernels.activation import Activation

#: The last two: a single matrix (Deci), f(x) without a matrix (Refact).
Network = Attention | Recurrent | Dense | Mixture | Linear | Activation


@dataclass(frozen=True, slots=True)
class Branch:
    """A network of a block with its norms. ``reads_layer_input``: it reads the stream at the start
    of the layer, not of the block; ``reads_sibling``: the result of the branch before it, normed.
    """

    network: Network
    norm: Normalization | None = None
    post_norm: Normalization | None = None
    reads_layer_input: bool = False
    reads_sibling: bool = False

    def at_context(self, context: int) -> Branch:
        """The branch with RoPE for sequences of up to ``context`` tokens."""
        network = self.network
        if isinstance(network, Attention) and network.rope is not None:
            rope = network.rope.at_context(context)
            return replace(self, network=replace(network, rope=rope))
        return self


@dataclass(frozen=True, slots=True)
class HyperConnection:
    """How a block reads and writes the streams of a residual that has several (`kernels.streams`):
    by weights made of ``mixes`` (24, streams * hidden) times the ``norm`` of all streams together,
    with ``scale`` (3,), ``base`` (24,), and ``iterations`` and ``eps`` of the Sinkhorn balance.
    Without iterations streams are not mixed with each other, ``mixes`` and ``base`` have 8 rows,
    and ``scale`` has two values. ``magnitude`` is a factor of what a block writes."""

    norm: Normalization
    mixes: Linear
    scale: StoredVector
    base: StoredVector
    iterations: int
    eps: float
    magnitude: float = 2.0


@dataclass(frozen=True, slots=True)
class StreamJoin:
    """The sum of the streams of a residual, weighted by numbers made of ``mixes`` (4, streams *
    hidden) times the ``norm`` of all streams together, with ``scale`` (1,), ``base`` (4,), and
    ``eps``."""

    norm: Normalization
    mixes: Linear
    scale: StoredVector
    base: StoredVector
    eps: float


@dataclass(frozen=True, slots=True)
class LowRankConnection:
    """How a block reads and writes the streams of a residual by gates of low rank (Qwen 4). With n
    the ``norm`` of each stream, weights (streams, hidden), it reads the mean over streams of n *
    sigmoid(``up`` silu(``down`` n / streams)), and its result times 2 sigmoid(``inject`` n /
    streams) is added to the streams. Without ``inject`` the streams are joined, after all layers.
    """

    norm: Normalization
    down: Linear  # (rank, streams * hidden)
    up: Linear  # (streams * hidden, rank)
    inject: Linear | None = None  # (streams, streams * hidden)


@dataclass(frozen=True, slots=True)
class SharedTransformer:
    """``linear`` ffn(norm(attention(norm([x ; e])))) of a stream x beside the embedding e, without
    residuals: a block reads x and this (Zamba 2, arXiv 2411.15242). Layers share most weights."""

    attention: Attention
    norm: Normalization  # of both, (2 * hidden,)
    ffn: Dense
    ffn_norm: Normalization
    linear: Linear


@dataclass(frozen=True, slots=True)
class Block:
    """x += post_norm(scale * sum of the branches).

    A ``stream_norm`` first replaces x by its norm.

    With ``sums_stream`` the sum, before its norm, has x as one more addend.

    With ``recalls`` the branches read a weighted sum of x and the streams banked by earlier blocks
    (`Recall`); x itself is unchanged. A block that ``banks`` stores x and restarts the stream with
    its own result.

    A ``hyper`` connection reads and writes a residual of several streams.

    With a ``transformer`` the branches read the sum of x and its result; x itself is unchanged.
    """

    branches: tuple[Branch, ...]
    post_norm: Normalization | None = None
    scale: float = 1.0
    stream_norm: Normalization | None = None
    hyper: HyperConnection | LowRankConnection | None = None
    recalls: Normalization | None = None
    banks: bool = False
    sums_stream: bool = False
    transformer: SharedTransformer | None = None

    @property
    def networks(self) -> tuple[Network, ...]:
        """All its networks."""
        own = tuple(branch.network for branch in self.branches)
        of = self.transformer
        return own if of is None else (of.attention, of.ffn, of.linear, *own)


@dataclass(frozen=True, slots=True)
class LayerEmbedding:
    """x += norm(proj(gelu(gate x) * e)), e being the token's embedding for this layer (Gemma 4)."""

    gate: Linear
    proj: Linear
    norm: Normalization
    activation: Activation


@dataclass(frozen=True, slots=True)
class AltUp:
    """Alternating updates of several streams (AltUp, arXiv 2301.13310), of which the layer's blocks
    update the first; `layers.altup` has the formulas. ``laurel`` is a second branch beside
    attention: n + norm(up(down n)), n being attention's input."""

    router: Linear  # (streams, hidden)
    router_norm: Normalization
    predict: Linear  # (streams * streams, streams)
    correct: Linear  # (streams, streams)
    correct_scale: StoredVector  # (hidden,)
    laurel: tuple[Linear, Linear]
    laurel_norm: Normalization


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """One layer: its blocks, then these operations on the stream, in this order. With ``altup``
    there are several streams, all of which but the first read the embedding.

    ``embedding`` adds a per-layer embedding; ``output_scale`` (1,) multiplies; ``output_norm``
    replaces the stream by its norm; ``saves`` stores it under a name; ``adds`` adds a stored
    stream, times ``adds_scale`` (1,) if given.
    """

    blocks: tuple[Block, ...]
    embedding: LayerEmbedding | None = None
    output_scale: StoredVector | None = None
    output_norm: Normalization | None = None
    saves: str | None = None
    adds: str | None = None
    adds_scale: StoredVector | None = None
    altup: AltUp | None = None

    @property
    def networks(self) -> tuple[Network, ...]:
        """All networks of the layer."""
        return tuple(network for block in self.blocks for network in block.networks)

    @property
    def mixtures(self) -> tuple[Mixture, ...]:
        """Its mixtures of experts."""
        return tuple(n for n in self.networks if isinstance(n, Mixture))

    @property
    def attention(self) -> Attention | None:
        """Its attention, or None."""
        return next((n for n in self.networks if isinstance(n, Attention)), None)

    @property
    def recurrent(self) -> Recurrent | None:
        """Its recurrent mixer, or None."""
        return next((n for n in self.networks if isinstance(n, Recurrent)), None)

    @property
    def recurrents(self) -> tuple[Recurrent, ...]:
        """Its recurrent networks; RWKV has two."""
        return tuple(n for n in self.networks if isinstance(n, Recurrent))

    def at_context(self, context: int) -> LayerConfig:
        """The layer for sequences of up to ``context`` tokens; see `RopeConfig`."""
        blocks = tuple(
            replace(block, branches=tuple(branch.at_context(context) for branch in block.branches))
            for block in self.blocks
        )
        return replace(self, blocks=blocks)
