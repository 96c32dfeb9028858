"""Encoders with norms before their networks: ModernBERT, NeoBERT, EuroBERT, and decoders that
became embedding models.

    x += O attention(rope(Q x'), rope(K x'), V x')        x' = norm(x)
    x += down(f(gate x') * up x')                         x' = norm(x)

Every token attends to all of its text.

ModernBERT (arXiv 2412.13663): LayerNorm without bias, none before the first attention; windows in
two of three layers, which rotate with a base of their own; GELU gates, or what hidden_activation
says. NeoBERT (2502.19587), EuroBERT (2503.05500) and llama-embed: RMSNorm, SiLU gates.
EmbeddingGemma (2509.20354) is Gemma 3 with windows to both sides.

Keys: those of `parts`, `rope`, `windows` and `embedding`, attention.layer_norm_epsilon or
layer_norm_rms_epsilon; modern-bert: hidden_activation, rope.freq_base_swa; gemma-embedding:
rope.freq_base_swa, dense_2_feat_in, dense_2_feat_out, dense_3_feat_in, dense_3_feat_out.
llama.cpp: `src/models/` modern-bert.cpp, neo-bert.cpp, eurobert.cpp, llama-embed.cpp,
gemma-embedding.cpp.
"""

from __future__ import annotations

import math
from typing import Any

from urdir.model.families.dense import mixer, rms_decoder, shared_rope, windowed_mixer
from urdir.model.families.description import Description
from urdir.model.families.layers import Block, Branch, LayerConfig
from urdir.model.families.parts import (
    GELU,
    GELU_ERF,
    SILU,
    dense,
    gelu,
    head_dims,
    layer_norm,
    model,
    sequential,
)
from urdir.model.families.reader import Reader
from urdir.model.families.rope import windowed_rope
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
    rope = shared_rope(file, "half")
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


def modern_bert_decoder(file: Reader) -> Description:
    """ModernBERT as a causal decoder (Ettin, arXiv 2507.11412): a dense matrix, GELU and a norm
    between the last norm and the output. Folders only."""
    window, dim, norm = optional_window(file), head_dims(file)[0], layer_norm(file)
    rope = shared_rope(file, "half")
    local = windowed_rope(file, rope, dim, scaled=False)
    windowed = optional_windows(file, window, 3, full_first=True)
    build = windowed_mixer(file, windowed, window, local, rope, qkv_bias="absent")

    def layer(index: int) -> LayerConfig:
        before = file.norm("attn_norm", index, norm) if index else None
        network = dense(file, index, gelu(file), bias="absent")
        return sequential(build(index), network, (before, file.norm("ffn_norm", index, norm)))

    head = Branch(
        file.linear("head", None, file.hidden, file.hidden), file.norm("output_norm", None, norm)
    )
    # each of them replaces the stream with its result
    last = LayerConfig((Block((head,), banks=True), Block((Branch(GELU_ERF),), banks=True)))
    return model(
        file,
        [*map(layer, range(file.layer_count())), last],
        file.norm("head_norm", None, norm),
        embedding_norm=file.norm("token_embd_norm", None, norm),
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
    rope = shared_rope(file, "half")
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


ARCHITECTURES = {
    "modern-bert": modern_bert,
    "modern-bert-decoder": modern_bert_decoder,
    "neo-bert": neo_bert,
    "eurobert": eurobert,
    "llama-embed": llama_embed,
    "gemma-embedding": gemma_embedding,
}
