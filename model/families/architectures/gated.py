"""Decoders with gated attention or a normalised embedding: Muse Glimmer, Spark 2.5, Talkie,
nanochat.

Keys: those of `parts` and `rope`, attention.layer_norm_rms_epsilon; each family lists its own.
llama.cpp: `src/models/` muse-glimmer.cpp, spark2-5.cpp, talkie.cpp.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from urdir.model.families.attention import Attention, QkNorm
from urdir.model.families.dense import decoder, rms_decoder, shared_rope, weightless, windowed_mixer
from urdir.model.families.description import Description
from urdir.model.families.layers import LayerConfig
from urdir.model.families.parts import (
    GELU,
    RELU2,
    attention,
    dense,
    head_dims,
    heads,
    model,
    output_gate,
    rms_norm,
    sequential,
)
from urdir.model.families.reader import Reader
from urdir.model.families.rope import windowed_rope
from urdir.model.families.windows import flagged_layers, windowed_layers
from urdir.ptxgen.kernels.norm import Norm


def muse_glimmer(file: Reader) -> Description:
    """Muse Glimmer: normalised embedding, QK norms, elementwise attention gates; three of four
    layers use a sliding window, and only those have RoPE.

    Keys: attention.sliding_window, attention.sliding_window_pattern, rope.freq_base_swa,
    rope.dimension_count_swa, logit_scale, final_logit_softcapping (default 30; 0: none).
    """
    norm, after, (key_dim, value_dim) = rms_norm(file), Norm("rms", 1e-8), head_dims(file)
    rope = shared_rope(file, "interleaved")
    local = windowed_rope(file, rope, key_dim, scaled=False)
    windowed, window = windowed_layers(file, 4), file.size("attention.sliding_window")

    def gate(layer: int) -> dict[str, Any]:
        return {"gate": output_gate(file, layer, heads(file, layer)[0] * value_dim, "sigmoid")}

    attends = windowed_mixer(file, windowed, window, local, None, head_norm=True, more=gate)

    def layer(index: int) -> LayerConfig:
        return sequential(
            attends(index),
            dense(file, index, bias="absent"),
            (file.norm("attn_norm", index, norm), file.norm("ffn_norm", index, norm)),
            (
                file.norm("post_attention_norm", index, after),
                file.norm("post_ffw_norm", index, after),
            ),
        )

    return model(
        file,
        layer,
        file.norm("output_norm", None, norm),
        output="required",
        embedding_norm=weightless(norm),
        logit_scale=file.number("logit_scale"),
        softcap=file.amount("final_logit_softcapping", 30.0),
    )


def spark2_5(file: Reader) -> Description:
    """Spark 2.5 (iFlytek): per-head attention gates, GELU-gated FFN, sliding windows in some
    layers.

    Keys: attention.sliding_window, attention.sliding_window_pattern (a flag for each layer),
    rope.freq_base_swa, rope.dimension_count_swa.
    """
    key_dim, _ = head_dims(file)
    rope = shared_rope(file, "half")
    local = windowed_rope(file, rope, key_dim, scaled=True)
    windowed, window = flagged_layers(file), file.size("attention.sliding_window")

    def gate(layer: int) -> dict[str, Any]:
        return {"gate": output_gate(file, layer, heads(file, layer)[0], "sigmoid")}

    attends = windowed_mixer(file, windowed, window, local, rope, more=gate)
    return rms_decoder(file, attends, lambda layer: dense(file, layer, GELU, bias="absent"))


def talkie(file: Reader) -> Description:
    """Talkie: norms without weights; QK norms follow RoPE, with a learned scale for each query
    head. After every layer the normalised embedding is added, times layer_output_scale. Key:
    logit_scale.
    """
    norm = rms_norm(file)
    bare = weightless(norm)
    rope = shared_rope(file, "half")

    def mixer(layer: int) -> Attention:
        queries, (key_dim, _) = heads(file, layer)[0], head_dims(file)
        q = file.norm("attn_q_norm", layer, norm, queries, 1)
        assert q.weight is not None
        q = replace(q, weight=q.weight.repeated(key_dim))
        norms = QkNorm(q, bare, after_rope=True)
        return attention(file, layer, rope, qk_norm=norms, output_bias="absent")

    def more(layer: int) -> dict[str, Any]:
        return {
            "adds": "embedding",
            "adds_scale": file.vector("layer_output_scale.weight", layer, 1),
        }

    return decoder(
        file,
        norm,
        mixer,
        norms=(bare, bare),
        output_norm=bare,
        more=more,
        output="required",
        embedding_norm=bare,
        saves="embedding",
        logit_scale=file.number("logit_scale"),
    )


def nanochat(file: Reader) -> Description:
    """nanochat (Karpathy, 2025): norms without weights, also of the embedding; QK norms follow
    RoPE; squared ReLU. Key: final_logit_softcapping. Folders only."""
    norm = rms_norm(file)
    bare, rope = weightless(norm), shared_rope(file, "half")
    norms = QkNorm(bare, bare, after_rope=True)
    return decoder(
        file,
        norm,
        lambda layer: attention(file, layer, rope, qk_norm=norms, output_bias="absent"),
        lambda layer: dense(file, layer, RELU2, gated=False, bias="absent"),
        norms=(bare, bare),
        output_norm=bare,
        output="required",
        embedding_norm=bare,
        softcap=file.amount("final_logit_softcapping"),
    )


ARCHITECTURES = {
    "muse-glimmer": muse_glimmer,
    "spark2_5": spark2_5,
    "talkie": talkie,
    "nanochat": nanochat,
}
