"""T5, FLAN-T5, mT5 and UMT5: encoder-decoders, and their encoders alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from urdir.model.files.pretrained.family import Family, Found
from urdir.model.files.pretrained.fields import Fields
from urdir.model.files.pretrained.steps.common import number

_BLOCK = re.compile(r"^(enc|dec)oder\.block\.(0|[1-9]\d{0,8})\.layer\.(\d)\.(.+)\.weight$")
_FFN = {"wi": "ffn_up", "wi_0": "ffn_gate", "wi_1": "ffn_up", "wo": "ffn_down"}
_ATTENTION = {
    **{f"SelfAttention.{of}": f"attn_{of}" for of in "qkvo"},
    "SelfAttention.relative_attention_bias": "attn_rel_b",
    "layer_norm": "attn_norm",
}
_CROSS = {
    **{f"EncDecAttention.{of}": f"cross_attn_{of}" for of in "qkvo"},
    "EncDecAttention.relative_attention_bias": "cross_attn_rel_b",
    "layer_norm": "cross_attn_norm",
}
_NETWORK = {
    **{f"DenseReluDense.{name}": of for name, of in _FFN.items()},
    "layer_norm": "ffn_norm",
}
#: The modules of a layer, by their numbers.
_LAYERS = {"enc": (_ATTENTION, _NETWORK), "dec": (_ATTENTION, _CROSS, _NETWORK)}
_ENDS = {
    "shared.weight": "token_embd.weight",
    "encoder.final_layer_norm.weight": "enc.output_norm.weight",
    "decoder.final_layer_norm.weight": "dec.output_norm.weight",
    "lm_head.weight": "output.weight",
}
#: Where config.json has no field.
_DEFAULTS = {"context_length": 512, "attention.layer_norm_rms_epsilon": 1e-6}


def _place(stored: str) -> str:
    """The tensor of that name in GGUF files; "" for none."""
    if (match := _BLOCK.match(stored)) is None:
        return _ENDS.get(stored, "")
    part, layer, number, module = match.groups()
    modules = _LAYERS[part]
    name = modules[int(number)].get(module) if int(number) < len(modules) else None
    return "" if name is None else f"{part}.blk.{layer}.{name}.weight"


def _network(fields: Fields, found: Found) -> None:
    """The FFN, the width of values, and what a tied embedding's logits are multiplied by."""
    kind = fields.given("feed_forward_proj", str, "relu")
    if kind not in ("relu", "gated-gelu"):
        raise fields.refused("feed_forward_proj", "'relu' and 'gated-gelu' are supported")
    fields.fix("is_gated_act", (kind != "relu",))
    fields.fix("dense_act_fn", ("relu",) if kind == "relu" else ("gelu_new",))
    fields.take("scale_decoder_outputs", bool)
    found["attention.value_length"] = fields.size("d_kv", 64)
    for key, value in _DEFAULTS.items():
        found.setdefault(key, value)
    if fields.given("tie_word_embeddings", bool, True):
        found["own.logit_scale"] = number(found, "embedding_length") ** -0.5


_T5 = Family(
    "t5",
    keys={
        "num_layers": "block_count",
        "num_decoder_layers": "decoder_block_count",
        "num_heads": "attention.head_count",
        "d_kv": "attention.key_length",
        "d_ff": "feed_forward_length",
        "decoder_start_token_id": "decoder_start_token_id",
        "relative_attention_num_buckets": "attention.relative_buckets_count",
        "layer_norm_epsilon": "attention.layer_norm_rms_epsilon",
    },
    defaults={"d_kv": 64, "relative_attention_num_buckets": 32, "decoder_start_token_id": 0},
    fixed={
        "is_encoder_decoder": (True,),
        "relative_attention_max_distance": (128,),
    },
    ignored=frozenset({"dropout_rate", "initializer_factor", "output_past", "classifier_dropout"}),
    unused=("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
    place=_place,
    steps=(_network,),
    rope=None,
    tied=True,
    activations=(),
)
_ENCODER = replace(
    _T5,
    architecture="t5encoder",
    keys={**_T5.keys, "num_decoder_layers": "", "decoder_start_token_id": ""},
    defaults={name: of for name, of in _T5.defaults.items() if name != "decoder_start_token_id"},
    fixed={**_T5.fixed, "is_encoder_decoder": (False, True)},
)

FAMILIES: Mapping[str, Family] = dict.fromkeys(
    ("t5", "mt5", "umt5"), replace(_T5, encoding=_ENCODER)
)
