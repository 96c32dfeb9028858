"""Mixtures of experts with attention of the usual form."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from urdir.model.files.pretrained.family import Family
from urdir.model.files.pretrained.layouts import Floats, Keys, Layout, halves, turned_experts
from urdir.model.files.pretrained.steps.common import square_root
from urdir.model.files.pretrained.steps.mixtures import (
    cohere_experts,
    llama4_attention,
    mimo_heads,
    minimax_layers,
    mlp_layers,
    own_weights_norm,
    shared_experts,
    step_layers,
    weights_norm,
)
from urdir.model.files.pretrained.steps.others import aria_experts, first_dense, needs_window
from urdir.model.files.pretrained.tables.dense import GRANITE_KEYS, ONE_MORE

_SIGMOID = {"expert_gating_func": 2}
#: Every layer has experts.
_ALL_LAYERS = {"decoder_sparse_step": (1,), "mlp_only_layers": ([],)}
_SCORED = {
    "scoring_func": ("sigmoid", "noaux_tc"),
    "topk_method": ("noaux_tc",),
    "use_qk_norm": (True,),
}
_TURNED = Layout(transposed=True)
_SHARED = {
    "shared_mlp.input_linear": "ffn_up_shexp",
    "shared_mlp.output_linear": "ffn_down_shexp",
}
GRANITE_MOE = Family(
    "granitemoe",
    _SHARED,
    {**GRANITE_KEYS, "shared_intermediate_size": "expert_shared_feed_forward_length"},
    implied={"logit_scale": 1.0},
)
_GLM4 = Family(
    "glm4moe",
    names={"post_attention_layernorm": "post_attention_norm"},
    keys={"n_shared_experts": "expert_shared_count"},
    implied=_SIGMOID,
    fixed={**_SCORED, "use_qk_norm": (True, False)},
    steps=(mlp_layers, weights_norm),
    defaults={"partial_rotary_factor": 0.5},
)


_ARIA = Family(
    "granitemoe",
    names={"mlp.experts.fc1": "ffn_gate_up_exps", "mlp.experts.fc2": "ffn_down_exps"},
    defaults={
        **{"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 4096},
        **{"num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048},
        **{"rms_norm_eps": 1e-6, "moe_num_experts": 8, "moe_topk": 2},
    },
    implied={"logit_scale": 1.0},
    steps=(aria_experts,),
    ignored=frozenset({"moe_z_loss_coeff"}),
    layouts=dict.fromkeys(("ffn_gate_up_exps.weight", "ffn_down_exps.weight"), _TURNED),
)


def _even_first(values: Floats) -> Floats:
    return np.concatenate([values[..., 0::2], values[..., 1::2]], axis=-1)


def _by_expert(keys: Keys) -> tuple[int, ...]:
    return (int(keys["expert_count"]), -1, int(keys["embedding_length"]))


_NO_WINDOW = {"use_sliding_window": False}

FAMILIES: Mapping[str, Family] = {
    "mixtral": Family("llama"),
    "flex_olmo": Family(
        "flex-olmo",
        names={
            "post_attention_layernorm": "post_attention_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
        },
        defaults={"rope_theta": 500000.0},
        steps=(own_weights_norm,),
    ),
    "flint": Family(
        "flint",
        fixed={"decoder_sparse_step": (1,)},
        names={"self_attn.softmax_offset": "attn_sinks.weight"},
        steps=(first_dense, needs_window, own_weights_norm),
        windows="pattern",
    ),
    "qwen2_moe": Family(
        "qwen2moe", defaults=_NO_WINDOW, fixed=_ALL_LAYERS, steps=(own_weights_norm,)
    ),
    **dict.fromkeys(
        ("qwen3_moe", "qwen3_omni_moe_text"),
        Family("qwen3moe", defaults=_NO_WINDOW, fixed=_ALL_LAYERS, steps=(own_weights_norm,)),
    ),
    "qwen3_vl_moe_text": Family(
        "qwen3vlmoe",
        fixed=_ALL_LAYERS,
        steps=(own_weights_norm,),
        layouts=dict.fromkeys(
            ("ffn_gate_up_exps.weight", "ffn_down_exps.weight"), Layout(transposed=turned_experts)
        ),
    ),
    # the class of transformers takes the short factors at any length
    "phimoe": Family(
        "phimoe",
        implied={"own.short_factors": True},
        fixed={"router_jitter_noise": (0.01,)},
    ),
    "olmoe": Family("olmoe", fixed={"clip_qkv": ()}, steps=(own_weights_norm,)),
    "granitemoe": GRANITE_MOE,
    "granitemoeshared": GRANITE_MOE,
    **dict.fromkeys(("aria_text", "aria_moe_lm"), _ARIA),
    "dots1": Family(
        "dots1",
        keys={"n_shared_experts": "expert_shared_count"},
        implied=_SIGMOID,
        fixed=_SCORED,
        steps=(mlp_layers, weights_norm),
    ),
    # tokens of text have equal positions on all axes, so that M-RoPE is RoPE
    **dict.fromkeys(("glm4_moe", "glm4v_moe_text"), _GLM4),
    "solar_open": Family(
        "glm4moe",
        names={"post_attention_layernorm": "post_attention_norm"},
        keys={"n_shared_experts": "expert_shared_count"},
        implied=_SIGMOID,
        steps=(mlp_layers, weights_norm),
    ),
    "minimax_m2": Family(
        "minimax-m2",
        keys={"rotary_dim": "rope.dimension_count"},
        implied=_SIGMOID,
        fixed={
            "qk_norm_type": ("per_layer",),
            "use_qk_norm": (True,),
            "use_routing_bias": (True,),
            "scoring_func": ("sigmoid",),
            "shared_intermediate_size": (0,),
        },
        ignored=frozenset(
            {"attn_type_list", "use_mtp", "num_mtp_modules", "mtp_transformer_layers"}
        ),
    ),
    # as published, and as transformers writes it: gates and ups of an FFN in one matrix
    "minimax_m3_vl_text": Family(
        "minimax-m3",
        names={
            **{
                f"self_attn.{prefix}{name}": f"indexer.{name}.weight"
                for prefix in ("indexer.", "index_")
                for name in ("q_proj", "k_proj", "q_norm", "k_norm")
            },
            "mlp.shared_experts.gate_up_proj": "ffn_up_shexp",
        },
        keys={
            "intermediate_size": "expert_feed_forward_length",
            "dense_intermediate_size": "feed_forward_length",
        },
        implied={"expert_weights_norm": True, **_SIGMOID},
        # every token attends to all blocks, whatever scores them
        ignored=frozenset(
            {
                *("index_n_heads", "index_head_dim", "index_local_blocks"),
                *("sparse_num_index_heads", "sparse_index_dim", "sparse_local_block"),
            }
        ),
        defaults={"head_dim": 128, "routed_scaling_factor": 2.0, "rope_theta": 5e6},
        steps=(minimax_layers, mlp_layers),
        fixed={
            **_SCORED,
            **{"swiglu_alpha": (1.702,), "swiglu_limit": (7, 7.0)},
            **{"use_routing_bias": (True,), "use_gemma_norm": (True,)},
            "qk_norm_type": ("per_head",),
        },
        unused=("patch_merge_mlp.",),
        layouts=ONE_MORE,
        activations=("silu", "swish", "swigluoai"),
    ),
    "hunyuan_v1_moe": Family(
        "hunyuan-moe",
        keys={"moe_intermediate_size": "feed_forward_length"},
        steps=(shared_experts("num_shared_expert"),),
        fixed={
            "use_qk_norm": (True,),
            "use_cla": (False,),
            "norm_type": ("rms",),
            "use_mixed_mlp_moe": (True,),
            "moe_layer_num_skipped": (0,),
        },
        ignored=frozenset({"cla_share_factor", "add_classification_head"}),
        tied=True,
    ),
    "gpt_oss": Family(
        "gpt-oss",
        names={"post_attention_layernorm": "post_attention_norm"},
        keys={"intermediate_size": "expert_feed_forward_length"},
        fixed={"swiglu_limit": (7, 7.0), "swiglu_alpha": (1.702,)},
        layouts={
            "ffn_gate_up_exps.weight": Layout(transposed=True, rows=halves),
            "ffn_gate_up_exps.bias": Layout(values=_even_first),
            "ffn_down_exps.weight": _TURNED,
        },
        windows="pattern",
    ),
    "dbrx": Family(
        "dbrx",
        names={
            "norm_attn_norm.norm_1": "attn_norm",
            "norm_attn_norm.norm_2": "attn_output_norm",
            "norm_attn_norm.attn.Wqkv": "attn_qkv",
            "norm_attn_norm.attn.out_proj": "attn_output",
            **{
                f"ffn.experts.mlp.{name}": f"ffn_{to}_exps"
                for name, to in (("w1", "gate"), ("v1", "up"), ("w2", "down"))
            },
        },
        keys={
            "attn_config.kv_n_heads": "attention.head_count_kv",
            "attn_config.clip_qkv": "attention.clamp_kqv",
            "attn_config.rope_theta": "rope.freq_base",
            "ffn_config.ffn_hidden_size": "feed_forward_length",
            "ffn_config.hidden_size": "embedding_length",
            "ffn_config.moe_num_experts": "expert_count",
            "ffn_config.moe_top_k": "expert_used_count",
        },
        implied={"attention.layer_norm_epsilon": 1e-5},
        fixed={
            "ffn_config.moe_normalize_expert_weights": (1, 1.0),
            "ffn_config.ffn_act_fn": ({"name": "silu"},),
        },
        ignored=frozenset(
            {
                *("attn_config.model_type", "attn_config.attn_pdrop", "ffn_config.model_type"),
                *("ffn_config.moe_jitter_eps", "ffn_config.moe_loss_weight"),
                *("ffn_config.uniform_expert_assignment",),
            }
        ),
        layouts={
            "ffn_gate_exps.weight": Layout(shape=_by_expert),
            "ffn_up_exps.weight": Layout(shape=_by_expert),
            "ffn_down_exps.weight": Layout(shape=_by_expert, transposed=True),
        },
    ),
    "afmoe": Family(
        "afmoe",
        names={
            "post_attention_layernorm": "post_attention_norm",
            "pre_mlp_layernorm": "ffn_norm",
            "post_mlp_layernorm": "post_ffw_norm",
        },
        keys={
            "num_dense_layers": "leading_dense_block_count",
            "num_shared_experts": "expert_shared_count",
            "route_scale": "expert_weights_scale",
        },
        implied={"expert_weights_norm": True},
        fixed={
            "mup_enabled": (True,),
            "score_func": ("sigmoid",),
            "route_norm": (True,),
            "n_group": (1,),
            "topk_group": (1,),
        },
        ignored=frozenset({"global_attn_every_n_layers", "load_balance_coeff"}),
        windows="pattern",
    ),
    "exaone_moe": Family(
        "exaone-moe",
        keys={"num_shared_experts": ""},
        implied=_SIGMOID,
        fixed={"num_shared_experts": (1,)},
        steps=(mlp_layers, weights_norm),
        windows="pattern",
    ),
    "laguna": Family(
        "laguna",
        keys={"moe_routed_scaling_factor": "expert_weights_scale"},
        implied={"expert_weights_norm": True},
        steps=(mlp_layers,),
        fixed={
            "gating": (True, "per-head"),
            "moe_apply_router_weight_on_input": (False,),
            "moe_router_logit_softcapping": (0, 0.0),
        },
        ignored=frozenset({"num_attention_heads_per_layer"}),
        windows="pattern",
    ),
    "mellum": Family(
        "mellum",
        steps=(own_weights_norm,),
        ignored=frozenset({"mlp_layer_types", "mtp_layer_types", "mtp_mlp_layer_types"}),
        windows="pattern",
    ),
    "hy_v3": Family(
        "hy_v3",
        names={"mlp.expert_bias": "exp_probs_b."},
        keys={"num_shared_experts": "", "router_scaling_factor": "expert_weights_scale"},
        implied={"expert_weights_norm": True, **_SIGMOID},
        fixed={"num_shared_experts": (1,)},
        ignored=frozenset({"mlp_layer_types", "enable_moe_fp32_combine", "first_k_dense_replace"}),
    ),
    "mimo_v2_flash": Family(
        "mimo2",
        keys={"attention_value_scale": "attention.value_scale", "routed_scaling_factor": ""},
        steps=(mimo_heads,),
        fixed={"norm_topk_prob": (True,), "routed_scaling_factor": (1, 1.0), "n_group": (1,)},
        ignored=frozenset({"mlp_layer_types"}),
        windows="pattern",
    ),
    "step3p5": Family(
        "step35",
        names={
            "moe.gate": "ffn_gate_inp",
            "moe.router_bias": "exp_probs_b.bias",
            **{f"moe.{name}_proj": f"ffn_{name}_exps" for name in ("gate", "up", "down")},
            **{f"share_expert.{name}_proj": f"ffn_{name}_shexp" for name in ("gate", "up", "down")},
        },
        keys={
            "num_attention_groups": "attention.head_count_kv",
            "moe_top_k": "expert_used_count",
            "share_expert_dim": "expert_shared_feed_forward_length",
            "share_expert_dims": "expert_shared_feed_forward_length",
            "moe_router_scaling_factor": "expert_weights_scale",
        },
        implied={"expert_weights_norm": True, **_SIGMOID},
        steps=(step_layers, square_root("query_pre_attn_scalar")),
        defaults={"head_dim": 128},
        fixed={
            "gating": (True, "per-head"),
            "use_head_wise_attn_gate": (True,),
            "use_moe_router_bias": (True,),
            "norm_expert_weight": (True,),
            "moe_router_activation": ("sigmoid",),
            "use_bidirectional_attention": (False,),
            "att_impl_type": ("GQA",),
            "use_mfa": (False,),
            "zero_centered": (True,),
            "yarn_only_types": (["full_attention"],),
        },
        ignored=frozenset(
            {
                *("moe_layers_enum", "mlp_layer_types", "mtp_layer_types", "mtp_mlp_layer_types"),
                *("moe_layer_offset", "moe_every_n_layer", "use_moe", "need_fp32_gate"),
                *("use_qk_norm", "use_rope_layers", "per_layer_config"),
                *(
                    "attention_other_setting.attention_type",
                    "attention_other_setting.true_head_dim",
                ),
                *("num_mtp_layers",),
            }
        ),
        layouts=ONE_MORE,
        windows="pattern",
    ),
    "cohere2_moe": Family(
        "cohere2moe",
        keys={
            "logit_scale": "logit_scale",
            "prefix_dense_intermediate_size": "",
            "intermediate_size": "expert_feed_forward_length",
            "num_shared_experts": "expert_shared_count",
        },
        steps=(mlp_layers, cohere_experts),
        fixed={"shared_expert_combination_strategy": ("average",)},
        ignored=frozenset({"prefix_dense_sliding_window_pattern"}),
        rope="interleaved",
        windows="pattern",
        tied=True,
    ),
    "llama4_text": Family(
        "llama4",
        keys={
            "intermediate_size": "expert_feed_forward_length",
            "intermediate_size_mlp": "feed_forward_length",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
        steps=(llama4_attention,),
        defaults={
            "vocab_size": 202048,
            "hidden_size": 5120,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16384,
            "num_hidden_layers": 48,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 4096 * 32,
            "rms_norm_eps": 1e-5,
            "num_experts_per_tok": 1,
            "num_local_experts": 16,
            "interleave_moe_layer_step": 1,
            "rope_theta": 500000.0,
        },
        ignored=frozenset({"moe_layers", "output_router_logits"}),
        layouts={"ffn_gate_up_exps.weight": _TURNED, "ffn_down_exps.weight": _TURNED},
        rope="interleaved",
    ),
}
