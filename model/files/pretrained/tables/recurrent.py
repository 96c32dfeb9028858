"""Recurrent mixers: Mamba, Mamba-2, delta rules, short convolutions, lightning attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from urdir.model.files.pretrained.family import Family
from urdir.model.files.pretrained.layouts import (
    Floats,
    Keys,
    Layout,
    by_key_head,
    column,
    groups,
    negated_exp,
    taps,
)
from urdir.model.files.pretrained.names import MAMBA, MIXER, under
from urdir.model.files.pretrained.steps.common import default_width, flag
from urdir.model.files.pretrained.steps.mixtures import own_weights_norm, weights_norm
from urdir.model.files.pretrained.steps.others import lfm3_layers
from urdir.model.files.pretrained.steps.recurrent import (
    bamba_layers,
    delta_layers,
    heads_where,
    inner_size,
    jamba_layers,
    lfm2_layers,
    minimax_layers,
    multipliers,
    nemotron_layers,
    position_kind,
    time_step_rank,
    zamba_attention,
)
from urdir.model.files.pretrained.tables.dense import GRANITE_KEYS, ONE_MORE

_CONTEXT = {"context_length": 1 << 20}  # recurrent states have no limit
_MAMBA = {"ssm_a": Layout(values=negated_exp), "ssm_conv1d.weight": Layout(shape=taps)}
_MAMBA2 = {
    "ssm_a": Layout(values=negated_exp, shape=column),
    "ssm_d": Layout(shape=column),
    "ssm_norm.weight": Layout(shape=groups),
    "ssm_conv1d.weight": Layout(shape=taps),
}
#: Of delta rules.
DELTA = {
    **{name: layout for name, layout in ONE_MORE.items() if name != "ssm_norm.weight"},
    "ssm_a": Layout(values=negated_exp),
    "ssm_conv1d.weight": Layout(shape=taps),
}
_SSM_KEYS = {
    "mamba_d_conv": "ssm.conv_kernel",
    "mamba_d_state": "ssm.state_size",
    "mamba_n_groups": "ssm.group_count",
    "mamba_n_heads": "ssm.time_step_rank",
}
#: As JSON's extension, and as newer transformers write it.
_NO_LIMITS = ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}])
_SSM_FIXED = {
    "mamba_conv_bias": (True,),
    "mamba_proj_bias": (False,),
    "time_step_limit": _NO_LIMITS,
}
_MIXER_KEYS = {
    "state_size": "ssm.state_size",
    "conv_kernel": "ssm.conv_kernel",
    "layer_norm_epsilon": "attention.layer_norm_rms_epsilon",
}
_MIXER_FIXED = {"use_bias": (False,), "use_conv_bias": (True,), "rms_norm": (True,)}
_QWEN_FIXED = {"decoder_sparse_step": (1,), "mlp_only_layers": ([],)}
_QWEN35 = Family(
    "qwen35",
    names={"post_attention_layernorm": "post_attention_norm"},
    steps=(delta_layers, own_weights_norm),
    fixed={**_QWEN_FIXED, "attn_output_gate": (True,)},
    ignored=frozenset({"mtp_use_dedicated_embeddings"}),
    layouts=DELTA,
)


def _of_convolution(keys: Keys) -> tuple[int, ...]:
    return (-1, int(keys["shortconv.l_cache"]))


def _of_rows(keys: Keys, rows: int) -> Floats:
    """Factors of the rows of Falcon-H1's ssm_in: gate, input, B, C and dt."""
    factors = np.asarray(keys["own.multipliers"], np.float32)
    inner, heads = int(keys["ssm.inner_size"]), int(keys["ssm.time_step_rank"])
    shared = int(keys["ssm.group_count"]) * int(keys["ssm.state_size"])
    counts = (inner, inner, shared, shared, heads)
    if sum(counts) != rows or min(counts) < 1:
        raise ValueError(f"parts of {counts} rows")
    return np.repeat(factors[2:7] * factors[7], counts)


