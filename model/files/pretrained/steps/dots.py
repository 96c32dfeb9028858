"""dots.note 3: two kinds of layers, with sizes and bases of RoPE of their own.

Sources: transformers' ``Dots3NoteTextConfig``, which takes the names of the published folders, too;
vLLM's ``dots3_note``.
"""

from __future__ import annotations

import numpy as np

from urdir.model.files.pretrained.family import Found
from urdir.model.files.pretrained.fields import Fields
from urdir.model.files.pretrained.layouts import Keys
from urdir.model.files.pretrained.steps.common import (
    FULL,
    INDEXED,
    layer_kinds,
    layers_of,
    number,
    other_layers,
)

_SPARSE, _LOCAL = "deepseek_sparse_attention", "sliding_attention"
#: Sizes of layers with a window, as the class has them where a folder does not say.
_SIZES = {"num_attention_heads": 64, "q_lora_rank": 1024, "kv_lora_rank": 1024,
          "qk_nope_head_dim": 192, "v_head_dim": 128}  # fmt: skip
#: Keys of the bases of RoPE, by the kind of layer: the older field, and the class's own base.
_BASES = {_SPARSE: ("rope.freq_base", "rope_theta", 8e7),
          _LOCAL: ("rope.freq_base_swa", "swa_rope_theta", 5e4)}  # fmt: skip


def two_kinds(fields: Fields, found: Found) -> None:
    """Layers with an indexer and layers with a window."""
    layers = layers_of(fields, found)
    selects = fields.given("use_dsa", bool, not fields.has("per_layer_config"))
    kinds = layer_kinds(fields, found, FULL, _SPARSE, INDEXED, _LOCAL)
    if kinds is None:
        kinds = [_SPARSE if n < 2 or n % 4 == 1 else _LOCAL for n in range(layers)]
    if not selects and FULL in kinds:
        raise fields.refused("layer_types", "full attention without an indexer is not supported")
    if not (fields.has("sliding_window") or fields.has("sliding_window_size")):
        fields.put("sliding_window", 512)
    windowed = [kind == _LOCAL for kind in kinds]
    sizes = _local_sizes(fields, windowed)
    for name, key in (("q_lora_rank", "attention.q_lora_rank"),
                      ("qk_rope_head_dim", "rope.dimension_count")):  # fmt: skip
        if sizes[name] != number(found, key):
            raise fields.refused(f"swa_{name}", f"{number(found, key)} is supported")
    heads = number(found, "attention.head_count")
    own = np.where(windowed, sizes["num_attention_heads"], heads)
    found["attention.head_count"] = own.astype(np.int32)
    found["attention.kv_lora_rank_swa"] = sizes["kv_lora_rank"]
    found["attention.key_length_mla_swa"] = sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"]
    found["attention.value_length_mla_swa"] = sizes["v_head_dim"]
    found["attention.indexer.types"] = np.logical_not(windowed)
    found["attention.sliding_window_pattern"] = np.array(windowed)
    found.pop("own.latent_eps")  # that of other norms
    _shared_width(fields, found)
    _bases(fields, found)


def latent_scale(keys: Keys, rank: int) -> float:
    """What latent vectors are multiplied with after their norm, whose weights it becomes part
    of."""
    return float((keys["embedding_length"] / rank) ** 0.5)


def _local_sizes(fields: Fields, windowed: list[bool]) -> dict[str, int]:
    """Sizes of layers with a window, which all have the same: fields "swa_NAME", or an object for
    each of these layers."""
    own = other_layers(fields, windowed)
    of, prefix = (fields, "swa_") if own is None else (own, "")
    sizes = {name: of.size(f"{prefix}{name}", usual) for name, usual in _SIZES.items()}
    rest = of.size(f"{prefix}head_dim", 256) - sizes["qk_nope_head_dim"]
    sizes["qk_rope_head_dim"] = of.size(f"{prefix}qk_rope_head_dim", max(rest, 1))
    of.fix(f"{prefix}num_key_value_heads", (sizes["num_attention_heads"],))
    if own is not None:
        own.finish()
    return sizes


def _shared_width(fields: Fields, found: Found) -> None:
    """The network beside the experts, of experts' width."""
    width = number(found, "expert_feed_forward_length")
    fields.fix("shared_experts_intermediate_size", (width,))
    if found.pop("expert_shared_feed_forward_length", width) != width:
        raise fields.refused("moe_shared_expert_intermediate_size", f"{width} is supported")


def _bases(fields: Fields, found: Found) -> None:
    given = dict(fields.given("rope_parameters", dict, {}))
    if INDEXED in given:
        given[_SPARSE] = given.pop(INDEXED)
    if set(given) - set(_BASES):
        raise fields.refused("rope_parameters", f"objects for {', '.join(_BASES)} are supported")
    for kind, (key, older, usual) in _BASES.items():
        inner = {} if given.get(kind) is None else given[kind]
        if not isinstance(inner, dict):
            raise fields.wrong("rope_parameters", given)
        of = Fields(inner, fields.path)
        base = of.given("rope_theta", float, fields.given(older, float, usual))
        if not 1.001 < base < 1e30:
            raise fields.wrong(older, base)
        found[key] = base
        of.fix("rope_type", ("default",))
        of.ignore(("partial_rotary_factor",))
        of.finish()
    fields.drop("rope_parameters")
    fields.put("rope_theta", found["rope.freq_base"])
