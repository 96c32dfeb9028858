"""Fields of mixtures of experts and of latent attention."""

from __future__ import annotations

import math

import numpy as np

from urdir.model.files.limits import HEADS
from urdir.model.files.pretrained.family import Found, Step
from urdir.model.files.pretrained.fields import Fields
from urdir.model.files.pretrained.rope import is_usual, magnitude, read_two_ropes
from urdir.model.files.pretrained.steps.common import (
    FULL,
    INDEXED,
    flag,
    layer_kinds,
    layers_of,
    number,
    rotates,
)

_INDEXERS = {"F": "full", "S": "shared"}
_SCORINGS = {"softmax": 1, "sigmoid": 2, "noaux_tc": 2}
#: Whether weights of experts are normed; the second of families that GGUF gives no choice.
weights_norm = flag("norm_topk_prob", "expert_weights_norm")
own_weights_norm = flag("norm_topk_prob", "own.weights_norm")


def shared_experts(count: str) -> Step:
    """The width of the FFN beside the experts: as many experts as the field says."""

    def step(fields: Fields, found: Found) -> None:
        number_of = fields.take_number(count) or 0
        width = number(found, "expert_feed_forward_length") or number(found, "feed_forward_length")
        found["expert_shared_feed_forward_length"] = int(number_of) * width

    return step


def mlp_layers(fields: Fields, found: Found) -> None:
    """Which layers are dense: the first ones, by ``mlp_layer_types``."""
    kinds, layers = fields.items("mlp_layer_types", str), layers_of(fields, found)
    if kinds is None:
        return
    dense = kinds.count("dense")
    if kinds != ["dense"] * dense + ["sparse"] * (layers - dense):
        raise fields.refused("mlp_layer_types", "dense layers, then sparse ones are supported")
    found["leading_dense_block_count"] = dense


def ernie_layers(fields: Fields, found: Found) -> None:
    """The last layer with experts must be the last one."""
    last = fields.take_number("moe_layer_end_index")
    if last is not None and last not in (-1, number(found, "block_count") - 1):
        raise fields.refused("moe_layer_end_index", "experts up to the last layer are supported")


def ernie_text_width(fields: Fields, found: Found) -> None:
    """The width of experts of text, which precedes that of experts of pictures."""
    widths = fields.items("moe_intermediate_size", int)
    if widths is None or len(widths) != 2 or not all(0 < of < 1 << 31 for of in widths):
        raise fields.wrong("moe_intermediate_size", widths)
    found["expert_feed_forward_length"] = widths[0]


def llama4_attention(fields: Fields, found: Found) -> None:
    """Chunks and RoPE by layer, temperature of the layers without, and QK norms."""
    rotates(fields, found)
    kinds = fields.items("layer_types", str)
    turning = [bool(flag) for flag in np.asarray(found["own.rotates"]).tolist()]
    usual = ["chunked_attention" if turns else "full_attention" for turns in turning]
    if kinds is not None and kinds != usual:
        raise fields.refused("layer_types", "chunks in layers with RoPE alone are supported")
    found["own.chunk"] = fields.size("attention_chunk_size", 8192)
    found["own.qk_norm"] = fields.given("use_qk_norm", bool, True)
    if fields.given("attn_temperature_tuning", bool, True):
        found["own.temperature_scale"] = fields.given("attn_scale", float, 0.1)
        found["own.temperature_length"] = fields.size("floor_scale", 8192)
    fields.take("floor_scale", int), fields.take("attn_scale", float)


