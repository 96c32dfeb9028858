"""T5 (Raffel et al. 2019, arXiv 1910.10683), FLAN-T5 and UMT5: an encoder whose states a decoder
attends to; and its encoder alone.

Encoder and decoder, where c are the encoder's states after its last norm:

    x += O attention(Q x', K x', V x')        x' = norm(x)
    x += O attention(Q x', K c, V c)          x' = norm(x), the decoder's alone
    x += down(f(gate x') * up x')             x' = norm(x)

Scores have a bias by distance and no scale, those of c no bias. Later versions have gates. Two
layers of the description are one of the decoder's: each has one attention, and one cache.

Keys: those of `parts` and `embedding`, attention.layer_norm_rms_epsilon,
attention.relative_buckets_count; t5: decoder_block_count, decoder_start_token_id.
llama.cpp: `src/models/` t5.cpp, t5encoder.cpp.
"""

from __future__ import annotations

from typing import Any

from urdir.model.errors import ConfigError, UnsupportedError
from urdir.model.families.attention import Attention, CrossKeys
from urdir.model.families.dense import rms_decoder
from urdir.model.families.description import Description, SourceText
from urdir.model.families.feed_forward import Dense
from urdir.model.families.layers import Block, Branch, LayerConfig
from urdir.model.families.parts import GELU, RELU, dense, head_dims, heads, model, rms_norm
from urdir.model.families.reader import Reader
from urdir.model.families.stored import Normalization, RelativeBias

#: Read by llama.cpp and used by none of its graphs.
_UNUSED = ("dec.cross_attn_rel_b.weight",)


def t5encoder(file: Reader) -> Description:
    """The encoder of T5."""
    unused = ("output.weight",) if file.has("output.weight") else ()
    return _encoder(file, unused=unused)


def t5(file: Reader) -> Description:
    """T5: encoder and decoder."""
    encoder = _encoder(file)
    start = file.count("decoder_start_token_id")
    file.part, file.blocks_key = "dec.", _blocks_key(file)
    norm = rms_norm(file)
    described = model(
        file,
        [half for layer in range(file.layer_count()) for half in _decoder_layer(file, layer)],
        file.norm("dec.output_norm", None, norm),
        unused=_UNUSED,
        source=SourceText(encoder, start),
        logit_scale=file.own("logit_scale", float, 1.0),
    )
    if start >= described.vocab_size:
        raise ConfigError(
            f"metadata key '{file.key('decoder_start_token_id')}' is {start}: the vocabulary has "
            f"{described.vocab_size} tokens"
        )
    return described


def _blocks_key(file: Reader) -> str:
    """The key of the decoder's number of layers."""
    return "decoder_block_count" if file.has_key("decoder_block_count") else "block_count"


def _encoder(file: Reader, **options: Any) -> Description:
    file.part = "enc."
    return rms_decoder(
        file,
        lambda layer: _attention(file, layer, causal=False),
        lambda layer: _network(file, layer),
        output_norm="enc.output_norm",
        causal=False,
        output="absent",
        **options,
    )


def _decoder_layer(file: Reader, layer: int) -> tuple[LayerConfig, LayerConfig]:
    """Attention to the decoder's tokens; attention to the encoder's, and the FFN."""

    def branch(name: str, network: Attention | Dense) -> Block:
        of: Normalization = file.norm(name, layer, rms_norm(file))
        return Block((Branch(network, of),))

    own = branch("attn_norm", _attention(file, layer, causal=True))
    cross = branch("cross_attn_norm", _attention(file, layer, "cross_attn"))
    network = branch("ffn_norm", _network(file, layer))
    return LayerConfig((own,)), LayerConfig((cross, network))


def _attention(
    file: Reader, layer: int, name: str = "attn", *, causal: bool | None = None
) -> Attention:
    """Attention to tokens of the same text, ``causal`` or to both sides; None: to another one."""
    (count, kv_heads), (key_dim, value_dim) = heads(file, layer), head_dims(file)
    if kv_heads != count:
        key = file.key("attention.head_count_kv")
        raise UnsupportedError(f"{key} is {kv_heads}, of {count} heads: as many are supported")
    width, hidden = count * key_dim, file.hidden
    q, k, v = (
        file.linear(f"{name}_{of}", layer, rows, hidden)
        for of, rows in (("q", width), ("k", width), ("v", count * value_dim))
    )
    is_own = causal is not None
    return Attention(
        heads=count,
        kv_heads=count,
        key_dim=key_dim,
        value_dim=value_dim,
        scale=1.0,
        q=q,
        k=k if is_own else None,
        v=v if is_own else None,
        o=file.linear(f"{name}_o", layer, hidden, count * value_dim),
        causal=causal is not False,
        relative=_bias(file, layer, count, causal=causal) if causal is not None else None,
        cross=None if is_own else CrossKeys(k, v),
    )


def _bias(file: Reader, layer: int, count: int, *, causal: bool) -> RelativeBias:
    """The bias by distance: a layer's own, or that of the first one."""
    buckets = file.size("attention.relative_buckets_count")
    if buckets < 4 or buckets % 2:
        key = file.key("attention.relative_buckets_count")
        raise ConfigError(f"metadata key '{key}' is {buckets}: expected an even number from 4 on")
    own = layer if file.has("attn_rel_b.weight", layer) else 0
    return RelativeBias(
        file.vector("attn_rel_b.weight", own, buckets, count), buckets, count, causal
    )


def _network(file: Reader, layer: int) -> Dense:
    gated = file.anywhere("ffn_gate.weight")
    return dense(file, layer, GELU if gated else RELU, gated=gated, bias="absent")


ARCHITECTURES = {"t5": t5, "t5encoder": t5encoder}
