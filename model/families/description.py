"""The description of a model as plain data: a family makes it, everything else reads it.

The values of a token run through the layers as one vector, the stream x. A layer is a few blocks;
each adds to the stream what its networks make of it:

    x += scale * post_norm( sum over branches of post_norm(network(norm(x))) )

Two blocks, attention and then a feed-forward network, are the usual layer; one block with both is a
parallel one. Whatever may differ between layers is in the layer's own description, and so are the
places of its weights (`stored`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from urdir.model.families.recurrent import (
    KimiDelta,
    Lightning,
    Recurrence,
    Recurrent,
    Selective,
    ShortConv,
)
from urdir.model.families.rope import RopeConfig
from urdir.model.families.stored import Linear, Normalization, Slopes, StoredMatrix, StoredVector
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.attention.own_token import Temperature
from urdir.ptxgen.kernels.attention.scores import Scores
from urdir.ptxgen.kernels.experts.selection import Selection
from urdir.ptxgen.kernels.norm import Norm

if TYPE_CHECKING:
    from urdir.model.files.model_file import ModelFile


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
    """

    down: Linear
    norm: Normalization
    q_still: Linear | None
    absorb: Linear | None
    expand: Linear
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


@dataclass(frozen=True, slots=True)
class Dense:
    """down(f(gate x) * up x), or down(f(up x)) without a gate; see `Activation`.

    ``divisors`` (width,) divide the activated values (MPT).
    """

    up: Linear
    down: Linear
    gate: Linear | None
    activation: Activation
    divisors: StoredVector | None = None

    @property
    def width(self) -> int:
        """Rows of up."""
        return self.up.rows


@dataclass(frozen=True, slots=True)
class Router:
    """Which experts a token goes to, and with which weights.

    Scores of the experts' logits: "softmax", "sigmoid", or the logits themselves, whose softmax
    over the chosen ones is taken ("softmax_selected"). Chosen are the ``used`` highest scores (with
    ``choice_bias`` (experts,) added for the choice only; from the ``groups_used`` best of
    ``groups`` groups, by the sum of a group's two best). Their scores are the weights: divided by
    their sum (``normalize``), times ``scale``, times the expert's own ``expert_scale`` (experts,).
    ``by_logits`` chooses by logits. ``reads``: what the logits are made of: the network's input,
    the layer's input as it is, or a norm of its own (``norm``).
    """

    linear: Linear
    used: int
    scoring: Literal["softmax", "sigmoid", "softmax_selected"] = "softmax"
    choice_bias: StoredVector | None = None
    groups: int = 1
    groups_used: int = 1
    normalize: bool = False
    scale: float = 1.0
    expert_scale: StoredVector | None = None
    by_logits: bool = False
    reads: Literal["input", "layer", "norm"] = "input"
    norm: Normalization | None = None
    norm_scale: float = 1.0  # of the router's own norm

    @property
    def experts(self) -> int:
        """Number of experts."""
        return self.linear.rows

    @property
    def selection(self) -> Selection:
        """How logits choose."""
        return Selection(
            self.experts,
            self.used,
            self.scoring,
            normalised=self.normalize,
            scale=self.scale,
            bias=self.choice_bias is not None,
            by_logits=self.by_logits,
            groups=self.groups,
            groups_used=self.groups_used,
            expert_scale=self.expert_scale is not None,
        )


@dataclass(frozen=True, slots=True)
class LatentExperts:
    """Experts of a narrower vector: they read ``down`` x, and ``up`` of the ``norm`` of their sum
    is the mixture's result."""

    down: Linear
    up: Linear
    norm: Normalization | None = None


@dataclass(frozen=True, slots=True)
class Mixture:
    """A mixture of experts: the weighted sum of some experts, and a ``shared`` network of all
    tokens, times sigmoid(``shared_gate`` x) where it has one.

    Matrices of experts have the rows of all experts, one after the other; their biases likewise.
    ``weigh_input`` multiplies an expert's gate and up products with its weight instead of its
    result (Llama 4). The experts may be ``latent`` ones; router and shared network read x itself.
    """

    router: Router
    up: Linear
    down: Linear
    gate: Linear | None
    activation: Activation
    weigh_input: bool = False
    shared: Dense | None = None
    shared_gate: Linear | None = None
    latent: LatentExperts | None = None

    @property
    def width(self) -> int:
        """Rows of up of one expert."""
        return self.up.rows // self.router.experts

    @property
    def result_width(self) -> int:
        """Rows of down of one expert."""
        return self.down.rows // self.router.experts


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


