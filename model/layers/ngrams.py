"""Memory of n-grams as operations."""

from __future__ import annotations

from urdir.model.families.ngrams import NgramMemory
from urdir.model.families.stored import Normalization
from urdir.model.graph.ngrams import ConvolveApart, EmbedNgrams, GateStreams
from urdir.model.graph.ops import Add, Norm
from urdir.model.graph.tensor import BRANCH, Tensor
from urdir.model.layers.builder import LayerOps


def ngram_memory(
    at: LayerOps, of: NgramMemory, x: Tensor, norm: Normalization | None, scale: float
) -> Tensor:
    """What is added to the streams x; see `NgramMemory`."""
    assert norm is None
    assert scale == 1.0
    e = Tensor("ngram embedding", x.rows, of.hash.heads * of.table.cols)
    e = at.graph.add(EmbedNgrams(at.name("per_layer_token_embd"), e, of.table, of.hash))
    key, value = (
        at.product("ple", e, linear, name)
        for linear, name in ((of.key, "ngram key"), (of.o, "ngram value"))
    )
    key = _normed(at, "ple_norm_key", key, of.key_norm, "ngram key normed")
    query = _normed(at, "ple_norm_query", x, of.query_norm, "ngram query")
    gated = Tensor("gated values", x.rows, x.width)
    gated = at.graph.add(GateStreams(at.name("ple_gate"), gated, key, query, value))
    z = _normed(at, "ple_norm_conv", gated, of.conv_norm, "ngram query")
    y = Tensor("ngram key", x.rows, x.width)
    y = at.graph.add(ConvolveApart(at.name("ple_conv1d"), y, z, of, at.index))
    return at.graph.add(Add(at.name("ple_sum"), Tensor(BRANCH, x.rows, x.width), gated, y))


def _normed(at: LayerOps, label: str, x: Tensor, of: Normalization, name: str) -> Tensor:
    """The norm of each stream."""
    y = Tensor(name, x.rows, x.width)
    return at.graph.add(Norm(at.name(label), y, x, of, at.config.hidden))


#: The operations of each mixer, as in `layers.recurrent`.
MIXERS = {NgramMemory: ngram_memory}
