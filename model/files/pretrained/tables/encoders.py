"""Encoders: BERT, RoBERTa, ModernBERT, EuroBERT, Nomic Embed; some may have a head that ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from urdir.model.files.pretrained.family import Family
from urdir.model.files.pretrained.layouts import Layout, padding_last
from urdir.model.files.pretrained.names import under
from urdir.model.files.pretrained.steps.encoders import (
    half_windows,
    labels,
    modern_windows,
    without_padding,
)

_TRAINING = frozenset(
    {
        *("attention_probs_dropout_prob", "hidden_dropout_prob", "directionality"),
        *("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers"),
        *(
            "pooler_size_per_head",
            "pooler_type",
            "sentence_transformers",
            "type_vocab_size",
            "output_past",
        ),
    }
)
#: What predicts masked tokens, and a head that ranks, in models without one.
_UNUSED = ("cls.", "lm_head.", "pooler.", "embeddings.position_ids", "head.", "decoder.")
_GELU = ("gelu", "gelu_pytorch_tanh", "gelu_new")
_POST_NORM_LAYER = {
    **{f"attention.self.{name}": f"attn_{name[0]}" for name in ("query", "key", "value")},
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
_EMBEDDINGS = under(
    ("embeddings",),
    {
        "word_embeddings": "token_embd",
        "position_embeddings": "position_embd",
        "token_type_embeddings": "token_types",
        "LayerNorm": "token_embd_norm",
    },
)


def _ranking(family: Family, ends: Mapping[str, str]) -> Family:
    """The family with a head that ranks, whose modules are ``ends``."""
    used = {name.partition(".")[0] + "." for name in ends}
    own = {f"{name}.{of}": f"{to}.{of}" for name, to in ends.items() for of in ("weight", "bias")}
    ranks = replace(
        family,
        ends={**family.ends, **own},
        unused=tuple(name for name in family.unused if name not in used),
        steps=(*family.steps, labels),
    )
    return replace(family, ranking=ranks)


_BERT = Family(
    "bert",
    names=_POST_NORM_LAYER,
    ends=_EMBEDDINGS,
    outer=("bert.", "roberta.", "encoder."),
    unused=_UNUSED,
    ignored=_TRAINING,
    fixed={"position_embedding_type": ("absolute",)},
    defaults={"layer_norm_eps": 1e-12},
    rope=None,
    activations=_GELU,
)
_ROBERTA = _ranking(
    replace(
        _BERT,
        steps=(without_padding,),
        layouts={"position_embd.weight": Layout(rows=padding_last)},
    ),
    {"classifier.dense": "cls", "classifier.out_proj": "cls.output"},
)
_MODERN = Family(
    "modern-bert",
    names={
        "attn.Wo": "attn_output",
        "attn_norm": "attn_norm",
        "mlp_norm": "ffn_norm",
        "mlp.Wi": "ffn_up",
        "mlp.Wo": "ffn_down",
    },
    ends={
        "embeddings.tok_embeddings": "token_embd",
        "embeddings.norm": "token_embd_norm",
        "final_norm": "output_norm",
    },
    keys={"norm_eps": "attention.layer_norm_epsilon"},
    unused=_UNUSED,
    ignored=frozenset(
        {
            *("classifier_bias", "decoder_bias", "deterministic_flash_attn", "mlp_dropout"),
            *("reference_compile", "repad_logits_with_grad", "sparse_pred_ignore_index"),
            *("sparse_prediction", "cls_token_id", "initializer_cutoff_factor", "norm_bias"),
            *("position_embedding_type", "sentence_transformers", "classifier_dropout"),
        }
    ),
    fixed={"classifier_activation": ("gelu",)},
    defaults={"norm_eps": 1e-5, "hidden_activation": "gelu"},
    steps=(modern_windows,),
    windows="pattern",
    activations=_GELU,
)
_NOMIC = Family(
    "nomic-bert",
    names={
        "norm1": "attn_output_norm",
        "norm2": "layer_output_norm",
        "mlp.fc11": "ffn_up",
        "mlp.fc12": "ffn_gate",
    },
    ends={**_EMBEDDINGS, "emb_ln": "token_embd_norm"},
    outer=("bert.", "encoder."),
    unused=_UNUSED,
    keys={"max_trained_positions": ""},
    ignored=_TRAINING
    | {
        *("dense_seq_output", "fused_bias_fc", "fused_dropout_add_ln", "pad_vocab_size_multiple"),
        *("parallel_block_tied_norm", "reorder_and_upcast_attn", "use_flash_attn", "use_xentropy"),
        "pad_vocab_to_multiple_of",
    },
    fixed={
        "causal": (False,),
        "prenorm": (False,),
        "parallel_block": (False,),
        "use_rms_norm": (False,),
        "qkv_proj_bias": (False,),
        "mlp_fc1_bias": (False,),
        "mlp_fc2_bias": (False,),
        "rotary_emb_interleaved": (False,),
        "rotary_emb_fraction": (1.0, 1),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
    },
    activations=("swiglu", "silu"),
)

FAMILIES: Mapping[str, Family] = {
    "bert": _ranking(_BERT, {"pooler.dense": "cls", "classifier": "cls.output"}),
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert"), _ROBERTA),
    "modernbert": _ranking(
        _MODERN, {"head.dense": "cls", "head.norm": "cls.norm", "classifier": "cls.output"}
    ),
    "modernbert-decoder": replace(
        _MODERN,
        architecture="modern-bert-decoder",
        ends={
            **_MODERN.ends,
            **{"lm_head.dense": "head", "lm_head.norm": "head_norm"},
            # of "decoder", which is the name of an outer module elsewhere
            **{"weight": "output.weight", "bias": "output.bias"},
        },
        unused=(),
        steps=(modern_windows, half_windows),
        fixed={**_MODERN.fixed, "causal_mask": (True,), "is_causal": (True,)},
        tied=True,
        activations=("gelu",),
    ),
    "eurobert": Family(
        "eurobert",
        unused=_UNUSED,
        ignored=frozenset({"clf_pooling", "classifier_pooling", "mask_token", "mask_token_id"})
        | {"bos_token", "eos_token", "pad_token", "sentence_transformers"},
    ),
    "nomic_bert": _NOMIC,
    "jina_embeddings_v3": Family(
        "jina-bert-v3",
        names={
            "mixer.Wqkv": "attn_qkv",
            "mixer.out_proj": "attn_output",
            "norm1": "attn_output_norm",
            "norm2": "layer_output_norm",
        },
        ends={**_EMBEDDINGS, "emb_ln": "token_embd_norm"},
        outer=("encoder.",),
        unused=_UNUSED,
        ignored=_TRAINING,
        activations=_GELU,
    ),
}