@dataclass(frozen=True, slots=True)
class LayerEmbeddings:
    """The per-layer embeddings of a token, (layers, width):

    input_scale * (norm(proj x * proj_scale) + table[token] * scale), each layer's part normalised.
    """

    table: StoredMatrix  # (vocab, layers * width)
    scale: float
    proj: Linear
    proj_scale: float
    norm: Normalization
    input_scale: float
    width: int


@dataclass(frozen=True, slots=True)
class Share:
    """Which rank of how many a description is for: of attention and dense networks it has a part
    (`share.shared`). ``vocabulary`` are the logits of each rank, the first ones of rank 0."""

    rank: int
    vocabulary: tuple[int, ...]

    @property
    def ranks(self) -> int:
        """How many there are."""
        return len(self.vocabulary)


@dataclass(frozen=True, slots=True)
class Config:
    """A whole model, see `Config.from_gguf`; or the ``share`` of it that one rank has.

    The stream begins as the token's row of ``embedding``, times ``embedding_scale``, plus its row
    of ``positions``, normalised by ``embedding_norm``; it is kept as ``saves``, and ``adds``
    (hidden,) is added. Logits are ``output`` of ``output_norm`` of it, times ``logit_scale``, and c
    * tanh(. / c) for a ``softcap`` c > 0. With ``recalls`` it is a sum with banked streams before
    that, as in `Block`.
    """

    architecture: str
    layers: tuple[LayerConfig, ...]
    hidden: int
    vocab_size: int  # rows of the embedding; a tokeniser may know fewer
    context_length: int  # trained for
    embedding: StoredMatrix
    output: Linear
    output_norm: Normalization | None
    embedding_scale: float = 1.0
    positions: StoredMatrix | None = None
    embedding_norm: Normalization | None = None
    saves: str | None = None
    adds: StoredVector | None = None
    layer_embeddings: LayerEmbeddings | None = None
    logit_scale: float = 1.0
    softcap: float = 0.0
    recalls: Normalization | None = None
    ignored_keys: tuple[str, ...] = ()  # of the file, which the architecture does not know
    unused_tensors: tuple[str, ...] = ()  # of the file, for other uses than plain decoding
    share: Share | None = None

    def __str__(self) -> str:
        from urdir.model.families.summary import summary

        return summary(self)

    def __repr__(self) -> str:
        size = f"hidden {self.hidden}, vocabulary {self.vocab_size}, context {self.context_length}"
        return f"<Config {self.architecture}, {self.n_layers} layers, {size}>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """In a notebook: what the layers are made of."""
        printer.text(str(self))

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def tied(self) -> bool:
        """Whether the embedding is the output matrix, too."""
        return self.output.matrix == self.embedding

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """The attention of every layer that has one."""
        return tuple(layer.attention for layer in self.layers if layer.attention is not None)

    @property
    def recurrents(self) -> tuple[Recurrent, ...]:
        """The mixer with a state of every layer that has one."""
        return tuple(layer.recurrent for layer in self.layers if layer.recurrent is not None)

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The different ways in which layers rotate, in order of first use."""
        return tuple(dict.fromkeys(a.rope for a in self.attentions if a.rope is not None))

    @property
    def slopes(self) -> tuple[Slopes, ...]:
        """The different ways in which states decay that the weights do not say."""
        mixers = (of for of in self.recurrents if isinstance(of, Lightning))
        return tuple(dict.fromkeys(of.slopes for of in mixers))

    def banked(self, layers: int) -> int:
        """How many streams the first ``layers`` have banked."""
        return sum(block.banks for layer in self.layers[:layers] for block in layer.blocks)

    @property
    def saved_streams(self) -> tuple[str, ...]:
        """The names under which the stream is kept."""
        names = (self.saves, *(layer.saves for layer in self.layers))
        return tuple(dict.fromkeys(name for name in names if name is not None))

    @classmethod
    def from_gguf(cls, gguf: ModelFile) -> Config:
        """The description of a file; see `registry.read_config`."""
        from urdir.model.families.registry import read_config

        return read_config(gguf)

    def at_context(self, context: int) -> Config:
        """The model as it is for sequences of up to ``context`` tokens: LongRoPE has factors for
        short and for long ones."""
        if not any(rope.long_factors for rope in self.ropes):
            return self
        return replace(self, layers=tuple(_at_context(layer, context) for layer in self.layers))


def _at_context(layer: LayerConfig, context: int) -> LayerConfig:
    def branch(of: Branch) -> Branch:
        network = of.network
        if isinstance(network, Attention) and network.rope is not None:
            return replace(of, network=replace(network, rope=network.rope.at_context(context)))
        return of

    blocks = tuple(
        replace(block, branches=tuple(map(branch, block.branches))) for block in layer.blocks
    )
    return replace(layer, blocks=blocks)
