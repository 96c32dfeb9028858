"""The description of a model as plain data, made by its family.

A model is a list of layers (`layers`) of attention (`attention`), recurrent mixers (`recurrent`),
dense FFNs and mixtures of experts (`feed_forward`). This module has what precedes and follows the
layers. `Config` is a description that was checked against a file.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Self

from urdir.model.families.adapters import AdapterRoom
from urdir.model.families.attention import Attention
from urdir.model.families.embedding import Embedding
from urdir.model.families.feed_forward import RandomRouting
from urdir.model.families.layers import LayerConfig, LowRankConnection, StreamJoin
from urdir.model.families.nextn import NextnHead
from urdir.model.families.recurrent import Lightning, Recurrent
from urdir.model.families.rope import RopeConfig
from urdir.model.families.stored import (
    Linear,
    Normalization,
    RelativeBias,
    Slopes,
    Stored,
    StoredMatrix,
    StoredVector,
)
from urdir.model.families.streaming import Streaming
from urdir.model.families.switch import Switch
from urdir.ptxgen.kernels.streams import STREAMS


@dataclass(frozen=True, slots=True)
class LayerEmbeddings:
    """Per-layer token embeddings, (layers, width):

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
    """The rank whose tensor-parallel part a description is, and the number of ranks. A rank has
    parts of attention and FFNs (`share.shared`); ``vocabulary`` counts the logits of every rank,
    those of rank 0 first."""

    rank: int
    vocabulary: tuple[int, ...]

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.vocabulary)


@dataclass(frozen=True, slots=True)
class Stage:
    """The rank whose pipeline stage a description is, and the number of ranks. The stage's layers
    begin with number ``first`` of the model (`stages.staged`). Rank 0 has embedding and output."""

    rank: int
    ranks: int
    first: int


@dataclass(frozen=True, slots=True)
class SourceText:
    """What the decoder of an encoder-decoder attends to (`CrossKeys`): the states of a text after
    all of its ``encoder``. The decoder's own text begins with the token ``start``."""

    encoder: Description
    start: int


