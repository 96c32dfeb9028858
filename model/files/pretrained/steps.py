"""Fields of config.json that are no rename: what a family's table lists as ``steps``."""

from __future__ import annotations

import math

import numpy as np

from urdir.model.files.pretrained.family import Found, Step
from urdir.model.files.pretrained.fields import Fields
from urdir.model.files.pretrained.rope import magnitude

_FULL = "full_attention"
_SCORINGS = {"softmax": 1, "sigmoid": 2, "noaux_tc": 2}


def number(found: Found, key: str) -> int:
    """A size that another key follows from; 0 if absent or no integer."""
    value = found.get(key, 0)
    return value if type(value) is int else 0


def layers_of(fields: Fields, found: Found) -> int:
    """The number of layers, checked before a list of that length is made."""
    layers = number(found, "block_count")
    if not 0 < layers < 1 << 16:
        raise fields.wrong("num_hidden_layers", layers)
    return layers


def square_root(name: str) -> Step:
    """Scores are divided by the square root of the field."""

    def step(fields: Fields, found: Found) -> None:
        value = fields.take(name, float)
        if value is not None:
            if value <= 0:
                raise fields.wrong(name, value)
            found["own.score_scale"] = value**-0.5

    return step


def rotates(fields: Fields, found: Found) -> None:
    """Layers without RoPE: ``no_rope_layers`` (1: with RoPE), or every n-th layer."""
    layers = layers_of(fields, found)
    flags = fields.items("no_rope_layers", int)
    every = fields.take("no_rope_layer_interval", int) or 4
    if flags is not None and len(flags) not in (0, layers):
        raise fields.wrong("no_rope_layers", f"{len(flags)} flags for {layers} layers")
    flags = flags or [int((layer + 1) % every != 0) for layer in range(layers)]
    found["own.rotates"] = np.array(flags) != 0


def flag(name: str, key: str) -> Step:
    """A key for a boolean field."""

    def step(fields: Fields, found: Found) -> None:
        value = fields.take(name, bool)
        if value is not None:
            found[key] = value

    return step


def one_base(fields: Fields, found: Found) -> None:
    """The bases of RoPE in each layer, which must be one."""
    bases = fields.items("layer_rope_theta", float)
    rope = fields.given("rope_parameters", dict, {})
    if bases and set(bases) != {fields.given("rope_theta", float, rope.get("rope_theta"))}:
        raise fields.refused("layer_rope_theta", "the base of 'rope_parameters' is supported")


def has_windows(fields: Fields, found: Found) -> None:
    """Whether some layers have sliding windows, whatever the number of layers."""
    found["own.has_windows"] = fields.has("sliding_window")


def both_names(*names: str) -> Step:
    """The first of some fields that is given is the one that counts: drop the others."""

    def step(fields: Fields, found: Found) -> None:
        fields.ignore(names)

    return step


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


def default_width(factor: int) -> Step:
    """An FFN ``factor`` times as wide as the hidden size, unless a width is given."""

    def step(fields: Fields, found: Found) -> None:
        hidden = number(found, "embedding_length")
        found.setdefault("feed_forward_length", factor * hidden)

    return step


def falcon_heads(fields: Fields, found: Found) -> None:
    """KV heads of Falcon: one, or as many as given in the newer layout."""
    heads = found.pop("attention.head_count_kv", None)
    newer = fields.given("new_decoder_architecture", bool, False)
    single = fields.given("multi_query", bool, True)
    queries = number(found, "attention.head_count")
    found["attention.head_count_kv"] = (heads or queries) if newer else 1 if single else queries


def bigcode_heads(fields: Fields, found: Found) -> None:
    """KV heads of StarCoder: one, or one for each query head."""
    single = fields.given("multi_query", bool, True)
    found["attention.head_count_kv"] = 1 if single else number(found, "attention.head_count")


def alibi(fields: Fields, found: Found) -> None:
    """MPT's biases of scores, and its learned positions without them."""
    if fields.given("attn_config.alibi", bool, False):
        found["attention.max_alibi_bias"] = fields.given("attn_config.alibi_bias_max", float, 8.0)
    else:
        raise fields.refused("attn_config.alibi", "only ALiBi is supported")