def latent_heads(fields: Fields, found: Found) -> None:
    """Sizes of MLA's heads, and YaRN's factor of scores (DeepSeek: the square of the recommended
    magnitude for ``mscale_all_dim``)."""
    still, turning = fields.size("qk_nope_head_dim"), fields.size("qk_rope_head_dim")
    found["attention.key_length_mla"] = still + turning
    found["attention.value_length_mla"] = fields.size("v_head_dim")
    found["rope.dimension_count"] = turning
    found["attention.kv_lora_rank"] = fields.size("kv_lora_rank")
    found["own.latent_eps"] = 1e-6  # of the classes, whatever rms_norm_eps is
    if rank := fields.take("q_lora_rank", int):
        found["attention.q_lora_rank"] = rank
    fields.ignore(("qk_head_dim", "head_dim"))
    if not fields.given("rope_interleave", bool, True):
        found["own.rope_style"] = "half"
    for name in ("attention.key_length", "attention.value_length", "attention.head_count_kv"):
        found.pop(name, None)
    rope = fields.given("rope_scaling", dict, {}) or fields.given("rope_parameters", dict, {})
    scaling = Fields(rope, fields.path)
    kind = scaling.take("rope_type", str) or scaling.take("type", str)
    every, factor = scaling.take("mscale_all_dim", float), scaling.take("factor", float)
    if kind == "yarn" and every and factor:
        if not is_usual(every):
            raise scaling.wrong("mscale_all_dim", every)
        scale = magnitude(factor, every) ** 2 / math.sqrt(still + turning)
        found["own.score_scale"] = scale


def usual_latent_eps(fields: Fields, found: Found) -> None:
    """Latent vectors are normed with the epsilon of other norms."""
    found.pop("own.latent_eps", None)


def scored(fields: Fields, found: Found) -> None:
    """The scoring of experts by name."""
    kind = fields.take("scoring_func", str) or "softmax"
    if kind not in _SCORINGS:
        raise fields.refused("scoring_func", f"{', '.join(_SCORINGS)} are supported")
    found["expert_gating_func"] = _SCORINGS[kind]


def grouped(fields: Fields, found: Found) -> None:
    """How groups of experts are chosen: by the sum of their two best, or by their best one."""
    method = fields.take("topk_method", str) or "noaux_tc"
    if method == "greedy":
        found.pop("expert_group_count", None)
        found.pop("expert_group_used_count", None)
    elif method == "group_limited_greedy":
        if number(found, "expert_group_count") > 1:
            found["own.groups_by_best"] = True
    elif method != "noaux_tc":
        raise fields.refused("topk_method", "greedy, group_limited_greedy, noaux_tc are supported")


def indexer_kinds(fields: Fields, found: Found) -> None:
    """Which layers have an indexer: by name, by letters (F, S), or every n-th one."""
    layers = layers_of(fields, found)
    every = max(fields.given("index_topk_freq", int, 1), 1)
    skipped = fields.given("index_skip_topk_offset", int, 2)
    own = [max(layer - skipped + 1, 0) % every == 0 for layer in range(layers)]
    if fields.is_text("index_topk_pattern"):
        letters = fields.take("index_topk_pattern", str) or ""
        fields.put("indexer_types", [_INDEXERS.get(of, of) for of in letters])
    kinds = layer_kinds(fields, found, *_INDEXERS.values(), field="indexer_types")
    if kinds is not None:
        own = [kind == "full" for kind in kinds]
    fields.drop("layer_types")  # all are the same
    found["attention.indexer.types"] = np.array(own)


def all_indexed(fields: Fields, found: Found) -> None:
    """Every layer has an indexer."""
    layer_kinds(fields, found, INDEXED)
    fields.drop("layer_types")


def mimo_heads(fields: Fields, found: Found) -> None:
    """MiMo-V2's value heads are narrower, and its windowed layers have twice as many KV heads."""
    found["attention.value_length"] = fields.size("v_head_dim")
    kinds = layer_kinds(fields, found, FULL, "sliding_attention")
    if kinds is None:
        raise fields.wrong("layer_types", kinds)
    heads = number(found, "attention.head_count_kv")
    counts = [heads if kind == FULL else 2 * heads for kind in kinds]
    found["attention.head_count_kv"] = np.array(counts, np.int32)


