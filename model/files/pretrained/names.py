"""Names of modules in published checkpoints, and of the tensors of a description they hold.

A family's table (`family.Family.names`) precedes these. Prefixes are removed before: see `places`.
``{}`` stands for the number of an expert, or of another item that is stacked.
"""

from __future__ import annotations

from collections.abc import Mapping

#: Modules outside of layers.
ENDS = {
    **dict.fromkeys(("embed_tokens", "wte", "word_embeddings", "embed_in"), "token_embd"),
    **dict.fromkeys(("embeddings", "tok_embeddings"), "token_embd"),
    **dict.fromkeys(("norm", "ln_f", "norm_f", "final_layernorm", "final_layer_norm"),
                    "output_norm"),
    **dict.fromkeys(("lm_head", "embed_out"), "output"),
    **dict.fromkeys(("wpe", "embed_positions"), "position_embd"),
    "word_embeddings_layernorm": "token_embd_norm",
}  # fmt: skip

_ATTENTION = {
    **{f"{name}_proj": f"attn_{name}" for name in "qkv"},
    **dict.fromkeys(("o_proj", "out_proj", "dense"), "attn_output"),
    **dict.fromkeys(("qkv_proj", "query_key_value", "Wqkv", "c_attn"), "attn_qkv"),
    "c_proj": "attn_output",
    **dict.fromkeys(("q_norm", "q_layernorm", "query_layernorm"), "attn_q_norm"),
    **dict.fromkeys(("k_norm", "k_layernorm", "key_layernorm"), "attn_k_norm"),
    **{"q_layernorm.norms.{}": "attn_q_norm", "k_layernorm.norms.{}": "attn_k_norm"},
    **{"sinks": "attn_sinks", "attention_sink_bias": "attn_sinks.weight"},
    **dict.fromkeys(("g_proj", "gate_proj"), "attn_gate"),
    # latent attention
    **{"q_a_proj": "attn_q_a", "q_b_proj": "attn_q_b", "q_a_layernorm": "attn_q_a_norm"},
    **{"kv_a_proj_with_mqa": "attn_kv_a_mqa", "kv_b_proj": "attn_kv_b"},
    "kv_a_layernorm": "attn_kv_a_norm",
}
_DENSE = {
    **dict.fromkeys(("gate_proj", "w1"), "ffn_gate"),
    **dict.fromkeys(("up_proj", "w3", "fc1", "c_fc", "fc_in", "dense_h_to_4h"), "ffn_up"),
    **dict.fromkeys(("down_proj", "w2", "fc2", "c_proj", "fc_out", "dense_4h_to_h"), "ffn_down"),
    "gate_up_proj": "ffn_up",  # the gates first
}
_GATED = {"gate": ("gate_proj", "w1"), "up": ("up_proj", "w3"), "down": ("down_proj", "w2")}
_EXPERTS = {
    **dict.fromkeys(("gate", "router", "gate.wg", "router.layer", "router.gate"), "ffn_gate_inp"),
    **{f"experts.{{}}.{name}": f"ffn_{to}_exps" for to, of in _GATED.items() for name in of},
    **{"experts.gate_up_proj": "ffn_gate_up_exps", "experts.down_proj": "ffn_down_exps"},
    "experts.gate_up_proj_bias": "ffn_gate_up_exps.bias",
    "experts.down_proj_bias": "ffn_down_exps.bias",
    **{"input_linear": "ffn_gate_up_exps", "output_linear": "ffn_down_exps"},
    **{
        f"{shared}.{name}": f"ffn_{to}_shexp"
        for shared in ("shared_experts", "shared_expert", "shared_mlp")
        for to, of in _GATED.items()
        for name in of
    },
    "shared_expert_gate": "ffn_gate_inp_shexp",
    **dict.fromkeys(
        ("gate.e_score_correction_bias", "e_score_correction_bias", "expert_bias"),
        "exp_probs_b.bias",
    ),
    **dict.fromkeys(("gate.expert_bias", "experts.e_score_correction_bias"), "exp_probs_b.bias"),
    "moe_statics.e_score_correction_bias": "exp_probs_b.bias",
}
MAMBA = {
    **{"in_proj": "ssm_in", "x_proj": "ssm_x", "dt_proj": "ssm_dt", "out_proj": "ssm_out"},
    **{"A_log": "ssm_a.", "D": "ssm_d.", "dt_bias": "ssm_dt.bias", "conv1d": "ssm_conv1d"},
    **{"norm": "ssm_norm", "dt_layernorm": "ssm_dt_norm"},
    **{"b_layernorm": "ssm_b_norm", "c_layernorm": "ssm_c_norm"},
}
_DELTA = {
    **{"in_proj_qkv": "attn_qkv", "in_proj_z": "attn_gate", "out_proj": "ssm_out"},
    **{"in_proj_a": "ssm_alpha", "in_proj_b": "ssm_beta", "in_proj_ba": "ssm_ba"},
    **{"conv1d": "ssm_conv1d", "A_log": "ssm_a.", "dt_bias": "ssm_dt.bias", "norm": "ssm_norm"},
}


def under(prefixes: tuple[str, ...], names: Mapping[str, str]) -> dict[str, str]:
    """The names with each of some prefixes."""
    return {f"{prefix}.{name}": to for prefix in prefixes for name, to in names.items()}


#: Modules of a layer. A tensor's name ends in ".weight" or ".bias" unless a name here has a dot: a
#: parameter without a module; a final dot is removed.
LAYER: dict[str, str | tuple[str, ...]] = {
    **dict.fromkeys(("input_layernorm", "ln_1", "norm_1", "attention_layernorm"), "attn_norm"),
    **dict.fromkeys(("post_attention_layernorm", "ln_2", "norm_2"), "ffn_norm"),
    **dict.fromkeys(("feedforward_layernorm", "pre_ff_layernorm"), "ffn_norm"),
    **under(("self_attn", "attn", "attention", "self_attention"), _ATTENTION),
    **under(("mlp", "feed_forward", "ffn"), _DENSE),
    **under(("mlp", "feed_forward", "block_sparse_moe", "ffn"), _EXPERTS),
    **under(("mamba",), MAMBA),
    **under(("linear_attn",), _DELTA),
}
MIXER = under(("mixer",), MAMBA)
#: Norms around attention and FFN.
NORMS_AROUND = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
