"""Decoders with LayerNorm: GPT-2 and its relatives."""

from __future__ import annotations

from collections.abc import Mapping

from urdir.model.files.pretrained.family import Family
from urdir.model.files.pretrained.tables.dense import GELU_TANH

FAMILIES: Mapping[str, Family] = {
    "starcoder2": Family(
        "starcoder2",
        activations=(*GELU_TANH, "gelu"),
        fixed={"mlp_type": ("default",), "norm_type": ("layer_norm",)},
        tied=True,
    ),
    "cohere": Family(
        "command-r",
        keys={"logit_scale": "logit_scale"},
        implied={"logit_scale": 0.0625},
        fixed={"use_qk_norm": (False,)},
        rope="interleaved",
        tied=True,
    ),
}
