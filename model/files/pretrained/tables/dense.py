"""Dense decoders with RMSNorm and gated FFNs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from urdir.model.files.pretrained.family import KEYS, Family
from urdir.model.files.pretrained.layouts import (
    Floats,
    Keys,
    Layout,
    Rows,
    plus_one,
    tokens_or_first,
)
from urdir.model.files.pretrained.names import LAYER, NORMS_AROUND
from urdir.model.files.pretrained.steps.common import (
    chameleon_pictures,
    flag,
    gemma3n_layers,
    gemma4_layers,
    has_windows,
    hrm_stacks,
    muse_layers,
    one_base,
    rotates,
    square_root,
    squared_relu,
)
from urdir.model.files.pretrained.steps.others import mllama_layers

GELU_TANH = ("gelu_pytorch_tanh", "gelu_new")
#: Norms with weights 1 + w.
_NORMS = ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm", "output_norm")
ONE_MORE = {
    f"{name}.weight": Layout(values=plus_one) for name in (*_NORMS, "attn_q_norm", "attn_k_norm")
}
_POST_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
LLAMA = Family("llama")
GRANITE_KEYS = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
_GRANITE = Family(
    "granite",
    keys=GRANITE_KEYS,
    implied={"logit_scale": 1.0},
    unused=("encoder.",),  # of speech
)
GRANITE_SWA = Family(
    "granite_swa",
    keys={**GRANITE_KEYS, "shared_intermediate_size": "expert_shared_feed_forward_length"},
    implied={"logit_scale": 1.0},
    steps=(one_base,),
    windows="pattern",
    tied=True,
)
_GEMMA = Family(
    "gemma",
    layouts=ONE_MORE,
    tied=True,
    activations=GELU_TANH,
    ignored=frozenset({"hidden_act"}),  # hidden_activation counts
    fixed={"use_bidirectional_attention": (False,)},
)
_GEMMA2 = replace(
    _GEMMA,
    architecture="gemma2",
    names=NORMS_AROUND,
    keys={
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    defaults={"sliding_window": 4096, "sliding_window_pattern": 2, "query_pre_attn_scalar": 256},
    steps=(square_root("query_pre_attn_scalar"),),
    windows="pattern",
)
GEMMA3 = replace(
    _GEMMA2,
    architecture="gemma3",
    keys={"final_logit_softcapping": "final_logit_softcapping"},
    defaults={
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "_sliding_window_pattern": 6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
)
GEMMA3 = replace(
    GEMMA3,
    bidirectional=replace(
        GEMMA3,
        architecture="gemma-embedding",
        keys={},
        fixed={"use_bidirectional_attention": (True,)},
    ),
)
#: Token embeddings of layers.
PER_LAYER_NAMES = {
    **{"per_layer_input_gate": "inp_gate", "per_layer_projection": "proj"},
    "post_per_layer_input_norm": "post_norm",
}
PER_LAYER_ENDS = {
    "embed_tokens_per_layer": "per_layer_token_embd",
    "per_layer_model_projection": "per_layer_model_proj",
    "per_layer_projection_norm": "per_layer_proj_norm",
}
GEMMA3N = Family(
    "gemma3n",
    names={
        **NORMS_AROUND,
        **{"altup.modality_router": "altup_router", "altup.router_norm": "altup_router_norm"},
        "altup.prediction_coefs": "altup_predict_coef",
        "altup.correction_coefs": "altup_correct_coef",
        "altup.correct_output_scale": "altup_correct_scale.weight",
        **{"laurel.linear_left": "laurel_l", "laurel.linear_right": "laurel_r"},
        "laurel.post_laurel_norm": "laurel_post_norm",
        **PER_LAYER_NAMES,
    },
    ends={
        **PER_LAYER_ENDS,
        "altup_projections.{}": "altup_proj",
        "altup_unembed_projections.{}": "altup_unembd_proj",
    },
    defaults={
        **{"vocab_size": 262400, "hidden_size": 2048, "intermediate_size": 16384},
        **{"num_hidden_layers": 35, "num_attention_heads": 8, "num_key_value_heads": 2},
        **{"head_dim": 256, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6},
        **{"sliding_window": 512, "num_kv_shared_layers": 15},
        **{"rope_theta": 1e6, "rope_local_base_freq": 1e4},
    },
    steps=(gemma3n_layers,),
    # sizes that GGUF has no keys for
    fixed={
        **{"altup_num_inputs": (4,), "altup_active_idx": (0,), "altup_correct_scale": (True,)},
        **{"hidden_size_per_layer_input": (256,), "laurel_rank": (64,)},
        "final_logit_softcapping": (30, 30.0),
    },
    ignored=frozenset({"altup_coef_clip", "vocab_size_per_layer_input"}),
    layouts={"per_layer_token_embd.weight": Layout(rows=tokens_or_first)},
    windows="pattern",
    tied=True,
    activations=GELU_TANH,
)
GEMMA4 = Family(
    "gemma4",
    names={
        **NORMS_AROUND,
        "layer_scalar": "layer_output_scale.weight",
        **{"router.proj": "ffn_gate_inp", "router.scale": "ffn_gate_inp.scale"},
        "router.per_expert_scale": "ffn_down_exps.scale",
        **{"experts.gate_up_proj": "ffn_gate_up_exps", "experts.down_proj": "ffn_down_exps"},
        "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
        "post_feedforward_layernorm_1": "post_ffw_norm_1",
        "post_feedforward_layernorm_2": "post_ffw_norm_2",
        **PER_LAYER_NAMES,
    },
    ends=PER_LAYER_ENDS,
    keys={
        "head_dim": "attention.key_length_swa",
        "final_logit_softcapping": "final_logit_softcapping",
        "num_kv_shared_layers": "attention.shared_kv_layers",
        "hidden_size_per_layer_input": "embedding_length_per_layer_input",
        "top_k_experts": "expert_used_count",
    },
    implied={"final_logit_softcapping": 0.0},
    steps=(gemma4_layers,),
    fixed={"use_bidirectional_attention": ("vision",)},
    ignored=frozenset({"vocab_size_per_layer_input", "enable_moe_block"}),
    windows="pattern",
    tied=True,
    activations=GELU_TANH,
)
_QWEN_VL = Family(
    "qwen2vl",
    defaults={"rms_norm_eps": 1e-6, "use_sliding_window": False},
    ignored=frozenset(
        {f"{of}_token_id" for of in ("vision_start", "vision_end", "vision", "image", "video")}
    ),
)
#: Tokens of text have equal positions on all axes, so that M-RoPE is RoPE: of all pairs of a head,
#: unless their share is given.
_GLM4 = Family(
    "glm4",
    names={
        "post_self_attn_layernorm": "post_attention_norm",
        "post_mlp_layernorm": "post_ffw_norm",
    },
    rope="interleaved",
)

_DIFFUSERS = {"q": "q", "k": "k", "v": "v", "out": "output"}
_PHI3 = Family("phi3")
_PHI4_MODULES = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
#: Muse Glimmer's norms with weights as they are.
_MUSE_PLAIN = ("output_norm.weight", "attn_q_norm.weight", "attn_k_norm.weight")


def _gates(keys: Keys, rows: int) -> Rows:
    """Rows of HRM-Text's gate, which stands before queries, keys and values in one matrix."""
    return np.arange(min(rows, _width(keys)))