def step_layers(fields: Fields, found: Found) -> None:
    """Step 3.5's lists with a value for each layer, those for MTP included: kinds, bases and shares
    of RoPE, limits, and the heads of windowed layers."""
    layers = layers_of(fields, found)
    lists = {}
    for name in ("layer_types", "rope_theta", "partial_rotary_factors"):
        if isinstance(found_list := fields.peek(name), list):
            if len(found_list) < layers:
                raise fields.wrong(name, f"{len(found_list)} values for {layers} layers")
            lists[name] = found_list[:layers]
            fields.put(name, lists[name])
    kinds = layer_kinds(fields, found, FULL, "sliding_attention") or [FULL] * layers
    fields.put("layer_types", kinds)
    if {"rope_theta", "partial_rotary_factors"} & lists.keys():
        fields.put("rope_parameters", _rope_by_kind(fields, kinds))
    for name, key in (("swiglu_limits", "exp"), ("swiglu_limits_shared", "shexp")):
        limits = [value or 0.0 for value in fields.given(name, list, [0.0] * layers)]
        if len(limits) < layers or not all(
            isinstance(limit, int | float) and 0 <= limit < 1e6 for limit in limits
        ):
            raise fields.wrong(name, limits)
        found[f"swiglu_clamp_{key}"] = np.array(limits[:layers], np.float32)
    other = {
        name: fields.take(f"attention_other_setting.{name}", int)
        for name in ("num_attention_heads", "num_attention_groups", "head_dim")
    }
    usual = number(found, "attention.head_count")
    heads = fields.take("num_sliding_attention_heads", int) or other["num_attention_heads"] or usual
    keys = {"num_attention_groups": "attention.head_count_kv", "head_dim": "attention.key_length"}
    for name, key in keys.items():
        if other[name] not in (None, found.get(key)):
            raise fields.refused(
                f"attention_other_setting.{name}", "that of the others is supported"
            )
    if not 0 < heads <= HEADS.most:
        raise fields.wrong("num_sliding_attention_heads", heads)
    counts = [usual if kind == FULL else heads for kind in kinds]
    found["attention.head_count"] = np.array(counts, np.int32)


def _rope_by_kind(fields: Fields, kinds: list[str]) -> dict[str, dict[str, float]]:
    """RoPE of each kind of layer, of which all must agree."""
    rope: dict[str, dict[str, float]] = {}
    for name, to in (
        ("rope_theta", "rope_theta"),
        ("partial_rotary_factors", "partial_rotary_factor"),
    ):
        if isinstance(fields.peek(name), list):
            values = fields.items(name, float) or []
            for kind, value in zip(kinds, values, strict=True):
                if rope.setdefault(kind, {}).setdefault(to, value) != value:
                    raise fields.refused(name, f"one value for layers of {kind} is supported")
            fields.drop(name)
    return rope


_SPARSE = "minimax_m3_sparse"