def latent_heads(fields: Fields, found: Found) -> None:
    """Sizes of MLA's heads, and YaRN's factor of scores (DeepSeek: the square of the recommended
    magnitude for ``mscale_all_dim``)."""
    still, turning = fields.size("qk_nope_head_dim"), fields.size("qk_rope_head_dim")
    found["attention.key_length_mla"] = still + turning
    found["attention.value_length_mla"] = fields.size("v_head_dim")
    found["rope.dimension_count"] = turning
    found["attention.kv_lora_rank"] = fields.size("kv_lora_rank")
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
        scale = magnitude(factor, every) ** 2 / math.sqrt(still + turning)
        found["own.score_scale"] = scale


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


def kimi_layers(fields: Fields, found: Found) -> None:
    """Kimi Linear's layers, counted from 1, and sizes of its delta rules."""
    heads = number(found, "attention.head_count")
    delta = fields.items("linear_attn_config.kda_layers", int) or []
    full = fields.items("linear_attn_config.full_attn_layers", int) or []
    layers = layers_of(fields, found)
    if sorted(delta + full) != list(range(1, layers + 1)):
        raise fields.wrong("linear_attn_config.kda_layers", f"{delta} and {full}")
    if fields.size("linear_attn_config.num_heads") != heads:
        raise fields.refused("linear_attn_config.num_heads", f"{heads} are supported")
    found["kda.head_dim"] = fields.size("linear_attn_config.head_dim")
    found["ssm.conv_kernel"] = fields.size("linear_attn_config.short_conv_kernel_size")
    found["attention.head_count_kv"] = np.array(
        [0 if layer + 1 in delta else heads for layer in range(layers)], np.int32
    )


def every_last_is_full(name: str, default: int) -> Step:
    """Delta rules in all but the last of every ``name`` layers."""

    def step(fields: Fields, found: Found) -> None:
        heads, layers = number(found, "attention.head_count"), layers_of(fields, found)
        every = fields.size(name, default)
        counts = [heads if (layer + 1) % every == 0 else 0 for layer in range(layers)]
        found["attention.head_count_kv"] = np.array(counts, np.int32)

    return step


def heads_where(kinds: tuple[str, ...], field: str = "layer_types") -> Step:
    """KV heads in layers of those kinds, none in others."""

    def step(fields: Fields, found: Found) -> None:
        layers, given = layers_of(fields, found), fields.items(field, str)
        if given is None or len(given) != layers:
            raise fields.wrong(field, given)
        set_heads(fields, found, [kind in kinds for kind in given])

    return step


def set_heads(fields: Fields, found: Found, has: list[bool]) -> None:
    """KV heads in some layers, none in others."""
    queries = number(found, "attention.head_count")
    heads = number(found, "attention.head_count_kv") or queries
    found["attention.head_count_kv"] = np.array([heads if one else 0 for one in has], np.int32)


def jamba_layers(fields: Fields, found: Found) -> None:
    """Jamba's attention layers by period and offset."""
    every, first = fields.size("attn_layer_period", 8), fields.given("attn_layer_offset", int, 4)
    layers = layers_of(fields, found)
    set_heads(fields, found, [layer % every == first for layer in range(layers)])
    found["ssm.inner_size"] = fields.size("mamba_expand", 2) * number(found, "embedding_length")


def bamba_layers(fields: Fields, found: Found) -> None:
    """Bamba's attention layers by number."""
    full = fields.items("attn_layer_indices", int) or []
    set_heads(fields, found, [layer in full for layer in range(layers_of(fields, found))])


def inner_size(fields: Fields, found: Found) -> None:
    """The width of a state-space mixer: its heads together, or a multiple of the hidden size."""
    expand = fields.take("mamba_expand", int) or fields.take("expand", int)
    dim = fields.take("mamba_d_head", int) or fields.take("mamba_head_dim", int)
    hidden = number(found, "embedding_length")
    own = fields.take("mamba_d_ssm", int)
    found["ssm.inner_size"] = own or (
        dim * number(found, "ssm.time_step_rank") if dim else (expand or 2) * hidden
    )