def _one_factor(number: int) -> Layout:
    def factors(keys: Keys, rows: int) -> Floats:
        values = np.asarray(keys["own.multipliers"], np.float32)
        return np.full(rows, values[number], np.float32)

    return Layout(factors=factors)


_LFM2 = Family(
    "lfm2",
    names={
        "operator_norm": "attn_norm",
        "ffn_norm": "ffn_norm",
        "conv.conv": "shortconv.conv.weight",
        "conv.in_proj": "shortconv.in_proj.weight",
        "conv.out_proj": "shortconv.out_proj.weight",
    },
    ends={"embedding_norm": "token_embd_norm"},
    keys={
        "norm_eps": "attention.layer_norm_rms_epsilon",
        "block_norm_eps": "attention.layer_norm_rms_epsilon",
        "conv_L_cache": "shortconv.l_cache",
    },
    steps=(lfm2_layers,),
    fixed={"conv_bias": (False,), "block_use_swiglu": (True,), "use_pos_enc": (True,)},
    ignored=frozenset(
        {
            *("block_dim", "block_mlp_init_scale", "block_out_init_scale", "conv_dim"),
            *("block_use_xavier_init", "conv_dim_out", "conv_use_xavier_init", "num_heads"),
            *("tie_embedding", "theta"),
        }
    ),
    layouts={"shortconv.conv.weight": Layout(shape=_of_convolution)},
    tied=True,
)
LFM2_MOE = replace(
    _LFM2,
    architecture="lfm2moe",
    keys={
        **_LFM2.keys,
        "num_dense_layers": "leading_dense_block_count",
        "routed_scaling_factor": "",
    },
    implied={"expert_gating_func": 2},
    fixed={
        "conv_bias": (False,),
        "norm_topk_prob": (True,),
        "use_expert_bias": (True,),
        "routed_scaling_factor": (1, 1.0),
    },
)

_GRANITE = Family(
    "granitehybrid",
    names={
        "shared_mlp.input_linear": "ffn_up_shexp",
        "shared_mlp.output_linear": "ffn_down_shexp",
    },
    keys={
        **_SSM_KEYS,
        **GRANITE_KEYS,
        "shared_intermediate_size": "expert_shared_feed_forward_length",
    },
    steps=(
        inner_size,
        heads_where(("attention", "full_attention"), ("mamba", "linear_attention")),
        position_kind,
    ),
    fixed={**_SSM_FIXED, "normalization_function": ("rmsnorm",)},
    layouts=_MAMBA2,
)
_DENSE_GRANITE = replace(
    _GRANITE,
    names={"shared_mlp.input_linear": "ffn_up", "shared_mlp.output_linear": "ffn_down"},
    keys={
        **_GRANITE.keys,
        **dict.fromkeys(("intermediate_size", "num_local_experts", "num_experts_per_tok"), ""),
        "shared_intermediate_size": "feed_forward_length",
    },
)

#: The most uses of Zamba 2's transformers whose adapters have names; published models have 13.
_MOST_USES = 64


def _zamba_adapters() -> dict[str, str]:
    """Names of adapters, of each use of a transformer."""
    modules = {"feed_forward.gate_up_proj": "ffn_up"}
    modules |= {f"self_attn.linear_{name}": f"attn_{name}" for name in "qkv"}
    stored = "shared_transformer.{}_adapter_list.{}.{}"
    return {
        stored.format(module, use, place): f"{name}_adapter.{use}.{of}.weight"
        for module, name in modules.items()
        for use in range(_MOST_USES)
        for place, of in enumerate("ab")
    }


