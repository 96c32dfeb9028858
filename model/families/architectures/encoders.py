"""Encoders with norms before their networks: ModernBERT, NeoBERT, EuroBERT, T5's, and decoders that
became embedding models.

    x += O attention(rope(Q x'), rope(K x'), V x')        x' = norm(x)
    x += down(f(gate x') * up x')                         x' = norm(x)

Every token attends to all of its text.

ModernBERT (arXiv 2412.13663): LayerNorm without bias, none before the first attention; windows in
two of three layers, which rotate with a base of their own; GELU gates, or what hidden_activation
says. NeoBERT (2502.19587), EuroBERT (2503.05500) and llama-embed: RMSNorm, SiLU gates.
EmbeddingGemma (2509.20354) is Gemma 3 with windows to both sides. T5 (1910.10683) has a bias by
distance, scores without a scale, and a gate in its later versions.

Keys: those of `parts`, `rope`, `windows` and `embedding`, attention.layer_norm_epsilon or
layer_norm_rms_epsilon; modern-bert: hidden_activation, rope.freq_base_swa; gemma-embedding:
rope.freq_base_swa, dense_2_feat_in, dense_2_feat_out, dense_3_feat_in, dense_3_feat_out; t5encoder:
attention.relative_buckets_count.
llama.cpp: `src/models/` modern-bert.cpp, neo-bert.cpp, eurobert.cpp, llama-embed.cpp,
gemma-embedding.cpp, t5encoder.cpp.
"""

from __future__ import annotations

import math
from typing import Any

from urdir.model.errors import ConfigError, UnsupportedError
from urdir.model.families.attention import Attention
from urdir.model.families.dense import decoder, mixer, rms_decoder, shared_rope, windowed_mixer
from urdir.model.families.description import Description
from urdir.model.families.feed_forward import Dense
from urdir.model.families.layers import LayerConfig
from urdir.model.families.parts import (
    GELU,
    RELU,
    SILU,
    dense,
    gelu,
    head_dims,
    heads,
    layer_norm,
    model,
    rms_norm,
    sequential,
)
from urdir.model.families.reader import Reader
from urdir.model.families.rope import read_rope, windowed_rope
from urdir.model.families.stored import RelativeBias
from urdir.model.families.windows import optional_window, optional_windows, windowed_layers
from urdir.ptxgen.kernels.rotation import RopeStyle

_POST_NORMS = ("post_attention_norm", "post_ffw_norm")
#: What gates ModernBERT's FFN, by hidden_activation.
_ACTIVATIONS = {"gelu": GELU, "silu": SILU, "swiglu": SILU, "geglu": GELU}
#: What encoders have in common. The logits of a file's output are not made.
_ENCODER: dict[str, Any] = {"causal": False, "output": "absent"}


def modern_bert(file: Reader) -> Description:
    """ModernBERT: windows in two of three layers."""
    window, dim, norm = optional_window(file), head_dims(file)[0], layer_norm(file)
    rope = read_rope(file, "half", dim, factors=False)
    local = windowed_rope(file, rope, dim, scaled=False) if window else rope
    windowed = optional_windows(file, window, 3, full_first=True)
    build = windowed_mixer(file, windowed, window, local, rope, causal=False, qkv_bias="absent")
    name = file.optional("hidden_activation", str, "gelu")
    activation = gelu(file) if name == "gelu" else _ACTIVATIONS.get(name, GELU)

    def layer(index: int) -> LayerConfig:
        has_norm = index > 0 or file.has("attn_norm.weight", 0)
        before = file.norm("attn_norm", index, norm) if has_norm else None
        network = dense(file, index, activation, bias="absent")
        return sequential(build(index), network, (before, file.norm("ffn_norm", index, norm)))

    return model(
        file,
        layer,
        file.norm("output_norm", None, norm),
        embedding_norm=file.norm("token_embd_norm", None, norm),
        **_ENCODER,
    )