@dataclass(frozen=True, slots=True)
class Description:
    """A whole model, one rank's tensor-parallel ``share``, or one rank's pipeline ``stage``.

    A stage lists its own layers only.

    The residual stream starts as the token's row of ``embedding``, times ``embedding_scale``, plus
    its row of ``positions`` and the ``token_type`` (hidden,) of all tokens, or the row of
    ``token_types`` for its own, normalised by ``embedding_norm``. Positions do not count tokens
    ``padding``, whose row of ``positions`` is the last one. The stream is saved as ``saves``, and
    ``adds`` (hidden,) is added. Logits are ``output`` of ``output_norm`` of the stream, times
    ``logit_scale``, then c * tanh(. / c) for a ``softcap`` c > 0. With ``recalls``, banked streams
    are mixed in before that, as in `Block`. If blocks have hyper-connections, the stream is copied
    to several first, whose mean counts in the end, or a sum that is weighted as ``join`` says.
    Further ``streams`` begin as products of the stream, as long as it, and end as those of
    ``merges``, of which the mean with the stream is taken. Logits of the tokens from ``hides[0]``
    to before ``hides[1]`` are the lowest number (Chameleon).

    Models that make embeddings or scores of texts say so in ``embedding_of_texts``. Encoders (not
    `is_causal`) make nothing else: their ``output`` is the embedding, which has no meaning. Of an
    encoder-decoder this is the decoder, with the encoder in ``source``. A model that is no encoder
    and not causal either ``diffuses``: it makes the logits of masked tokens.
    """

    architecture: str
    layers: tuple[LayerConfig, ...]
    hidden: int
    vocab_size: int  # rows of the embedding; a tokeniser may have fewer tokens
    context_length: int  # that the model was trained for
    embedding: StoredMatrix
    output: Linear
    output_norm: Normalization | None
    embedding_scale: float = 1.0
    positions: StoredMatrix | None = None
    padding: int | None = None
    embedding_norm: Normalization | None = None
    saves: str | None = None
    adds: StoredVector | None = None
    layer_embeddings: LayerEmbeddings | None = None
    logit_scale: float = 1.0
    softcap: float = 0.0
    token_type: StoredVector | None = None
    token_types: StoredMatrix | None = None
    embedding_of_texts: Embedding | None = None
    recalls: Normalization | None = None
    hides: tuple[int, int] | None = None
    source: SourceText | None = None
    diffuses: bool = False
    join: StreamJoin | LowRankConnection | None = None
    streams: tuple[Linear, ...] = ()
    merges: tuple[Linear, ...] = ()
    switch: Switch | None = None  # adapters of its own, for which it has the room
    ignored_keys: tuple[str, ...] = ()  # of the file, unknown to the architecture
    unused_tensors: tuple[str, ...] = ()  # of the file, not used for plain decoding
    share: Share | None = None
    stage: Stage | None = None
    nextn: tuple[NextnHead, ...] = ()  # where they are read
    as_bytes: frozenset[str] = frozenset()  # tensors that many rows multiply as signed bytes
    adapters: AdapterRoom | None = None  # room for LoRA adapters of its matrices
    streaming: Streaming | None = None  # matrices that lie in host memory
    random_routing: RandomRouting | None = None  # experts are not those of the routers

    def __repr__(self) -> str:
        size = f"hidden {self.hidden}, vocabulary {self.vocab_size}, context {self.context_length}"
        return f"<{type(self).__name__} {self.architecture}, {self.n_layers} layers, {size}>"

    @property
    def lent(self) -> frozenset[Stored]:
        """References to weights of another model, which its file does not have."""
        return frozenset()

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def tied(self) -> bool:
        """Whether the embedding doubles as the output matrix."""
        return self.output.matrix == self.embedding

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """The attention of every layer with attention."""
        return tuple(layer.attention for layer in self.layers if layer.attention is not None)

    @property
    def recurrents(self) -> tuple[Recurrent, ...]:
        """The recurrent networks of all layers."""
        return tuple(of for layer in self.layers for of in layer.recurrents)

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The distinct rotations, in order of first use."""
        heads = (head.layer.attention for head in self.nextn)
        mixers = (*self.attentions, *(mixer for mixer in heads if mixer is not None))
        return tuple(dict.fromkeys(rope for mixer in mixers for rope in mixer.ropes))

    @property
    def has_streams(self) -> bool:
        """Whether the residual has several streams (`HyperConnection`)."""
        blocks = (block for layer in self.layers for block in layer.blocks)
        return any(block.hyper is not None for block in blocks)

    @property
    def stream_width(self) -> int:
        """Values of the residual in a row, of all its streams."""
        return self.hidden * (STREAMS if self.has_streams else 1)

    @property
    def takes_adapters(self) -> bool:
        """Whether the room for adapters is for those of requests."""
        return self.adapters is not None and self.switch is None

    @property
    def is_causal(self) -> bool:
        """Whether tokens attend to earlier ones alone, so that the model can continue a text."""
        return all(mixer.causal for mixer in self.attentions)

    @property
    def biases(self) -> tuple[RelativeBias, ...]:
        """The distinct biases by distance, those of an encoder included."""
        mixers = [*self.attentions, *(self.source.encoder.attentions if self.source else ())]
        return tuple(dict.fromkeys(a.relative for a in mixers if a.relative is not None))

    @property
    def slopes(self) -> tuple[Slopes, ...]:
        """The distinct decay slopes of lightning attention."""
        mixers = (of for of in self.recurrents if isinstance(of, Lightning))
        return tuple(dict.fromkeys(of.slopes for of in mixers))

    def banked(self, layers: int) -> int:
        """Number of streams banked by the first ``layers``."""
        return sum(block.banks for layer in self.layers[:layers] for block in layer.blocks)

    @property
    def saved_streams(self) -> tuple[str, ...]:
        """The names under which the stream is saved."""
        names = (self.saves, *(layer.saves for layer in self.layers))
        return tuple(dict.fromkeys(name for name in names if name is not None))

    def at_context(self, context: int) -> Self:
        """The model for sequences of up to ``context`` tokens: LongRoPE has separate factors for
        short and long ones."""
        if not any(rope.long_factors for rope in self.ropes):
            return self
        heads = (replace(head, layer=head.layer.at_context(context)) for head in self.nextn)
        layers = tuple(layer.at_context(context) for layer in self.layers)
        return replace(self, layers=layers, nextn=tuple(heads))


def fields_of(description: Description) -> dict[str, Any]:
    """The fields of a description by name, for a class that adds to them."""
    return {field.name: getattr(description, field.name) for field in fields(description)}