FAMILIES: Mapping[str, Family] = {
    "mamba": Family(
        "mamba",
        names={**MIXER, "norm": "attn_norm"},
        keys={**_MIXER_KEYS, "intermediate_size": "ssm.inner_size"},
        implied=_CONTEXT,
        steps=(time_step_rank,),
        fixed=_MIXER_FIXED,
        ignored=frozenset(
            {"expand", "d_inner", "ssm_cfg", "fused_add_norm", "pad_vocab_size_multiple"}
        ),
        layouts=_MAMBA,
        rope=None,
        tied=True,
    ),
    "falcon_mamba": Family(
        "mamba",
        names={**MIXER, "norm": "attn_norm"},
        keys={
            **_MIXER_KEYS,
            "intermediate_size": "ssm.inner_size",
            "mixer_rms_eps": "own.mixer_eps",
        },
        implied={**_CONTEXT, "ssm.dt_b_c_rms": True},
        steps=(time_step_rank,),
        fixed=_MIXER_FIXED,
        ignored=frozenset({"expand"}),
        layouts=_MAMBA,
        rope=None,
    ),
    "mamba2": Family(
        "mamba2",
        names={**MIXER, "norm": "attn_norm"},
        keys={
            **_MIXER_KEYS,
            "num_heads": "ssm.time_step_rank",
            "n_groups": "ssm.group_count",
            "head_dim": "",
        },
        implied=_CONTEXT,
        steps=(inner_size,),
        fixed={**_MIXER_FIXED, "time_step_limit": _NO_LIMITS},
        ignored=frozenset({"norm_before_gate", "time_step_rank", "head_dim"}),
        layouts=_MAMBA2,
        rope=None,
    ),
    "jamba": Family(
        "jamba",
        keys={**_SSM_KEYS, "mamba_dt_rank": "ssm.time_step_rank"},
        steps=(jamba_layers,),
        fixed=_SSM_FIXED,
        ignored=frozenset({"expert_layer_period", "expert_layer_offset"}),
        layouts=_MAMBA,
        defaults={"max_position_embeddings": 262144},
        rope=None,
    ),
    "bamba": Family(
        "granitehybrid",
        keys={**_SSM_KEYS, "attn_rotary_emb": "rope.dimension_count"},
        steps=(inner_size, bamba_layers),
        fixed=_SSM_FIXED,
        ignored=frozenset({"z_loss_coefficient"}),
        layouts=_MAMBA2,
    ),
    "granitemoehybrid": replace(_GRANITE, without_experts=_DENSE_GRANITE),
    "falcon_h1": Family(
        "falcon-h1",
        names={"pre_ff_layernorm": "ffn_norm"},
        keys=_SSM_KEYS,
        steps=(inner_size, multipliers),
        fixed={
            **_SSM_FIXED,
            "mamba_norm_before_gate": (False,),
            "mamba_use_mlp": (True,),
            "attn_layer_indices": (),
        },
        ignored=frozenset({"mamba_rms_norm", "mlp_expansion_factor"}),
        layouts={
            **_MAMBA2,
            "ssm_in.weight": Layout(factors=_of_rows),
            "ffn_gate.weight": _one_factor(0),
            "ffn_down.weight": _one_factor(1),
            "ssm_out.weight": _one_factor(8),
        },
    ),
    "nemotron_h": Family(
        "nemotron_h",
        names={
            **MIXER,
            **under(
                ("mixer",),
                {
                    **{f"{name}_proj": f"attn_{name}" for name in "qkv"},
                    "o_proj": "attn_output",
                    **{f"{name}_proj": f"ffn_{name}" for name in ("up", "down")},
                    "gate": "ffn_gate_inp",
                    "gate.e_score_correction_bias": "exp_probs_b.bias",
                    **{f"experts.{{}}.{n}_proj": f"ffn_{n}_exps" for n in ("up", "down")},
                    **{f"shared_experts.{n}_proj": f"ffn_{n}_shexp" for n in ("up", "down")},
                },
            ),
            "norm": "attn_norm",
        },
        keys={
            "ssm_state_size": "ssm.state_size",
            "conv_kernel": "ssm.conv_kernel",
            "n_groups": "ssm.group_count",
            "mamba_num_heads": "ssm.time_step_rank",
            "layer_norm_epsilon": "attention.layer_norm_rms_epsilon",
            "rms_norm_eps": "attention.layer_norm_rms_epsilon",
            "n_shared_experts": "",
        },
        steps=(inner_size, weights_norm, nemotron_layers),
        fixed={
            "use_bias": (False,),
            "use_conv_bias": (True,),
            "mamba_proj_bias": (False,),
            "mamba_hidden_act": ("silu",),
            "time_step_limit": _NO_LIMITS,
            "sliding_window": (),
            "moe_latent_size": (),
        },
        ignored=frozenset({"moe_shared_expert_overlap", "mtp_layers_block_type"}),
        layouts=_MAMBA2,
        rope=None,
        activations=("relu2",),
    ),
    "zamba2": Family(
        "zamba2",
        names={
            **under(("mamba", "mamba_decoder.mamba"), MAMBA),
            "mamba_decoder.input_layernorm": "attn_norm",
            "linear": "ffn_linear",
            "shared_transformer.input_layernorm": "attn_norm_2",
            "shared_transformer.pre_ff_layernorm": "ffn_norm",
            **{f"shared_transformer.self_attn.{n}_proj": f"attn_{n}" for n in "qkv"},
            "shared_transformer.self_attn.o_proj": "attn_output",
            "shared_transformer.feed_forward.gate_up_proj": "ffn_up",
            "shared_transformer.feed_forward.down_proj": "ffn_down",
            **_zamba_adapters(),
        },
        keys={
            **_SSM_KEYS,
            "mamba_ngroups": "ssm.group_count",
            "n_mamba_heads": "ssm.time_step_rank",
            "num_mem_blocks": "own.blocks",
            "adapter_rank": "own.adapter_rank",
        },
        steps=(
            default_width,
            inner_size,
            zamba_attention,
            heads_where(("hybrid",), ("mamba", "linear_attention"), "layers_block_type"),
        ),
        fixed={"use_conv_bias": (True,), "add_bias_linear": (False,), "use_long_context": (False,)},
        ignored=frozenset({"mamba_headdim", "use_mem_eff_path", "hybrid_layer_ids"})
        | {"kv_channels", "num_query_groups", "attention_head_dim", "attention_hidden_size"},
        layouts=_MAMBA2,
        tied=True,
        activations=("gelu",),
    ),
    "lfm2": _LFM2,
    "lfm2_moe": LFM2_MOE,
    "lfm3": replace(
        _LFM2,
        architecture="lfm3",
        names={
            **_LFM2.names,
            **{"post_operator_norm": "post_attention_norm", "post_ffn_norm": "post_ffw_norm"},
        },
        steps=(
            lfm3_layers,
            flag("use_sandwich_norm", "own.post_norms"),
            flag("use_attention_gate", "own.gates"),
        ),
        fixed={"conv_bias": (False,)},
        ignored=frozenset(),
        windows="pattern",
    ),
    "minimax": Family(
        "minimax-01",
        names={
            "self_attn.output_gate": "attn_gate",
            "self_attn.norm": "attn_norm_2",
        },
        keys={"rotary_dim": "rope.dimension_count"},
        steps=(minimax_layers,),
        fixed={f"{of}_beta_factor": (1, 1.0) for of in ("full_attn", "linear_attn", "mlp")},
        ignored=frozenset({"block_size", "attn_type_list"}),
    ),
    "qwen3_next": Family(
        "qwen3next",
        names={
            "post_attention_layernorm": "post_attention_norm",
            "linear_attn.in_proj_qkvz": ("attn_qkv", "attn_gate"),
        },
        steps=(delta_layers, own_weights_norm),
        fixed=_QWEN_FIXED,
        layouts={
            **DELTA,
            "attn_qkv.weight": Layout(rows=by_key_head(slice(0, 3))),
            "attn_gate.weight": Layout(rows=by_key_head(slice(3, 4))),
        },
        defaults={"partial_rotary_factor": 0.25},
    ),
    "qwen3_5_text": _QWEN35,
    "qwen3_5_moe_text": Family(
        "qwen35moe",
        names=_QWEN35.names,
        steps=_QWEN35.steps,
        fixed=_QWEN35.fixed,
        ignored=_QWEN35.ignored,
        layouts=DELTA,
    ),
}
