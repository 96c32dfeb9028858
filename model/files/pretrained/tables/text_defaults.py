"""What classes of text decoders have where the text_config of a multi-modal model says nothing.

transformers leaves out of an inner configuration the values that its class has by default, unlike
in one of a decoder alone. The values are those of `configuration_*.py` of transformers 4.57.1, of
Ministral 3 those of 5.0.0; the ones without effect are left out here. Families of multi-modal
models alone have their own `Family.defaults`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _sizes(
    hidden: int, ffn: int, layers: int, heads: int, context: int, **more: Any
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": context,
        **more,
    }


_QWEN2_VL = _sizes(
    8192, 29568, 80, 64, 32768, num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=1e6
)
_MINISTRAL_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
TEXT_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": _sizes(4096, 11008, 32, 32, 2048, rms_norm_eps=1e-6),
    "mistral": _sizes(
        4096, 14336, 32, 32, 131072, num_key_value_heads=8, rms_norm_eps=1e-6, sliding_window=4096
    ),
    "ministral3": _sizes(
        4096, 14336, 34, 32, 262144, num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5,
        rope_parameters=_MINISTRAL_ROPE,
    ),
    "qwen2": _sizes(4096, 22016, 32, 32, 32768, num_key_value_heads=32, rms_norm_eps=1e-6),
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen3": _sizes(
        4096, 22016, 32, 32, 32768, num_key_value_heads=32, head_dim=128, rms_norm_eps=1e-6
    ),
    "qwen3_moe": _sizes(
        2048, 6144, 24, 32, 32768, num_key_value_heads=4, rms_norm_eps=1e-6,
        moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, norm_topk_prob=False,
    ),
    "qwen3_vl_text": _sizes(
        4096, 22016, 32, 32, 128000, num_key_value_heads=32, head_dim=128, rms_norm_eps=1e-6,
        rope_theta=5e6,
    ),
    "qwen3_vl_moe_text": _sizes(
        2048, 5632, 24, 16, 128000, num_key_value_heads=16, rms_norm_eps=1e-6, rope_theta=5e6,
        moe_intermediate_size=1408, num_experts=60, num_experts_per_tok=4, norm_topk_prob=True,
    ),
    "gemma": _sizes(
        3072, 24576, 28, 16, 8192, num_key_value_heads=16, head_dim=256, rms_norm_eps=1e-6
    ),
    "gemma2": _sizes(
        2304, 9216, 26, 8, 8192, num_key_value_heads=4, head_dim=256, rms_norm_eps=1e-6,
        final_logit_softcapping=30.0, attn_logit_softcapping=50.0,
    ),
    "granite": _sizes(
        4096, 11008, 32, 32, 2048, rms_norm_eps=1e-6, embedding_multiplier=1.0,
        logits_scaling=1.0, residual_multiplier=1.0, attention_multiplier=1.0,
    ),
    "opt": {
        **{"hidden_size": 768, "ffn_dim": 3072, "num_hidden_layers": 12},
        **{"num_attention_heads": 12, "max_position_embeddings": 2048},
    },
    "cohere2": _sizes(8192, 22528, 40, 64, 8192, layer_norm_eps=1e-5),
}  # fmt: skip
#: Fields that the class of a whole model sets in its text decoder, by ``model_type`` of the whole.
SET_BY_WHOLE: Mapping[str, Mapping[str, Any]] = {
    "paligemma": {"use_bidirectional_attention": True},  # prompts are not causal
}
