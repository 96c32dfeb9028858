"""Multi-head latent attention, some with Kimi Delta Attention in most layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from urdir.model.files.pretrained.family import Family
from urdir.model.files.pretrained.layouts import Layout, column, exp, negated_exp
from urdir.model.files.pretrained.steps.common import flag
from urdir.model.files.pretrained.steps.dots import latent_scale, two_kinds
from urdir.model.files.pretrained.steps.glm5 import glm5_layers, still_heads
from urdir.model.files.pretrained.steps.mixtures import (
    all_indexed,
    compressed_blocks,
    grouped,
    indexer_kinds,
    latent_heads,
    minicpm_scales,
    mlp_layers,
    scored,
    usual_latent_eps,
    weights_norm,
)
from urdir.model.files.pretrained.steps.others import all_dense
from urdir.model.files.pretrained.steps.recurrent import every_last_is_full, kimi_layers

_EXPERTS = {"n_shared_experts": "expert_shared_count"}
_KIMI_EXPERTS = {"num_shared_experts": "expert_shared_count"}
_DELTA = {
    "self_attn.o_norm": "ssm_norm",
    **{f"self_attn.{name}_conv1d": f"ssm_conv1d_{name}" for name in "qkv"},
    **{f"self_attn.{a}_{b}_proj": f"ssm_{a}_{b}" for a in "fg" for b in "ab"},
    **{"self_attn.b_proj": "ssm_beta", "self_attn.dt_bias": "ssm_dt.bias"},
    "self_attn.A_log": "ssm_a.",
}
_DECAYS = {"ssm_a": Layout(values=negated_exp, shape=column)}

_INDEXER = {
    f"self_attn.indexer.{stored}": f"indexer.{name}"
    for stored, name in (
        *(("wq_b.weight", "attn_q_b.weight"), ("wk.weight", "attn_k.weight")),
        *(("k_norm.weight", "k_norm.weight"), ("k_norm.bias", "k_norm.bias")),
        ("weights_proj.weight", "proj.weight"),
    )
}
DEEPSEEK_V3 = Family(
    "deepseek2",
    keys=_EXPERTS,
    steps=(latent_heads, mlp_layers, scored, grouped, weights_norm),
    defaults={"scoring_func": "sigmoid", "norm_topk_prob": True},
    rope="interleaved",
)
_SPARSE = replace(
    DEEPSEEK_V3,
    architecture="deepseek32",
    names=_INDEXER,
    keys={
        **_EXPERTS,
        "index_n_heads": "attention.indexer.head_count",
        "index_head_dim": "attention.indexer.key_length",
        "index_topk": "attention.indexer.top_k",
    },
)
#: Hyper-connections, by the names of classes and of published folders.
_STREAMS = {
    f"{module}{of}": f"hc_{name}_{of}.weight"
    for name, stored in (("attn", "attn"), ("ffn", "mlp"))
    for module in (f"{name}_hc.", f"hc_{stored}_layer.hc_", f"hc_pre.hc_{stored}_layer.hc_")
    for of in ("fn", "base", "scale")
}
_JOIN = {
    f"{hc}{of}": f"output_hc_{of}.weight"
    for hc in (
        *("hc_head.hc_", "hc_head.hc_head_", "hc_head.hc_pre.hc_head_"),
        "hc_pre.hc_head.hc_head_",
    )
    for of in ("fn", "base", "scale")
}
_COMPRESSOR = {"wkv": "kv", "wgate": "gate", "norm": "norm", "ape": "ape.weight"}
_DEEPSEEK_V4 = {
    **{f"attn.{stored}": f"attn_{name}" for stored, name in (
        *(("wq_a", "q_a"), ("q_norm", "q_a_norm"), ("wq_b", "q_b"), ("wkv", "kv")),
        *(("kv_norm", "kv_a_norm"), ("wo_a", "output_a"), ("wo_b", "output_b")),
        ("attn_sink", "sinks.weight"),
    )},
    **{f"attn.compressor.{a}": f"attn_compressor_{b}" for a, b in _COMPRESSOR.items()},
    **{f"attn.indexer.compressor.{a}": f"indexer_compressor_{b}" for a, b in _COMPRESSOR.items()},
    **{"attn.indexer.wq_b": "indexer.attn_q_b.weight", "attn_norm": "attn_norm"},
    **{"attn.indexer.weights_proj": "indexer.proj.weight", "ffn_norm": "ffn_norm"},
    **{f"hc_{a}_{b}": f"hc_{a}_{b}.weight" for a in ("attn", "ffn")
       for b in ("fn", "base", "scale")},
    **{"ffn.gate.bias": "exp_probs_b.bias", "ffn.gate.tid2eid": "ffn_gate_tid2eid.weight"},
}  # fmt: skip
_DEEPSEEK_V4_KEYS = {
    **_EXPERTS,
    **{f"index_{a}": f"attention.indexer.{b}" for a, b in (
        ("n_heads", "head_count"), ("head_dim", "key_length"), ("topk", "top_k"))},
    **{f"hc_{a}": f"hyper_connection.{b}" for a, b in (
        ("mult", "count"), ("sinkhorn_iters", "sinkhorn_iterations"), ("eps", "epsilon"))},
    **{"o_groups": "attention.output_group_count", "o_lora_rank": "attention.output_lora_rank"},
    **{"q_lora_rank": "attention.q_lora_rank", "swiglu_limit": "swiglu_clamp_exp"},
    "intermediate_size": "",
}  # fmt: skip
_DOTS = replace(
    _SPARSE,
    architecture="dots3note",
    names={**_INDEXER, "self_attn.k_rope_only_layernorm": "attn_k_norm"},
    steps=(latent_heads, mlp_layers, scored, weights_norm, two_kinds),
    layouts={
        f"attn_{name}_a_norm.weight": Layout(scale=latent_scale) for name in ("q", "kv")
    },
    defaults={**_SPARSE.defaults, "first_k_dense_replace": 1, "n_shared_experts": 1},
    fixed={
        "n_group": (1,), "topk_group": (1,), "topk_method": ("noaux_tc",),
        "use_sliding_window": (True,), "k_rope_only_layernorm": (True,),
        "apply_mla_qkv_lora_rescale": (True,),
        "use_dynamic_rsf": (False,), "moe_gating_fp32": (False,),
        "indexer_rope_interleave": (True,),
        **dict.fromkeys(("normalization", "final_norm"), ("RMSNorm",)),
        **dict.fromkeys(("attention_gate_type", "swa_attention_gate_type", "sdpa_gate_type"),
                        ("headwise",)),
    },
    ignored=frozenset({"language_only", "im_start_token", "im_token", "im_end_token",
                       "audio_start_token", "audio_token", "audio_end_token", "video_token"}),
    unused=("vision_encoder.", "audio_encoder."),
    windows="pattern",
)  # fmt: skip
_HY_V4 = replace(
    _SPARSE,
    architecture="hy_v4",
    names={
        **_INDEXER,
        **_STREAMS,
        "self_attn.linear_gate": "attn_gate",
        "mlp.linear_gate": "ffn_gate",
        "mlp.shared_experts.linear_gate": "ffn_gate_shexp",
        "self_attn.learnable_sink_param": "attn_sinks",
    },
    ends=_JOIN,
    keys={
        **_SPARSE.keys,
        "hc_mult": "hyper_connection.count",
        "hc_eps": "hyper_connection.epsilon",
        "hc_magnitude": "hyper_connection.magnitude",
        "swiglu_limit": "swiglu_clamp_exp",
    },
    implied={"expert_gating_func": 2, "leading_dense_block_count": 1},
    defaults={
        **{"hc_mult": 4, "hc_eps": 1e-6, "hc_magnitude": 2.0, "swiglu_limit": 10.0},
        **{"index_topk_freq": 4, "norm_topk_prob": True},
    },
    steps=(latent_heads, mlp_layers, weights_norm, indexer_kinds),
    ignored=frozenset({"learnable_sink_init", "layer_types"}),
    rope="half",
)
#: GLM 5 Next, by the names of published folders, which its class changes as it loads, and of the
#: class.
_GLM5 = replace(
    _SPARSE,
    architecture="glm5-next",
    names={
        **_INDEXER,
        **_STREAMS,
        **_DELTA,
        **{f"hc_{a}_{b}": f"hc_{a}_{b}.weight" for a in ("attn", "ffn")
           for b in ("fn", "base", "scale")},
        **{name.replace("attn.", "attn.forget_gate."): to for name, to in _DELTA.items()},
        "self_attn.indexer.index_kpool_compress_ape": "indexer_compressor_ape.weight",
        "self_attn.indexer.index_kpool_compress_gate": "indexer_compressor_gate.weight",
    },
    keys={
        **_SPARSE.keys,
        "index_kpool": "attention.indexer.kpool",
        "hc_mult": "hyper_connection.count",
        "hc_eps": "hyper_connection.epsilon",
        "hc_sinkhorn_iters": "hyper_connection.sinkhorn_iterations",
        "swiglu_limit": "own.swiglu_limit",
        "head_dim": "",  # of values that rotate
    },
    implied={"expert_gating_func": 2},
    defaults={
        **{"vocab_size": 154880, "hidden_size": 4096, "intermediate_size": 12288},
        **{"num_hidden_layers": 45, "num_attention_heads": 64, "max_position_embeddings": 1 << 20},
        **{"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 256, "v_head_dim": 256},
        **{"n_routed_experts": 288, "n_shared_experts": 1, "num_experts_per_tok": 8},
        **{"moe_intermediate_size": 2048, "routed_scaling_factor": 2.5, "norm_topk_prob": True},
        **{"rms_norm_eps": 1e-5, "swiglu_limit": 10.0, "first_k_dense_replace": 3},
        **{"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 32, "index_kpool": 16},
        **{"hc_mult": 4, "hc_eps": 1e-6, "hc_sinkhorn_iters": 20, "linear_lower_bound": -5.0},
        "index_kpool_always_select_tail": True,
    },
    steps=(
        *(still_heads, glm5_layers, mlp_layers, grouped, weights_norm, indexer_kinds),
        flag("index_kpool_always_select_tail", "attention.indexer.kpool_select_tail"),
    ),
    layouts={"ssm_a": Layout(values=negated_exp)},
    rope=None,
)  # fmt: skip
FAMILIES: Mapping[str, Family] = {
    **dict.fromkeys(("glm5_next", "glm5_next_text"), _GLM5),
    **dict.fromkeys(("dots3_note", "dots3_note_text"), _DOTS),
    "deepseek_v2": Family(
        "deepseek2",
        keys=_EXPERTS,
        steps=(latent_heads, mlp_layers, scored, grouped),
        # transformers does not read it
        ignored=frozenset({"norm_topk_prob"}),
        defaults={"topk_method": "greedy"},
        rope="interleaved",
    ),
    # without latent vectors
    "deepseek_ocr2_text": Family(
        "deepseek2-ocr",
        keys=_EXPERTS,
        steps=(mlp_layers, grouped),
        defaults={"topk_method": "greedy"},
        unused=("qwen2_model.", "sam_model.", "view_seperator"),
    ),
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v32": replace(_SPARSE, steps=(*_SPARSE.steps, all_indexed)),
    "glm_moe_dsa": replace(
        _SPARSE,
        architecture="glm-dsa",
        steps=(*_SPARSE.steps, indexer_kinds),
        fixed={"indexer_rope_interleave": (True,)},
        ignored=frozenset({"layer_types"}),
    ),
    "hy_v4": _HY_V4,
    # tokens of text have equal positions on all axes, so that M-RoPE is RoPE
    "hy_v4_vl_text": replace(_HY_V4, steps=(*_HY_V4.steps, usual_latent_eps), rope="interleaved"),
    "deepseek_v4": Family(
        "deepseek4",
        names=_DEEPSEEK_V4,
        keys=_DEEPSEEK_V4_KEYS,
        implied={"expert_gating_func": 4},
        defaults={
            "scoring_func": "sqrtsoftplus",
            "norm_topk_prob": True,
            "hc_mult": 4,
            "use_sliding_window": False,
        },
        fixed={
            "scoring_func": ("sqrtsoftplus",),
            "compress_rates.compressed_sparse_attention": (4,),
            "compress_rates.heavily_compressed_attention": (128,),
        },
        ignored=frozenset({"topk_method", "qk_rope_head_dim", "partial_rotary_factor"}),
        steps=(compressed_blocks, weights_norm),
        ends={
            "embed": "token_embd",
            "head": "output",
            **{f"hc_head_{of}": f"output_hc_{of}.weight" for of in ("fn", "base", "scale")},
        },
        rope=None,
    ),
    "kimi_k2": DEEPSEEK_V3,
    "axk1": replace(
        DEEPSEEK_V3,
        architecture="axk1",
        names=dict.fromkeys(("post_mlp_layernorm", "mlp.post_mlp_layernorm"), "post_ffw_norm"),
    ),
    "youtu": Family(
        "deepseek2",
        steps=(latent_heads, all_dense),
        ignored=frozenset({"embedding_initializer_range"}),
        rope="interleaved",
        tied=True,
    ),
    "glm4_moe_lite": DEEPSEEK_V3,
    "mistral4": Family(
        "mistral4",
        keys=_EXPERTS,
        implied={"expert_gating_func": 1},
        steps=(latent_heads, mlp_layers, weights_norm),
        defaults={"norm_topk_prob": True},
        rope="interleaved",
    ),
    "minicpm3": Family(
        "minicpm3",
        steps=(latent_heads, minicpm_scales),
        tied=True,
    ),
    "kimi_linear": Family(
        "kimi-linear",
        # transformers 5 writes the networks of dense layers under the name of mixtures
        names={
            **_DELTA,
            **{f"block_sparse_moe.{of}_proj": f"ffn_{of}" for of in ("gate", "up", "down")},
        },
        keys=_KIMI_EXPERTS,
        implied={"expert_gating_func": 2},
        steps=(latent_heads, mlp_layers, kimi_layers),
        fixed={
            "mla_use_nope": (True,),
            "moe_renormalize": (True,),
            "moe_router_activation_func": ("sigmoid",),
            "use_grouped_topk": (True,),
        },
        layouts=_DECAYS,
        rope=None,
    ),
    "bailing_hybrid": Family(
        "bailingmoe3",
        names={
            **{f"attention{name[9:]}": to for name, to in _DELTA.items()},
            **{f"attention.{a}_proj": f"ssm_{a}_a" for a in "fg"},
        },
        keys={
            **_KIMI_EXPERTS,
            "kda_lower_bound": "kda.gate_lower_bound",
            **dict.fromkeys(
                ("short_conv_kernel_size", "linear_conv_kernel_dim"), "ssm.conv_kernel"
            ),
            "head_dim": "kda.head_dim",
        },
        implied={"expert_gating_func": 2},
        steps=(
            *(latent_heads, mlp_layers),
            every_last_is_full("layer_group_size", 6),
            flag("moe_renormalize", "expert_weights_norm"),
            flag("kda_safe_gate", "kda.safe_gate"),
        ),
        ignored=frozenset({"mtp_loss_scaling_factor"}),
        layouts={"ssm_a": Layout(values=exp, shape=column)},
        rope="interleaved",
    ),
}
