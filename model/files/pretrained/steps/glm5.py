"""GLM 5 Next: delta rules, and MLA without rotation over pools of tokens.

Source: transformers' `configuration_glm5_next.py`; published folders have the sizes of delta
rules in an object.
"""

from __future__ import annotations

import numpy as np

from urdir.model.files.pretrained.family import Found
from urdir.model.files.pretrained.fields import Fields
from urdir.model.files.pretrained.steps.common import layer_kinds, layers_of, number
from urdir.model.files.pretrained.steps.recurrent import LINEAR, delta_size

_FULL = ("indexed_attention", "full_attention")
_OBJECT = "linear_attn_config"


def glm5_layers(fields: Fields, found: Found) -> None:
    """Which layers are delta rules (by default all other than each fourth), and their sizes."""
    heads, layers = number(found, "attention.head_count"), layers_of(fields, found)
    if (given := found.pop("attention.head_count_kv", heads)) != heads:
        raise fields.refused("num_key_value_heads", f"{heads} are supported, not {given}")
    kinds = layer_kinds(fields, found, LINEAR, *_FULL)
    full = [layer % 4 == 3 for layer in range(layers)]
    full = full if kinds is None else [kind in _FULL for kind in kinds]
    found["attention.head_count_kv"] = np.array([heads if one else 0 for one in full], np.int32)
    if delta_size(fields, "num_heads", "linear_num_heads", 64) != heads:
        raise fields.refused("linear_num_heads", f"{heads} are supported")
    found["kda.head_dim"] = delta_size(fields, "head_dim", "linear_head_dim", 128)
    found["ssm.conv_kernel"] = delta_size(
        fields, "short_conv_kernel_size", "linear_conv_kernel_dim", 4
    )
    floor = fields.take(f"{_OBJECT}.gate_lower_bound", float)
    name, usual = f"{_OBJECT}.safe_gate", fields.take("linear_lower_bound", float)
    is_safe = fields.given(name, bool, True)
    if floor is None and not is_safe:
        raise fields.refused(name, "gates with 'gate_lower_bound' are supported")
    if (floor := usual if floor is None else floor) is not None:
        found["kda.gate_lower_bound"] = floor


def still_heads(fields: Fields, found: Found) -> None:
    """Sizes of MLA's heads, which do not rotate."""
    fields.fix("qk_rope_head_dim", (0,))
    found["attention.key_length_mla"] = fields.size("qk_nope_head_dim")
    found["attention.value_length_mla"] = fields.size("v_head_dim")
    found["attention.kv_lora_rank"] = fields.size("kv_lora_rank")
    found["attention.q_lora_rank"] = fields.size("q_lora_rank")
    found["rope.dimension_count"] = 0
    fields.ignore(("qk_head_dim",))
    for name in ("attention.key_length", "attention.value_length"):
        found.pop(name, None)