def nemotron_layers(fields: Fields, found: Found) -> None:
    """Nemotron-H's layers: M is a Mamba-2 mixer, * attention, - an FFN, E experts; newer
    configurations list them by name."""
    names = {"mamba": "M", "linear_attention": "M", "attention": "*", _FULL: "*", "mlp": "-"}
    names["moe"] = "E"
    kinds = fields.items("layers_block_type", str) or fields.items("layer_types", str)
    pattern = fields.take("hybrid_override_pattern", str)
    if pattern is None:
        pattern = "".join(names.get(kind, "?") for kind in kinds or ())
    layers = layers_of(fields, found)
    if len(pattern) != layers or set(pattern) - set("M*-E") or {"-", "E"} <= set(pattern):
        raise fields.refused("hybrid_override_pattern", "M, *, and either - or E are supported")
    width = number(found, "feed_forward_length")
    set_heads(fields, found, [kind == "*" for kind in pattern])
    found["feed_forward_length"] = np.array([width if k in "-E" else 0 for k in pattern], np.int32)
    if "E" not in pattern:
        for key in [key for key in found if key.startswith("expert_")]:
            del found[key]


def lfm2_layers(fields: Fields, found: Found) -> None:
    """LFM2's attention layers, and the width of its FFN."""
    full = fields.items("full_attn_idxs", int)
    kinds = fields.items("layer_types", str)
    layers = layers_of(fields, found)
    if kinds is not None:
        full = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    set_heads(fields, found, [layer in (full or ()) for layer in range(layers)])
    width = fields.take("block_ff_dim", int) or number(found, "feed_forward_length")
    if fields.given("block_auto_adjust_ff_dim", bool, False):
        width = int(2 * width / 3)
        width = int(fields.given("block_ffn_dim_multiplier", float, 1.0) * width)
        each = fields.size("block_multiple_of", 256)
        width = -(-width // each) * each
    fields.ignore(("block_ffn_dim_multiplier", "block_multiple_of"))
    found["feed_forward_length"] = width


def delta_layers(fields: Fields, found: Found) -> None:
    """Qwen3-Next's layers: delta rules, with attention in every nth, and sizes of theirs."""
    layers = layers_of(fields, found)
    kinds = fields.items("layer_types", str)
    every = fields.size("full_attention_interval", 4)
    kinds = kinds or ["full_attention" if (layer + 1) % every == 0 else "linear_attention"
                      for layer in range(layers)]  # fmt: skip
    if len(kinds) != layers or set(kinds) - {"linear_attention", "full_attention"}:
        raise fields.wrong("layer_types", kinds)
    found["attention.recurrent_layers"] = np.array(kinds) == "linear_attention"
    found["ssm.state_size"] = fields.size("linear_key_head_dim")
    found["ssm.group_count"] = fields.size("linear_num_key_heads")
    found["ssm.time_step_rank"] = values = fields.size("linear_num_value_heads")
    found["ssm.inner_size"] = values * fields.size("linear_value_head_dim")
    found["ssm.conv_kernel"] = fields.size("linear_conv_kernel_dim")


def minimax_layers(fields: Fields, found: Found) -> None:
    """MiniMax-01's layers, and the scale of its residuals, which must be one for all."""
    kinds, layers = fields.items("layer_types", str), layers_of(fields, found)
    if kinds is None:
        kinds = [
            "full_attention" if (i + 1) % 2 == 0 else "linear_attention" for i in range(layers)
        ]
    if len(kinds) != layers:
        raise fields.wrong("layer_types", kinds)
    found["attention.recurrent_layers"] = np.array(kinds) == "linear_attention"
    names = [f"{of}_alpha_factor" for of in ("full_attn", "linear_attn", "mlp")]
    scales = {fields.given(name, float, 1.0) for name in names}
    if len(scales) != 1:
        raise fields.refused(names[0], "one factor for all networks is supported")
    found["residual_scale"] = scales.pop()


def time_step_rank(fields: Fields, found: Found) -> None:
    """Mamba's low rank, "auto" for a sixteenth of the hidden size."""
    if not fields.has("time_step_rank"):
        return
    hidden = number(found, "embedding_length")
    if fields.is_text("time_step_rank"):
        fields.fix("time_step_rank", ("auto",))
        found["ssm.time_step_rank"] = -(-hidden // 16)
    else:
        found["ssm.time_step_rank"] = fields.size("time_step_rank")


def position_kind(fields: Fields, found: Found) -> None:
    """Granite 4's attention layers have RoPE, or no positions."""
    kind = fields.given("position_embedding_type", str, "rope")
    if kind not in ("rope", "nope"):
        raise fields.refused("position_embedding_type", "rope and nope are supported")
    found["rope.scaling.finetuned"] = kind == "rope"


def multipliers(fields: Fields, found: Found) -> None:
    """Falcon-H1's factors of vectors: those of attention become factors of scores and results, the
    others multiply rows of matrices (`layouts`)."""

    def given(name: str) -> float:
        return fields.given(name, float, 1.0)

    dim = number(found, "attention.key_length") or 1
    into, outof = given("attention_in_multiplier"), given("attention_out_multiplier")
    found["own.score_scale"] = into * into * given("key_multiplier") / math.sqrt(dim)
    found["own.value_scale"] = into * outof
    found["own.embedding_scale"] = given("embedding_multiplier")
    found["own.logit_scale"] = given("lm_head_multiplier")
    mlp = fields.items("mlp_multipliers", float) or [1.0, 1.0]
    ssm = fields.items("ssm_multipliers", float) or [1.0] * 5
    if len(mlp) != 2 or len(ssm) != 5:
        raise fields.wrong("ssm_multipliers", f"{len(ssm)} numbers, mlp_multipliers {len(mlp)}")
    found["own.multipliers"] = np.array(
        [*mlp, *ssm, given("ssm_in_multiplier"), given("ssm_out_multiplier")]
    )


def gemma4_layers(fields: Fields, found: Found) -> None:
    """Gemma 4's sizes by layer: full-attention layers have wider heads and their own number of
    them, and layers that reuse keys and values may have a wider FFN."""
    layers, kinds = layers_of(fields, found), fields.items("layer_types", str)
    if kinds is None or len(kinds) != layers:
        raise fields.wrong("layer_types", kinds)
    dim = fields.size("head_dim", 256)
    wide = fields.size("global_head_dim", dim)
    for kind in ("key", "value"):
        found[f"attention.{kind}_length"] = wide
        found[f"attention.{kind}_length_swa"] = dim
    heads = number(found, "attention.head_count_kv")
    full = fields.take("num_global_key_value_heads", int)
    if not fields.given("attention_k_eq_v", bool, False) or full is None:
        full = heads
    counts = [full if kind == "full_attention" else heads for kind in kinds]
    found["attention.head_count_kv"] = np.array(counts, np.int32)
    width = number(found, "feed_forward_length")
    shared = layers - number(found, "attention.shared_kv_layers")
    twice = fields.given("use_double_wide_mlp", bool, False)
    widths = [2 * width if twice and layer >= shared else width for layer in range(layers)]
    found["feed_forward_length"] = np.array(widths, np.int32)


def mimo_heads(fields: Fields, found: Found) -> None:
    """MiMo-V2's value heads are narrower, and its windowed layers have twice as many KV heads."""
    found["attention.value_length"] = fields.size("v_head_dim")
    kinds, layers = fields.items("layer_types", str), layers_of(fields, found)
    if kinds is None or len(kinds) != layers or set(kinds) - {_FULL, "sliding_attention"}:
        raise fields.wrong("layer_types", kinds)
    heads = number(found, "attention.head_count_kv")
    counts = [heads if kind == _FULL else 2 * heads for kind in kinds]
    found["attention.head_count_kv"] = np.array(counts, np.int32)


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