def neo_bert(file: Reader) -> Description:
    """NeoBERT: neighbours rotate together."""
    return _gated(file, "interleaved", "enc.output_norm")


def eurobert(file: Reader) -> Description:
    """EuroBERT."""
    return _gated(file, "half", "output_norm")


def llama_embed(file: Reader) -> Description:
    """Llama as an encoder."""
    unused = ("output.weight",) if file.has("output.weight") else ()
    return _gated(file, "interleaved", "output_norm", unused=unused)


def _gated(file: Reader, style: RopeStyle, output_norm: str, **options: Any) -> Description:
    """RMSNorm, RoPE and SiLU gates."""
    return rms_decoder(
        file,
        mixer(file, shared_rope(file, style), causal=False),
        lambda layer: dense(file, layer),
        output_norm=output_norm,
        **_ENCODER,
        **options,
    )


def gemma_embedding(file: Reader) -> Description:
    """EmbeddingGemma: five of six layers have windows, and a rotation of their own."""
    dim, window = head_dims(file)[0], file.size("attention.sliding_window")
    rope = read_rope(file, "half", dim, factors=False)
    local = windowed_rope(file, rope, dim, scaled=False)
    windowed = windowed_layers(file, 6)
    unused = ("output.weight",) if file.has("output.weight") else ()
    return rms_decoder(
        file,
        windowed_mixer(file, windowed, window, local, rope, causal=False, head_norm=True),
        lambda layer: dense(file, layer, GELU, bias="absent"),
        post_norms=_POST_NORMS,
        embedding_scale=math.sqrt(file.hidden),
        unused=unused,
        **_ENCODER,
    )


def t5encoder(file: Reader) -> Description:
    """The encoder of T5."""
    buckets, norm = file.size("attention.relative_buckets_count"), rms_norm(file)
    if buckets < 4 or buckets % 2:
        key = file.key("attention.relative_buckets_count")
        raise ConfigError(f"metadata key '{key}' is {buckets}: expected an even number from 4 on")
    unused = ("output.weight",) if file.has("output.weight") else ()
    file.part = "enc."
    return decoder(
        file,
        norm,
        lambda layer: _t5_attention(file, layer, buckets),
        lambda layer: _t5_network(file, layer),
        output_norm="enc.output_norm",
        unused=unused,
        **_ENCODER,
    )


def _t5_attention(file: Reader, layer: int, buckets: int) -> Attention:
    (count, kv_heads), (key_dim, value_dim) = heads(file, layer), head_dims(file)
    if kv_heads != count:
        key = file.key("attention.head_count_kv")
        raise UnsupportedError(f"{key} is {kv_heads}, of {count} heads: as many are supported")
    own = layer if file.has("attn_rel_b.weight", layer) else 0
    weight = file.vector("attn_rel_b.weight", own, buckets, count)
    width, hidden = count * key_dim, file.hidden
    q, k, v = (
        file.linear(f"attn_{name}", layer, rows, hidden, bias="absent")
        for name, rows in (("q", width), ("k", width), ("v", count * value_dim))
    )
    return Attention(
        heads=count,
        kv_heads=count,
        key_dim=key_dim,
        value_dim=value_dim,
        scale=1.0,
        q=q,
        k=k,
        v=v,
        o=file.linear("attn_o", layer, hidden, count * value_dim, bias="absent"),
        causal=False,
        relative=RelativeBias(weight, buckets, count),
    )


def _t5_network(file: Reader, layer: int) -> Dense:
    gated = file.anywhere("ffn_gate.weight")
    return dense(file, layer, GELU if gated else RELU, gated=gated, bias="absent")


ARCHITECTURES = {
    "modern-bert": modern_bert,
    "neo-bert": neo_bert,
    "eurobert": eurobert,
    "llama-embed": llama_embed,
    "gemma-embedding": gemma_embedding,
    "t5encoder": t5encoder,
}