def _heads(keys: Keys, rows: int) -> Rows:
    return np.arange(_width(keys), rows)


def _residual_scale(keys: Keys, rows: int) -> Floats:
    return np.full(rows, keys.get("residual_scale", 1.0), np.float32)


def _second_half_first(keys: Keys, rows: int) -> Rows:
    """Rows of nanochat's queries and keys, whose heads rotate the other way: in this order they
    rotate as others, and scores are the same."""
    heads = int(keys["attention.head_count"])
    dim = int(keys.get("attention.key_length", int(keys["embedding_length"]) // heads))
    return np.arange(rows).reshape(-1, 2, dim // 2)[:, ::-1].reshape(-1)


def _width(keys: Keys) -> int:
    return int(keys["attention.head_count"]) * int(keys["attention.key_length"])


FAMILIES: Mapping[str, Family] = {
    # without token types all tokens are causal, whatever prefix_lm says
    "hrm_text": Family(
        "hrm_text",
        names={"attn.gqkv_proj": ("attn_gate", "attn_qkv"), "attn.o_proj": "attn_output"},
        ends={"z_L_init": "hrm.z_l_init"},
        stacks=("L_module", "H_module"),
        steps=(hrm_stacks,),
        defaults={"head_dim": 128},
        ignored=frozenset({"L_bp_cycles", "prefix_lm"}),
        layouts={"attn_gate.weight": Layout(rows=_gates), "attn_qkv.weight": Layout(rows=_heads)},
    ),
    "llama": LLAMA,
    "mistral": LLAMA,
    "ministral": LLAMA,
    "internlm3": LLAMA,
    "emu3_text_model": replace(
        LLAMA,
        defaults={
            **{"vocab_size": 184622, "hidden_size": 4096, "intermediate_size": 14336},
            **{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8},
            **{"max_position_embeddings": 9216, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
        },
    ),
    "cwm": LLAMA,
    "iquestcoder": replace(LLAMA, defaults={"use_sliding_window": False}, fixed={"clip_qkv": ()}),
    "helium": replace(LLAMA, rope="interleaved"),
    "mllama_text_model": replace(
        LLAMA,
        defaults={
            **{"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336},
            **{"num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8},
            **{"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0},
        },
        steps=(mllama_layers,),
        layouts={"output.weight": Layout(rows=tokens_or_first)},
    ),
    "hyperclovax": Family(
        "hyperclovax",
        names={"post_norm1": "post_attention_norm", "post_norm2": "post_ffw_norm"},
        keys=GRANITE_KEYS,
        steps=(flag("use_post_norm", "own.post_norms"),),
        ignored=frozenset({"end_token_id"}),
        layouts=dict.fromkeys(
            ("post_attention_norm.weight", "post_ffw_norm.weight"),
            Layout(factors=_residual_scale),
        ),
    ),
    "nanochat": Family(
        "nanochat",
        keys={"final_logit_softcapping": "final_logit_softcapping"},
        layouts=dict.fromkeys(("attn_q.weight", "attn_k.weight"), Layout(rows=_second_half_first)),
        activations=("relu2",),
    ),
    "qwen2": Family("qwen2", defaults={"use_sliding_window": False}),
    # "encoder.layers": in Qianfan OCR, as transformers writes it
    "qwen3": Family("qwen3", defaults={"use_sliding_window": False}, outer=("encoder.",)),
    **dict.fromkeys(("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), _QWEN_VL),
    "qwen2_5_omni_text": _QWEN_VL,
    "qwen3_vl_text": Family("qwen3vl"),
    "granite": _GRANITE,
    "granite_docling_text": replace(_GRANITE, tied=True),
    "granite4_vision_text": replace(
        _GRANITE, unused=("layerwise_projectors.", "spatial_projectors.")
    ),
    "granite_swa": GRANITE_SWA,
    "granitemoe_swa": GRANITE_SWA,
    "paddleocr_vl_text": Family("paddleocr", tied=True),
    "smollm3": Family(
        "smollm3", defaults={"use_sliding_window": False}, steps=(rotates,), tied=True
    ),
    "ministral3": Family("mistral3"),
    "arcee": Family("arcee", activations=("relu2",)),
    "cosmos3_edge_text": Family(
        "arcee",
        names={f"self_attn.to_{of}": f"attn_{to}" for of, to in _DIFFUSERS.items()},
        defaults={
            **{"vocab_size": 131072, "hidden_size": 2048, "intermediate_size": 9216},
            **{"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8},
            **{"head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5},
            "rope_theta": 1e8,
        },
        activations=("relu2",),
    ),
    "bitnet": Family(
        "bitnet",
        names={"self_attn.attn_sub_norm": "attn_sub_norm", "mlp.ffn_sub_norm": "ffn_sub_norm"},
        steps=(squared_relu,),
        activations=("relu2", "silu", "swish"),
    ),
    "apertus": Family(
        "apertus",
        names={
            f"mlp.act_fn.{name}": f"xielu.{name}" for name in ("alpha_n", "alpha_p", "beta", "eps")
        },
        fixed={"qk_norm": (True,), "post_norm": (False,)},
        activations=("xielu",),
    ),
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "vaultgemma": replace(
        _GEMMA2,
        architecture="vaultgemma",
        names={"pre_feedforward_layernorm": "ffn_norm"},
    ),
    "gemma3_text": GEMMA3,
    "gemma3n_text": GEMMA3N,
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": GEMMA4,
    "muse_glimmer_text": Family(
        "muse-glimmer",
        names=NORMS_AROUND,
        keys={
            "output_multiplier": "logit_scale",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        defaults={
            "head_dim": 128,
            "sliding_window": 2048,
            "final_logit_softcapping": 20.0,
            "output_multiplier": 0.19611613513818404,
            "qk_scale_factor": 3.87,
        },
        steps=(muse_layers,),
        fixed={"post_norm_eps": (1e-8,)},
        unused=("vision_adapter.", "vision_projection."),
        layouts={name: of for name, of in ONE_MORE.items() if name not in _MUSE_PLAIN},
        windows="pattern",
    ),
    "chameleon": Family(
        "chameleon",
        steps=(chameleon_pictures, flag("swin_norm", "swin_norm")),
        ignored=frozenset({"vq_config", "model_parallel_size", "image_token_id"}),
        unused=("vqmodel.",),
    ),
    "phi3": _PHI3,
    # text alone: without the adapters of pictures and speech
    "phi4_multimodal": replace(_PHI3, unused=("embed_tokens_extend.",)),
    "phi4mm": replace(
        _PHI3,
        names={
            **{f"{module}.base_layer": LAYER[module] for module in _PHI4_MODULES},
            **{
                f"{module}.lora_{side}.{of}.weight": ()
                for module in _PHI4_MODULES
                for side in "AB"
                for of in ("vision", "speech")
            },
        },
        ignored=frozenset(
            {
                *("audio_processor", "embd_layer", "img_processor", "vision_lora", "speech_lora"),
                *("full_attn_mod", "interpolate_factor"),
            }
        ),
        unused=("embed_tokens_extend.",),
    ),
    "olmo2": Family("olmo2", names=_POST_NORMS),
    "olmo3": Family("olmo2", names=_POST_NORMS, windows="pattern"),
    # names as they are published, and those of LLaMA, as transformers writes them
    "exaone": Family(
        "exaone",
        names={
            **{f"attn.attention.{name}_proj": f"attn_{name}" for name in "qkv"},
            **{"attn.attention.out_proj": "attn_output", "mlp.c_fc_0": "ffn_gate"},
            "mlp.c_fc_1": "ffn_up",
        },
        keys={"num_layers": "block_count", "layer_norm_epsilon": KEYS["rms_norm_eps"]},
        ignored=frozenset({"embed_dropout"}),
    ),
    "exaone4": Family("exaone4", names=_POST_NORMS, windows="pattern", steps=(has_windows,)),
    "glm": Family("chatglm", rope="interleaved", defaults={"partial_rotary_factor": 0.5}),
    "glm4": replace(_GLM4, defaults={"partial_rotary_factor": 0.5}),
    **dict.fromkeys(("glm4v_text", "glm_ocr_text"), _GLM4),
    "ernie4_5": Family("ernie4_5", rope="interleaved", tied=True),
    "seed_oss": Family("seed_oss", names={"post_attention_layernorm": "post_attention_norm"}),
    "hunyuan_vl_text": Family("hunyuan_vl", tied=True),
    "hunyuan_v1_dense": Family(
        "hunyuan-dense",
        fixed={
            "use_qk_norm": (True,),
            "use_cla": (False,),
            "norm_type": ("rms",),
            "use_rotary_pos_emb": (True,),
        },
        ignored=frozenset({"cla_share_factor", "add_classification_head"}),
        tied=True,
    ),
}
