"""Fields of models with recurrent mixers: which layers have them, and their sizes."""

from __future__ import annotations

import math

import numpy as np

from urdir.model.files.pretrained.family import Found, Step
from urdir.model.files.pretrained.fields import Fields
from urdir.model.files.pretrained.steps.common import FULL, layer_kinds, layers_of, number

#: The kind of layers with a delta rule or with lightning attention.
LINEAR = "linear_attention"


def kimi_layers(fields: Fields, found: Found) -> None:
    """Kimi Linear's layers, by name or by numbers from 1, and sizes of its delta rules."""
    heads, layers = number(found, "attention.head_count"), layers_of(fields, found)
    delta = fields.items("linear_attn_config.kda_layers", int) or []
    full = fields.items("linear_attn_config.full_attn_layers", int) or []
    kinds = layer_kinds(fields, found, LINEAR, FULL)
    named = [layer + 1 for layer, kind in enumerate(kinds or ()) if kind == LINEAR]
    if kinds is not None and not (delta or full):
        delta, full = named, sorted({*range(1, layers + 1)}.difference(named))
    is_same = kinds is None or sorted(delta) == named
    if sorted(delta + full) != list(range(1, layers + 1)) or not is_same:
        raise fields.wrong("linear_attn_config.kda_layers", f"{delta} and {full}")
    if delta_size(fields, "num_heads", "linear_num_heads", 32) != heads:
        raise fields.refused("linear_attn_config.num_heads", f"{heads} are supported")
    found["kda.head_dim"] = delta_size(fields, "head_dim", "linear_head_dim", 128)
    found["ssm.conv_kernel"] = delta_size(
        fields, "short_conv_kernel_size", "linear_conv_kernel_dim", 4
    )
    found["attention.head_count_kv"] = np.array(
        [0 if layer + 1 in delta else heads for layer in range(layers)], np.int32
    )


def delta_size(fields: Fields, inner: str, name: str, default: int) -> int:
    """A size of delta rules, which published folders have in an object."""
    return fields.size(f"linear_attn_config.{inner}", fields.size(name, default))


def every_last_is_full(name: str, default: int) -> Step:
    """Delta rules in all but the last of every ``name`` layers, unless layers are named. Newer
    configurations name the sizes of delta rules, too."""

    def step(fields: Fields, found: Found) -> None:
        heads, layers = number(found, "attention.head_count"), layers_of(fields, found)
        every, kinds = fields.size(name, default), layer_kinds(fields, found, LINEAR, FULL)
        full = [(layer + 1) % every == 0 for layer in range(layers)]
        full = full if kinds is None else [kind == FULL for kind in kinds]
        found["attention.head_count_kv"] = np.array([heads if of else 0 for of in full], np.int32)
        if fields.size("linear_num_heads", heads) != heads:
            raise fields.refused("linear_num_heads", f"{heads} are supported")
        if fields.has("linear_head_dim"):  # then "head_dim" is what rotates
            found["kda.head_dim"] = fields.size("linear_head_dim")

    return step


def heads_where(
    kinds: tuple[str, ...], others: tuple[str, ...], field: str = "layer_types"
) -> Step:
    """KV heads in layers of those kinds, none in those of the others."""

    def step(fields: Fields, found: Found) -> None:
        given = layer_kinds(fields, found, *kinds, *others, field=field)
        if given is None:
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
    full = set(fields.items("attn_layer_indices", int) or ())
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


def zamba_attention(fields: Fields, found: Found) -> None:
    """Heads of Zamba 2's transformers, which read vectors twice as wide as the stream."""
    heads, hidden = number(found, "attention.head_count"), number(found, "embedding_length")
    if heads < 1 or 2 * hidden % heads:
        raise fields.wrong("num_attention_heads", heads)
    found.pop("attention.value_length", None)
    found["attention.key_length"] = 2 * hidden // heads
    found["own.mem_rope"] = fields.given("use_mem_rope", bool, False)
    found["own.attention_adapters"] = fields.given("use_shared_attention_adapter", bool, False)
    if fields.items("layers_block_type", str) is None:
        fields.put("layers_block_type", fields.items("layer_types", str))
    fields.drop("layer_types")


def nemotron_layers(fields: Fields, found: Found) -> None:
    """Nemotron-H's layers: M is a Mamba-2 mixer, * attention, - an FFN, E experts; newer
    configurations list them by name."""
    names = {"mamba": "M", LINEAR: "M", "attention": "*", FULL: "*", "mlp": "-"}
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
    full = set(fields.items("full_attn_idxs", int) or ())
    kinds = layer_kinds(fields, found, "conv", FULL)
    layers = layers_of(fields, found)
    if kinds is not None:
        full = {layer for layer, kind in enumerate(kinds) if kind == FULL}
    set_heads(fields, found, [layer in full for layer in range(layers)])
    width = fields.take("block_ff_dim", int) or number(found, "feed_forward_length")
    if fields.given("block_auto_adjust_ff_dim", bool, False):
        width = int(2 * width / 3)
        factor = fields.given("block_ffn_dim_multiplier", float, 1.0)
        if not 0 < factor < 1024:
            raise fields.wrong("block_ffn_dim_multiplier", factor)
        width = int(factor * width)
        each = fields.size("block_multiple_of", 256)
        width = -(-width // each) * each
    fields.ignore(("block_ffn_dim_multiplier", "block_multiple_of"))
    found["feed_forward_length"] = width


def delta_layers(fields: Fields, found: Found) -> None:
    """Qwen3-Next's layers: delta rules, with attention in every nth, and sizes of theirs."""
    layers = layers_of(fields, found)
    kinds = layer_kinds(fields, found, LINEAR, FULL)
    every = fields.size("full_attention_interval", 4)
    if kinds is None:
        kinds = [FULL if (i + 1) % every == 0 else LINEAR for i in range(layers)]
    found["attention.recurrent_layers"] = np.array(kinds) == LINEAR
    found["ssm.state_size"] = fields.size("linear_key_head_dim")
    found["ssm.group_count"] = fields.size("linear_num_key_heads")
    found["ssm.time_step_rank"] = values = fields.size("linear_num_value_heads")
    found["ssm.inner_size"] = values * fields.size("linear_value_head_dim")
    found["ssm.conv_kernel"] = fields.size("linear_conv_kernel_dim")


def minimax_layers(fields: Fields, found: Found) -> None:
    """MiniMax-01's layers, and the scale of its residuals, which must be one for all."""
    kinds, layers = layer_kinds(fields, found, LINEAR, FULL), layers_of(fields, found)
    if kinds is None:
        kinds = [FULL if (i + 1) % 2 == 0 else LINEAR for i in range(layers)]
    found["attention.recurrent_layers"] = np.array(kinds) == LINEAR
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
