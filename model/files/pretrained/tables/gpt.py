"""Decoders with LayerNorm: GPT-2 and its relatives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from urdir.model.files.pretrained.family import Family
from urdir.model.files.pretrained.layouts import Keys, Layout, Rows, after
from urdir.model.files.pretrained.steps.common import (
    alibi,
    bigcode_heads,
    default_width,
    falcon_heads,
    flag,
)
from urdir.model.files.pretrained.steps.others import (
    compass_rope,
    gpt_neo_layers,
    scaled_embedding,
    waves,
)
from urdir.model.files.pretrained.tables.dense import GELU_TANH, ONE_MORE

_BY_HEAD = {"own.fused_by_head": True}
_GPT2_TRAINING = frozenset(
    {
        *(
            "reorder_and_upcast_attn",
            "attention_softmax_in_fp32",
            "scale_attention_softmax_in_fp32",
        ),
        *("bias_dropout_fusion", "masked_softmax_fusion", "offset_alibi", "skip_bias_add"),
        *("skip_bias_add_qkv", "slow_but_exact", "hidden_dropout_prob", "inference_runner"),
        *(
            "max_batch_size",
            "max_sequence_length",
            "pre_allocate_kv_cache",
            "validate_runner_input",
        ),
    }
)
_GELU = (*GELU_TANH, "gelu")
_SCALED = {
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}

_TURNED = {
    f"{name}.weight": Layout(transposed=True)
    for name in ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
}
_BART = {
    "self_attn_layer_norm": "attn_norm",
    **{name: f"ffn_{to}" for name, to in (("fc1", "up"), ("fc2", "down"))},
    "final_layer_norm": "ffn_norm",
}
#: Also the text of Fuyu, whose published configuration has its fields beside those of pictures.
_PERSIMMON = Family(
    "persimmon",
    implied=_BY_HEAD,
    defaults={"partial_rotary_factor": 0.5, "rope_theta": 25000.0, "layer_norm_eps": 1e-5},
    fixed={"qk_layernorm": (True,)},
    ignored=frozenset({"image_size", "patch_size", "num_channels"}),
    activations=("relu2",),
)

_COHERE2 = Family(
    "cohere2",
    keys={"logit_scale": "logit_scale"},
    defaults={"logit_scale": 0.0625, "sliding_window": 4096, "sliding_window_pattern": 4},
    fixed={
        "use_qk_norm": (False,),
        "order_of_interleaved_layers": ("local_attn_first",),
        "position_embedding_type": ("rope_gptj",),
        "rotary_pct": (1.0,),
        "use_gated_activation": (True,),
        "use_parallel_block": (True,),
    },
    ignored=frozenset({"use_embedding_sharing", "use_parallel_embedding"}),
    rope="interleaved",
    windows="pattern",
    tied=True,
)


def _by_quarter(keys: Keys, rows: int) -> Rows:
    """Rows of CodeGen's fused matrix, four parts with queries, values and keys each."""
    parts = np.arange(rows).reshape(4, 3, -1)
    return parts[:, [0, 2, 1]].swapaxes(0, 1).reshape(-1)


