"""A layer, described: blocks of networks, and what happens to the stream after them.

The values of a token run through the layers as one vector, the stream x. A layer is a few blocks;
each adds to the stream what its networks make of it:

    x += scale * post_norm( sum over branches of post_norm(network(norm(x))) )

Two blocks, attention and then a feed-forward network, are the usual layer; one block with both is a
parallel one. Whatever may differ between layers is in the layer's own description, and so are the
places of its weights (`stored`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from urdir.model.families.attention import Attention
from urdir.model.families.feed_forward import Dense, Mixture
from urdir.model.families.recurrent import (
    KimiDelta,
    Lightning,
    Recurrence,
    Recurrent,
    Selective,
    ShortConv,
)
from urdir.model.families.stored import Linear, Normalization, StoredVector
from urdir.ptxgen.kernels.activation import Activation

#: The last two: a matrix alone (Deci), f(x) without any matrix (Refact).
Network = (
    Attention
    | ShortConv
    | Recurrence
    | Selective
    | KimiDelta
    | Lightning
    | Dense
    | Mixture
    | Linear
    | Activation
)


@dataclass(frozen=True, slots=True)
class Branch:
    """A network of a block, with norms of its own. ``reads_layer_input``: not the stream as it is
    at the block, but as it was at the layer's beginning."""

    network: Network
    norm: Normalization | None = None
    post_norm: Normalization | None = None
    reads_layer_input: bool = False

    def at_context(self, context: int) -> Branch:
        """The same, rotating as for sequences of up to ``context`` tokens."""
        network = self.network
        if isinstance(network, Attention) and network.rope is not None:
            rope = network.rope.at_context(context)
            return replace(self, network=replace(network, rope=rope))
        return self


@dataclass(frozen=True, slots=True)
class Block:
    """x += post_norm(scale * sum of the branches).

    With a ``stream_norm``, x is replaced first, by what that norm makes of it.

    With ``recalls`` the branches read a weighted sum of x and of the streams that blocks before
    have banked (`Recall`), where there are any; x itself goes on. A block that ``banks`` keeps x as
    it was, and its result alone goes on.
    """

    branches: tuple[Branch, ...]
    post_norm: Normalization | None = None
    scale: float = 1.0
    stream_norm: Normalization | None = None
    recalls: Normalization | None = None
    banks: bool = False


@dataclass(frozen=True, slots=True)
class LayerEmbedding:
    """x += norm(proj(gelu(gate x) * e)), e being the token's embedding for this layer (Gemma 4)."""

    gate: Linear
    proj: Linear
    norm: Normalization
    activation: Activation


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """One layer: its blocks, and what happens to the stream after them, in this order.

    ``embedding`` adds a per-layer embedding; ``output_scale`` (1,) multiplies; ``output_norm``
    replaces the stream; ``saves`` keeps it under a name; ``adds`` adds a stream kept before, times
    ``adds_scale`` (1,) where there is one.
    """

    blocks: tuple[Block, ...]
    embedding: LayerEmbedding | None = None
    output_scale: StoredVector | None = None
    output_norm: Normalization | None = None
    saves: str | None = None
    adds: str | None = None
    adds_scale: StoredVector | None = None

    @property
    def networks(self) -> tuple[Network, ...]:
        """All of its networks."""
        return tuple(branch.network for block in self.blocks for branch in block.branches)

    @property
    def dense_networks(self) -> tuple[Dense, ...]:
        """Its dense networks, the shared ones of mixtures among them."""
        mixtures = (n.shared for n in self.networks if isinstance(n, Mixture))
        return tuple(n for n in (*self.networks, *mixtures) if isinstance(n, Dense))

    @property
    def mixtures(self) -> tuple[Mixture, ...]:
        """Its mixtures of experts."""
        return tuple(n for n in self.networks if isinstance(n, Mixture))

    @property
    def attention(self) -> Attention | None:
        """Its attention, if it has any."""
        return next((n for n in self.networks if isinstance(n, Attention)), None)

    @property
    def recurrent(self) -> Recurrent | None:
        """Its mixer with a state, if it has one."""
        return next((n for n in self.networks if isinstance(n, Recurrent)), None)

    def at_context(self, context: int) -> LayerConfig:
        """The layer as it is for sequences of up to ``context`` tokens: see `RopeConfig`."""
        blocks = tuple(
            replace(block, branches=tuple(branch.at_context(context) for branch in block.branches))
            for block in self.blocks
        )
        return replace(self, blocks=blocks)
