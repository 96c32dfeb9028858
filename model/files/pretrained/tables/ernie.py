"""ERNIE 4.5's mixtures of experts, also those with pictures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from urdir.model.files.pretrained.family import Family
from urdir.model.files.pretrained.layouts import Layout, first_row
from urdir.model.files.pretrained.steps.mixtures import (
    ernie_layers,
    ernie_text_width,
    mlp_layers,
    shared_experts,
)

_ERNIE = Family(
    "ernie4_5-moe",
    keys={
        "moe_layer_start_index": "leading_dense_block_count",
        "moe_layer_interval": "interleave_moe_layer_step",
    },
    steps=(shared_experts("moe_num_shared_experts"), ernie_layers),
    ignored=frozenset({"moe_capacity", "moe_gate", "moe_use_aux_free", "moe_norm_min"}),
    rope="interleaved",
    tied=True,
)
FAMILIES: Mapping[str, Family] = {
    "ernie4_5_moe": _ERNIE,
    # experts of pictures follow those of text, for whose equal positions M-RoPE is RoPE
    "ernie4_5_vl_moe_text": replace(
        _ERNIE,
        names={"mlp.gate.weight_1": ()},
        keys={**_ERNIE.keys, "moe_intermediate_size": ""},
        implied={"interleave_moe_layer_step": 1},
        steps=(ernie_text_width, mlp_layers, *_ERNIE.steps),
        layouts={
            "ffn_gate_inp.weight": Layout(transposed=True),
            "exp_probs_b.bias": Layout(rows=first_row),
        },
        other_experts=True,
    ),
}