FAMILIES: Mapping[str, Family] = {
    "gpt2": Family(
        "gpt2",
        steps=(default_width,),
        fixed=_SCALED,
        ignored=_GPT2_TRAINING,
        layouts=_TURNED,
        rope=None,
        tied=True,
        activations=_GELU,
    ),
    "gpt_bigcode": Family(
        "starcoder",
        implied=_BY_HEAD,
        steps=(default_width, bigcode_heads),
        fixed=_SCALED,
        ignored=_GPT2_TRAINING,
        rope=None,
        tied=True,
        activations=_GELU,
    ),
    "openai-gpt": Family(
        "gpt1",
        ends={"tokens_embed": "token_embd", "positions_embed": "position_embd"},
        steps=(default_width,),
        fixed={"afn": ("gelu", "gelu_new")},
        ignored=frozenset({"predict_special_tokens", "n_special"}),
        layouts=_TURNED,
        rope=None,
        tied=True,
    ),
    "biogpt": Family(
        "gpt2",
        names=_BART,
        ends={"layer_norm": "output_norm", "output_projection": "output"},
        keys={"layer_norm_eps": ""},  # which its class does not read
        implied={"attention.layer_norm_epsilon": 1e-5},
        defaults={"scale_embedding": True},
        steps=(scaled_embedding,),
        layouts={"position_embd.weight": Layout(rows=after(2))},
        outer=("biogpt.",),
        rope=None,
        tied=True,
        activations=_GELU,
    ),
    "xglm": Family(
        "gpt2",
        names=_BART,
        ends={"layer_norm": "output_norm"},
        keys={"num_layers": "block_count", "attention_heads": "attention.head_count"},
        implied={"attention.layer_norm_epsilon": 1e-5},
        defaults={"scale_embedding": True},
        steps=(scaled_embedding, waves),
        rope=None,
        tied=True,
        activations=_GELU,
    ),
    **dict.fromkeys(("persimmon", "fuyu"), _PERSIMMON),
    "codegen": Family(
        "gptj",
        names={"attn.causal_mask": ()},
        steps=(default_width,),
        keys={"rotary_dim": "rope.dimension_count"},
        fixed=_SCALED,
        layouts={"attn_qkv.weight": Layout(rows=_by_quarter)},
        rope="interleaved",
        activations=_GELU,
    ),
    "gpt_neo": Family(
        "gptneo",
        names={
            **{f"attn.attention.{name}_proj": f"attn_{name}" for name in "qkv"},
            "attn.attention.out_proj": "attn_output",
        },
        keys={"num_layers": "block_count", "num_heads": "attention.head_count"},
        steps=(gpt_neo_layers, default_width),
        ignored=frozenset({"embed_dropout", "resid_dropout"}),
        rope=None,
        tied=True,
        activations=_GELU,
    ),
    "gptj": Family(
        "gptj",
        steps=(default_width,),
        keys={"rotary_dim": "rope.dimension_count"},
        fixed={**_SCALED, "rotary": (True,)},
        rope="interleaved",
        activations=_GELU,
    ),
    "gpt_neox": Family(
        "gptneox",
        implied=_BY_HEAD,
        steps=(flag("use_parallel_residual", "use_parallel_residual"),),
        defaults={"use_parallel_residual": True},
        activations=(*_GELU, "gelu_fast"),
    ),
    "opt": Family(
        "opt",
        names=_BART,
        implied={"attention.layer_norm_epsilon": 1e-5},
        layouts={"position_embd.weight": Layout(rows=after(2))},
        fixed={"do_layer_norm_before": (True,)},
        ignored=frozenset({"word_embed_proj_dim", "enable_bias", "layer_norm_elementwise_affine"}),
        rope=None,
        tied=True,
        activations=("relu",),
    ),
    "phi": Family(
        "phi2",
        fixed={"qk_layernorm": (False,)},
        activations=_GELU,
        defaults={"partial_rotary_factor": 0.5},
    ),
    "starcoder2": Family(
        "starcoder2",
        ignored=frozenset({"activation_function"}),
        activations=_GELU,
        fixed={"mlp_type": ("default",), "norm_type": ("layer_norm",)},
        tied=True,
    ),
    "bloom": Family(
        "bloom",
        implied=_BY_HEAD,
        steps=(default_width,),
        defaults={"seq_length": 2048},
        fixed={"apply_residual_connection_post_layernorm": (False,)},
        ignored=_GPT2_TRAINING,
        rope=None,
        tied=True,
    ),
    "falcon": Family(
        "falcon",
        names={"ln_attn": "attn_norm_2", "ln_mlp": "attn_norm"},
        keys={"ffn_hidden_size": "feed_forward_length"},
        implied={**_BY_HEAD, "own.exact_gelu": True},
        steps=(falcon_heads, default_width),
        defaults={"max_position_embeddings": 2048},
        fixed={"alibi": (False,), "parallel_attn": (True,), "activation": ("gelu",)},
        ignored=frozenset({"num_ln_in_parallel_attn", "apply_residual_connection_post_layernorm"}),
        tied=True,
    ),
    "mpt": Family(
        "mpt",
        keys={"attn_config.clip_qkv": "attention.clamp_kqv"},
        implied={"attention.layer_norm_epsilon": 1e-5, "own.exact_gelu": True},
        steps=(alibi, default_width),
        fixed={
            "logit_scale": (),
            "attn_config.attn_type": ("multihead_attention",),
            "attn_config.prefix_lm": (False,),
            "attn_config.qk_ln": (False,),
            "attn_config.softmax_scale": (),
            "embedding_fraction": (1.0,),
            "norm_type": ("low_precision_layernorm", "layernorm"),
        },
        ignored=frozenset(
            {
                *("expansion_ratio", "learned_pos_emb", "init_device", "tokenizer_name", "verbose"),
                *("emb_pdrop", "attn_config.attn_impl", "attn_config.attn_pdrop"),
                *("attn_config.attn_uses_sequence_id", "attn_config.model_type"),
            }
        ),
        rope=None,
        tied=True,
    ),
    "nemotron": Family(
        "nemotron",
        keys={"norm_eps": "attention.layer_norm_epsilon"},
        layouts=ONE_MORE,
        defaults={"partial_rotary_factor": 0.5},
        activations=("relu2",),
    ),
    "stablelm": Family(
        "stablelm",
        keys={"norm_eps": "attention.layer_norm_epsilon"},
        ignored=frozenset({"qk_layernorm", "use_parallel_residual"}),
        defaults={"partial_rotary_factor": 0.25},
    ),
    "jais2": Family("jais2", activations=("relu2",)),
    "olmo": Family(
        "olmo",
        keys={"clip_qkv": "attention.clamp_kqv"},
        implied={"attention.layer_norm_epsilon": 1e-5},
    ),
    "cohere": Family(
        "command-r",
        keys={"logit_scale": "logit_scale"},
        defaults={"logit_scale": 0.0625},
        fixed={"use_qk_norm": (False,)},
        rope="interleaved",
        tied=True,
    ),
    "cohere2": _COHERE2,
    "cohere_compass_text": replace(
        _COHERE2,
        architecture="command-r",
        defaults={},
        steps=(compass_rope,),
        ignored=_COHERE2.ignored | {"pooling"},
        rope="half",
        windows="each",
    ),
}
