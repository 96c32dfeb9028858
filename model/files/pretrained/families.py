"""Names in transformers and in GGUF: a table for each ``model_type``.

Source: `llama.cpp/conversion`, and transformers' `configuration_*.py` for what a field means.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Family:
    """One ``model_type``. Names outside the tables are refused."""

    architecture: str  # GGUF's
    #: Modules, with {} for the number of a layer or expert, and their GGUF names.
    names: Mapping[str, str]
    #: Fields of config.json and their metadata keys, without the architecture.
    keys: Mapping[str, tuple[str, ...]]
    #: Fields, with the values that GGUF's architecture implies.
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    permuted: bool = False  # rows of Q and K are permuted, see `tensors`
    norm_shift: float = 0.0  # added to norms
    tied: bool = False  # GGUF's architecture has no separate output matrix
    #: Every nth layer attends globally, the others use a window; 0: all attend globally.
    full_every: int = 0
    #: GGUF's architecture has no window: contexts up to the window size are unaffected.
    window_limits_context: bool = False
    sqrt_head_scale: bool = False  # query_pre_attn_scalar must be GGUF's implied value


def _layer(names: Mapping[str, str]) -> dict[str, str]:
    return {f"model.layers.{{}}.{ours}": f"blk.{{}}.{theirs}" for ours, theirs in names.items()}


_ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_ATTENTION = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
}
_QK_NORM = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
_GATED = {
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NORMS_AROUND = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_DENSE = {"post_attention_layernorm": "ffn_norm"} | _GATED
_QWEN_EXPERTS = {
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.{}.gate_proj": "ffn_gate_exps",
    "mlp.experts.{}.up_proj": "ffn_up_exps",
    "mlp.experts.{}.down_proj": "ffn_down_exps",
}
_MIXTRAL_EXPERTS = {
    "post_attention_layernorm": "ffn_norm",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.{}.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.{}.w3": "ffn_up_exps",
    "block_sparse_moe.experts.{}.w2": "ffn_down_exps",
}

_LLAMA_NAMES = _ENDS | _layer(_ATTENTION | _DENSE)

_SIZES = {
    "num_hidden_layers": ("block_count",),
    "max_position_embeddings": ("context_length",),
    "hidden_size": ("embedding_length",),
    "intermediate_size": ("feed_forward_length",),
    "num_attention_heads": ("attention.head_count",),
    "num_key_value_heads": ("attention.head_count_kv",),
    "head_dim": ("attention.key_length", "attention.value_length"),
}
_KEYS = _SIZES | {"rms_norm_eps": ("attention.layer_norm_rms_epsilon",)}
_EXPERT_KEYS = {
    "num_experts": ("expert_count",),
    "num_local_experts": ("expert_count",),
    "num_experts_per_tok": ("expert_used_count",),
}
_SILU = {"hidden_act": ("silu", "swish")}
_GELU_TANH = {
    "hidden_act": ("gelu_pytorch_tanh",),
    "hidden_activation": ("gelu_pytorch_tanh",),
}
_TIED = {"tie_word_embeddings": (True,)}
_NO_WINDOW = {"use_sliding_window": (False,)}
# Biases are detected from the tensors.
_BIASES = frozenset({"attention_bias", "mlp_bias", "use_bias"})
_WINDOW_UNUSED = frozenset({"sliding_window", "max_window_layers"})
_ROUTER_TRAINING = frozenset(
    {"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"}
)

_LLAMA = Family("llama", _LLAMA_NAMES, _KEYS, _SILU, _BIASES | {"pretraining_tp"}, permuted=True)

#: By the ``model_type`` of config.json.
FAMILIES: Mapping[str, Family] = {
    "llama": _LLAMA,
    "mistral": Family(
        "llama", _LLAMA_NAMES, _KEYS, _SILU, _BIASES, permuted=True, window_limits_context=True
    ),
    "mixtral": Family(
        "llama",
        _ENDS | _layer(_ATTENTION | _MIXTRAL_EXPERTS),
        _KEYS | _EXPERT_KEYS,
        _SILU,
        _BIASES | _ROUTER_TRAINING,
        permuted=True,
        window_limits_context=True,
    ),
    "qwen2": Family("qwen2", _LLAMA_NAMES, _KEYS, _SILU | _NO_WINDOW, _WINDOW_UNUSED),
    "qwen3": Family(
        "qwen3",
        _LLAMA_NAMES | _layer(_QK_NORM),
        _KEYS,
        _SILU | _NO_WINDOW,
        _BIASES | _WINDOW_UNUSED,
    ),
    "qwen3_moe": Family(
        "qwen3moe",
        _ENDS | _layer(_ATTENTION | _QK_NORM | _QWEN_EXPERTS),
        _KEYS | _EXPERT_KEYS | {"moe_intermediate_size": ("expert_feed_forward_length",)},
        _SILU
        | _NO_WINDOW
        | {"norm_topk_prob": (True,), "decoder_sparse_step": (1,), "mlp_only_layers": ([],)},
        _BIASES | _WINDOW_UNUSED | _ROUTER_TRAINING,
    ),
    "granite": Family(
        "granite",
        _LLAMA_NAMES,
        _KEYS
        | {
            "attention_multiplier": ("attention.scale",),
            "embedding_multiplier": ("embedding_scale",),
            "residual_multiplier": ("residual_scale",),
            "logits_scaling": ("logit_scale",),
        },
        _SILU,
        _BIASES,
        permuted=True,
    ),
    "smollm3": Family(
        "smollm3",
        _LLAMA_NAMES,
        _KEYS,
        # GGUF's architecture has no RoPE in every fourth layer; see `config`
        _SILU | _NO_WINDOW | {"no_rope_layer_interval": (4,)},
        _BIASES | _WINDOW_UNUSED | {"pretraining_tp"},
        permuted=True,
    ),
    "gemma2": Family(
        "gemma2",
        _ENDS | _layer(_ATTENTION | _GATED | _NORMS_AROUND),
        _KEYS
        | {
            "attn_logit_softcapping": ("attn_logit_softcapping",),
            "final_logit_softcapping": ("final_logit_softcapping",),
            "sliding_window": ("attention.sliding_window",),
        },
        _GELU_TANH | _TIED | {"use_bidirectional_attention": (False,)},
        _BIASES,
        norm_shift=1.0,
        tied=True,
        full_every=2,
        sqrt_head_scale=True,
    ),
    "gemma3_text": Family(
        "gemma3",
        _ENDS | _layer(_ATTENTION | _QK_NORM | _GATED | _NORMS_AROUND),
        _KEYS
        | {
            "final_logit_softcapping": ("final_logit_softcapping",),
            "sliding_window": ("attention.sliding_window",),
        },
        _GELU_TANH | {"use_bidirectional_attention": (False,), "sliding_window_pattern": (6,)},
        _BIASES,
        norm_shift=1.0,
        full_every=6,
        sqrt_head_scale=True,
    ),
    "phi3": Family(
        "phi3",
        _ENDS
        | _layer(
            {
                "input_layernorm": "attn_norm",
                "self_attn.qkv_proj": "attn_qkv",
                "self_attn.o_proj": "attn_output",
                "post_attention_layernorm": "ffn_norm",
                "mlp.gate_up_proj": "ffn_up",
                "mlp.down_proj": "ffn_down",
            }
        ),
        _KEYS,
        _SILU,
        _BIASES,
        window_limits_context=True,
    ),
    "olmo2": Family(
        "olmo2",
        _ENDS
        | _layer(
            {name: to for name, to in _ATTENTION.items() if name != "input_layernorm"}
            | _QK_NORM
            | _GATED
            | {
                "post_attention_layernorm": "post_attention_norm",
                "post_feedforward_layernorm": "post_ffw_norm",
            }
        ),
        _KEYS,
        _SILU,
        _BIASES,
    ),
    "starcoder2": Family(
        "starcoder2",
        _ENDS
        | _layer(
            _ATTENTION
            | {
                "post_attention_layernorm": "ffn_norm",
                "mlp.c_fc": "ffn_up",
                "mlp.c_proj": "ffn_down",
            }
        ),
        _SIZES | {"norm_epsilon": ("attention.layer_norm_epsilon",)},
        _GELU_TANH | {"mlp_type": ("default",), "norm_type": ("layer_norm",)},
        _BIASES,
        window_limits_context=True,
    ),
    "cohere": Family(
        "command-r",
        _ENDS | _layer(_ATTENTION | _GATED),
        _SIZES
        | {
            "layer_norm_eps": ("attention.layer_norm_epsilon",),
            "logit_scale": ("logit_scale",),
        },
        _SILU | _TIED | {"use_qk_norm": (False,)},
        _BIASES,
        tied=True,
    ),
}
