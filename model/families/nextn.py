"""Heads that predict the token after the next one (multi-token prediction, DeepSeek-V3: arXiv
2412.19437), as `nextn_predict_layers` of a model's file.

    u = join . [norm(embedding of x_p) ; norm(h of p - 1)]
    h = one whole decoder layer of u, at position p
    logits of x_(p+1) = output . norm(h)

The hidden state h of the position before is the model's own, or that of the head when it continues
from a drafted token. Tensors of the layer: nextn.eh_proj, nextn.enorm, nextn.hnorm, and where they
differ from the model's nextn.embed_tokens, nextn.shared_head_norm (in some families called
layer_output_norm), nextn.shared_head_head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from urdir.model.families.layers import LayerConfig
from urdir.model.families.stored import Linear, Normalization, StoredMatrix
from urdir.ptxgen.kernels.norm import Norm

if TYPE_CHECKING:
    from urdir.model.families.reader import Reader


#: The tensor of the head's norm; the first that is stored counts.
_HEAD_NORMS = ("nextn.shared_head_norm", "layer_output_norm")


@dataclass(frozen=True, slots=True)
class NextnKind:
    """What the heads of a family have in common: the ``norm`` of embedding and hidden state, and
    that of the result, ``head_norm``. ``passes_normed``: hidden states are taken and passed on
    after the norm that precedes the logits."""

    norm: Norm
    passes_normed: bool
    head_norm: Norm | None = None  # None: the same


@dataclass(frozen=True, slots=True)
class NextnHead:
    """One head. ``join`` (hidden, 2 * hidden) is of the embedding, then of the hidden state, both
    normalised."""

    layer: LayerConfig
    embedding: StoredMatrix
    embedding_norm: Normalization
    hidden_norm: Normalization
    join: Linear
    norm: Normalization
    output: Linear
    passes_normed: bool


def nextn_head(
    file: Reader,
    index: int,
    layer: LayerConfig,
    kind: NextnKind,
    embedding: StoredMatrix,
    output: Linear,
    output_norm: Normalization | None,
) -> NextnHead:
    """The head of layer ``index``, whose decoder is ``layer``; what it does not store is the
    model's: ``embedding``, ``output``, ``output_norm``."""
    vocab, hidden = embedding.shape
    names = [name for name in _HEAD_NORMS if file.has(f"{name}.weight", index)]
    norm = output_norm
    if norm is None or names:
        norm = file.norm([*names, *_HEAD_NORMS][0], index, kind.head_norm or kind.norm)
    if file.has("nextn.embed_tokens.weight", index):
        embedding = file.matrix("nextn.embed_tokens", index, vocab, hidden)
    if file.has("nextn.shared_head_head.weight", index):
        output = Linear(file.matrix("nextn.shared_head_head", index, vocab, hidden))
    return NextnHead(
        layer,
        embedding,
        file.norm("nextn.enorm", index, kind.norm),
        file.norm("nextn.hnorm", index, kind.norm),
        file.linear("nextn.eh_proj", index, hidden, 2 * hidden),
        norm,
        output,
        kind.passes_normed,
    )
