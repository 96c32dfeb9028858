"""BERT (Devlin et al. 2018, arXiv 1810.04805) and the encoders that came of it.

The sum of the embeddings of token, type and position is normalised. Norms come after the networks:

    x = norm(x + O attention(Q x, K x, V x))        every token attends to all of its text
    x = norm(x + down(f(up x)))

In folders the second text of a pair is of type 1, else all texts are of type 0. BERT has learned
positions. Nomic (arXiv 2402.01613) and Jina 3 (2409.10173) rotate; Nomic gates with SiLU, or has
experts in every second layer (2502.07972). Jina 2 (2310.19923) has ALiBi and gates with GELU; some
of its files normalise queries and keys, and add the stream twice:

    x = norm2(x + norm(x + O attention(...)))

Keys: those of `parts`, `rope` and `embedding`, attention.layer_norm_epsilon; nomic-bert-moe:
expert_count, expert_used_count, expert_weights_scale, moe_every_n_layers.
llama.cpp: `src/models/` bert.cpp, nomic-bert.cpp, nomic-bert-moe.cpp, jina-bert-v2.cpp,
jina-bert-v3.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from urdir.model.families.attention import Attention, QkNorm
from urdir.model.families.dense import shared_rope
from urdir.model.families.description import Description
from urdir.model.families.feed_forward import Dense
from urdir.model.families.layers import Block, Branch, LayerConfig, Network
from urdir.model.families.mixtures import dense_width, mixture, router, weights_scale
from urdir.model.families.parts import attention, dense, gelu, head_dims, heads, layer_norm, model
from urdir.model.families.reader import Reader
from urdir.model.families.stored import Normalization

#: Slopes of Jina 2's ALiBi.
_MAX_BIAS = 8.0


def bert(file: Reader) -> Description:
    """BERT, RoBERTa and XLM-RoBERTa: learned positions, GELU. Folders of RoBERTa have a position
    for tokens of padding, after the others; GGUF leaves it out."""
    padding, length = file.own("padding", int, None), file.size("context_length")
    positions = file.matrix("position_embd", None, length + (padding is not None), file.hidden)
    found = _encoder(file, _mixer(file), lambda layer: dense(file, layer, gelu(file), gated=False))
    return replace(found, positions=positions, padding=padding)


def nomic_bert(file: Reader) -> Description:
    """Nomic Embed 1: RoPE, SiLU gates, no biases."""
    mixer = _mixer(file, rope=shared_rope(file, "half"))
    return _encoder(file, mixer, lambda layer: dense(file, layer, bias="absent"))


def nomic_bert_moe(file: Reader) -> Description:
    """Nomic Embed 2: experts in every second layer."""
    period = file.count("moe_every_n_layers")

    def network(layer: int) -> Network:
        if not period or layer % period != 1:
            return dense(file, layer, gelu(file), gated=False)
        route = router(file, layer, scale=weights_scale(file))
        return mixture(file, layer, route, dense_width(file, layer), gelu(file), gate="absent")

    return _encoder(file, _mixer(file, rope=shared_rope(file, "half")), network)


def jina_bert_v2(file: Reader) -> Description:
    """Jina Embeddings 2: ALiBi, GELU gates, which have no bias."""
    file.optional("attention.max_alibi_bias", float, _MAX_BIAS)  # llama.cpp does not read it
    return _encoder(file, _mixer(file, max_bias=_MAX_BIAS), lambda layer: _gated(file, layer))


def jina_bert_v3(file: Reader) -> Description:
    """Jina Embeddings 3: RoPE, GELU."""
    mixer = _mixer(file, rope=shared_rope(file, "half"))
    return _encoder(file, mixer, lambda layer: dense(file, layer, gelu(file), gated=False))


def _gated(file: Reader, layer: int) -> Dense:
    """The FFN of Jina 2: gated by a matrix of its own, by the first half of ffn_up, or not."""
    width, hidden = file.size_at("feed_forward_length", layer), file.hidden
    if file.anywhere("ffn_gate.weight"):
        network = dense(file, layer, gelu(file))
        assert network.gate is not None
        return replace(network, gate=replace(network.gate, bias=None))
    gated = file.stored.get(f"blk.{layer}.ffn_up.weight") == (2 * width, hidden)
    return dense(file, layer, gelu(file), gated=gated)


def _mixer(file: Reader, **options: Any) -> Callable[[int], Attention]:
    """Attention to all of a text, with the norms of queries and keys that a file has."""

    def build(layer: int) -> Attention:
        fields = {"rope": None, "causal": False, "qk_norm": _row_norms(file, layer), **options}
        return attention(file, layer, **fields)

    return build


def _row_norms(file: Reader, layer: int) -> QkNorm | None:
    (queries, keys), dim, norm = heads(file, layer), head_dims(file)[0], layer_norm(file)
    names = (("attn_q_norm", queries), ("attn_k_norm", keys))
    q, k = (
        file.optional_norm(name, layer, norm, count * dim, bias="optional") for name, count in names
    )
    return QkNorm(q, k, over="row") if q and k else None


def _encoder(
    file: Reader, mixer: Callable[[int], Attention], network: Callable[[int], Network]
) -> Description:
    """The model of such layers, with norms after their networks."""
    norm = layer_norm(file)

    def named(name: str, layer: int | None = None) -> Normalization:
        return file.norm(name, layer, norm, bias="optional")

    def layer(index: int) -> LayerConfig:
        after = named("attn_output_norm", index)
        first = Block((Branch(mixer(index)),))
        if file.anywhere("attn_norm_2.weight"):
            first = replace(first, post_norm=after, sums_stream=True)
            after = named("attn_norm_2", index)
        blocks = first, Block((Branch(network(index)),), stream_norm=after)
        return LayerConfig(blocks, output_norm=named("layer_output_norm", index))

    types = file.stored.get("token_types.weight", (1, file.hidden))
    rows = types[0] if len(types) == 2 else 1
    kinds = file.optional_vector("token_types.weight", None, rows, file.hidden)
    # llama.cpp gives all tokens of a GGUF file type 0
    own = rows > 1 and file.of_folder
    return model(
        file,
        layer,
        None,
        causal=False,
        output="absent",
        embedding_norm=named("token_embd_norm"),
        token_type=None if own else kinds and kinds.part(0, file.hidden),
        token_types=file.matrix("token_types", None, rows, file.hidden) if own else None,
    )


ARCHITECTURES = {
    "bert": bert,
    "nomic-bert": nomic_bert,
    "nomic-bert-moe": nomic_bert_moe,
    "jina-bert-v2": jina_bert_v2,
    "jina-bert-v3": jina_bert_v3,
}