def minimax_layers(fields: Fields, found: Found) -> None:
    """MiniMax M3's sparse attention, shared experts and share of heads that rotates, which the
    class reads as ``partial_rotary_factor`` alone; with the fields that the class makes others of
    (``sparse_attention_config``, a flag for each layer in ``moe_layer_freq``)."""
    old = "sparse_attention_config"

    def either(name: str, usual: int) -> int:
        older = f"{old}.sparse_{name}"
        return fields.size(older if fields.has(older) else f"index_{name}", usual)

    blocks, size = either("topk_blocks", 16), either("block_size", 128)
    flags = fields.items(f"{old}.sparse_attention_freq", int)
    if flags is not None and not fields.has("layer_types"):
        fields.put("layer_types", [_SPARSE if flag else FULL for flag in flags])
    kinds = layer_kinds(fields, found, FULL, _SPARSE)
    fields.drop("layer_types")
    if _SPARSE not in (kinds or ()):  # every layer attends to everything
        blocks = -(-number(found, "context_length") // size)
    found["attention.indexer.top_k"], found["attention.indexer.block_size"] = blocks, size
    if isinstance(fields.peek("moe_layer_freq"), list):
        sparse = fields.items("moe_layer_freq", int) or []
        if not fields.has("mlp_layer_types"):
            fields.put("mlp_layer_types", ["sparse" if flag else "dense" for flag in sparse])
        fields.drop("moe_layer_freq")
    width, shared = number(found, "expert_feed_forward_length"), "shared_intermediate_size"
    beside = fields.size(shared, 3072)
    if width < 1 or beside % width:
        raise fields.refused(shared, f"a multiple of {width} is supported")
    found["expert_shared_count"] = beside // width
    rope = Fields(fields.given("rope_parameters", dict, {}), fields.path)
    share = rope.take("partial_rotary_factor", float)
    share = fields.given("partial_rotary_factor", float, 1.0) if share is None else share
    if not 0.0 < share <= 1.0:
        raise fields.wrong("partial_rotary_factor", share)
    turning = fields.take("rotary_dim", int)
    if turning not in (None, int(share * number(found, "attention.key_length"))):
        raise fields.refused("rotary_dim", f"{share} of a head is supported, as the class rotates")


def cohere_experts(fields: Fields, found: Found) -> None:
    """Command A+'s scores of experts, and the width of its dense layers."""
    kind = fields.given("expert_selection_fn", str, "softmax")
    if kind not in ("softmax", "sigmoid"):
        raise fields.refused("expert_selection_fn", "softmax and sigmoid are supported")
    found["expert_gating_func"] = _SCORINGS[kind]
    found["expert_weights_norm"] = fields.given("norm_topk_prob", bool, True)
    width = number(found, "expert_feed_forward_length")
    found["feed_forward_length"] = fields.take("prefix_dense_intermediate_size", int) or width


def minicpm_scales(fields: Fields, found: Found) -> None:
    """MiniCPM 3's heads, and its scales, which must be those of the published model."""
    found["attention.key_length"] = found.pop("attention.key_length_mla")
    found["attention.value_length"] = found.pop("attention.value_length_mla")
    for name, value in (("scale_emb", 12), ("scale_depth", 1.4), ("dim_model_base", 256)):
        fields.fix(name, (value, float(value)))


_RATIOS = {
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}


def compressed_blocks(fields: Fields, found: Found) -> None:
    """Tokens of a block in each layer, the layers whose experts are those of a token, and both
    rotations (DeepSeek V4)."""
    layers = layers_of(fields, found)
    kinds, ratios = fields.items("layer_types", str), fields.items("compress_ratios", int)
    if kinds is not None:
        if other := set(kinds) - _RATIOS.keys():
            raise fields.refused("layer_types", f"{min(other)!r}: {', '.join(_RATIOS)}")
        ratios = [_RATIOS[kind] for kind in kinds]
    if ratios is None or len(ratios) < layers:
        raise fields.wrong("compress_ratios", f"{len(ratios or ())} values for {layers} layers")
    found["attention.compress_ratios"] = np.array(ratios[:layers], np.int32)
    found["attention.sliding_window"] = fields.size("sliding_window", 128)
    of_tokens = fields.given("num_hash_layers", int, 3)
    if (networks := fields.items("mlp_layer_types", str)) is not None:
        of_tokens = networks.count("hash_moe")
        if networks != ["hash_moe"] * of_tokens + ["moe"] * (layers - of_tokens):
            raise fields.refused("mlp_layer_types", "hash_moe layers, then moe layers")
    found["hash_layer_count"] = min(layers, of_tokens)
    turning = fields.take("qk_rope_head_dim", int)
    share = fields.given("partial_rotary_factor", float, 0.125)
    if not 0.0 < share <= 1.0:
        raise fields.wrong("partial_rotary_factor", share)
    dim = number(found, "attention.key_length")
    read_two_ropes(fields, found, int(share * dim) if turning is None else turning)
