"""Fields of config.json that are no rename: attention and FFNs."""

from __future__ import annotations

import numpy as np

from urdir.model.errors import ConfigError
from urdir.model.files.limits import HEADS, LAYERS, TOKENS
from urdir.model.files.pretrained.family import Found, Step
from urdir.model.files.pretrained.fields import Fields

#: The kind of a layer whose attention has no window.
FULL = "full_attention"
#: The kind of a layer with an indexer, as newer versions of transformers write it.
INDEXED = "indexed_attention"
_WINDOW = "sliding_attention"


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


def layer_kinds(
    fields: Fields, found: Found, *known: str, field: str = "layer_types"
) -> list[str] | None:
    """The kind of each layer, one of those ``known``; None if absent.

    Raises ConfigError for another number of layers, UnsupportedError for another kind.
    """
    kinds, layers = fields.items(field, str), layers_of(fields, found)
    if kinds is not None and len(kinds) != layers:
        raise fields.wrong(field, f"{len(kinds)} kinds for {layers} layers")
    if set(kinds or ()).difference(known):
        raise fields.refused(field, f"{', '.join(known)} are supported")
    return kinds


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


def squared_relu(fields: Fields, found: Found) -> None:
    """Whether a gate is a squared ReLU, as it is unless the configuration says otherwise."""
    found["own.squared_relu"] = fields.given("hidden_act", str, "relu2") == "relu2"


def hrm_stacks(fields: Fields, found: Found) -> None:
    """HRM-Text's two stacks of layers and how often they run. The number of layers is that of one
    stack, or of all runs if the configuration has both."""
    high, low = fields.size("H_cycles", 2), fields.size("L_cycles", 3)
    each = fields.size("num_layers_per_stack", layers_of(fields, found))
    runs = each * high * (low + 1)
    LAYERS.check(runs, f"{fields.path}: runs of layers", ConfigError)
    if number(found, "block_count") not in (each, runs):
        raise fields.wrong("num_hidden_layers", f"{found['block_count']}, not {each} or {runs}")
    found["hrm.layers_per_stack"], found["hrm.h_cycles"], found["hrm.l_cycles"] = each, high, low
    found["block_count"] = runs
    deviation = fields.given("initializer_range", float, 0.02)
    scale = fields.take("embedding_scale", float)
    if scale is None and not 0 < deviation <= 1:
        raise fields.wrong("initializer_range", deviation)
    found["embedding_scale"] = 1.0 / deviation if scale is None else scale


def one_base(fields: Fields, found: Found) -> None:
    """The bases of RoPE in each layer, which must be one."""
    bases = fields.items("layer_rope_theta", float)
    rope = Fields(fields.given("rope_parameters", dict, {}), fields.path)
    theta = fields.take("rope_theta", float)
    theta = rope.take("rope_theta", float) if theta is None else theta
    if bases and set(bases) != {theta}:
        raise fields.refused("layer_rope_theta", "the base of 'rope_parameters' is supported")


def muse_layers(fields: Fields, found: Found) -> None:
    """Muse Glimmer's layers, of which every fourth from the last one has neither a window nor RoPE,
    and its norms of heads: of queries with a factor, of keys without."""
    layers, theta = layers_of(fields, found), "layer_rope_theta"
    usual = [FULL if (layers - 1 - layer) % 4 == 0 else _WINDOW for layer in range(layers)]
    kinds = layer_kinds(fields, found, FULL, _WINDOW) or usual
    fields.put("layer_types", kinds)
    bases = fields.items(theta, float)
    if bases is not None and [base != 0 for base in bases] != [kind != FULL for kind in kinds]:
        raise fields.refused(
            theta, "RoPE in all layers with a window, and only there, is supported"
        )
    rope = fields.given("rope_parameters", dict, {}) | fields.given("rope_scaling", dict, {})
    fields.drop("rope_scaling")
    fields.put("rope_parameters", {_WINDOW: rope})
    factor = fields.require("qk_scale_factor", float)
    for name, value in (("q", factor), ("k", 1.0)):
        weights = np.full(number(found, "attention.key_length"), value, np.float32)
        found |= {f"blk.{layer}.attn_{name}_norm.weight": weights for layer in range(layers)}


def chameleon_pictures(fields: Fields, found: Found) -> None:
    """Chameleon's tokens of pictures, which are never chosen, must be those of the published
    models."""
    names = fields.given("vocabulary_map", dict, {})
    pictures = [token for name, token in names.items() if str(name).startswith("IMGIMG")]
    known = all(type(token) is int for token in pictures)
    if names and not (known and sorted(pictures) == list(range(4, 8196))):
        raise fields.refused("vocabulary_map", "names IMGIMG... of 4 to 8195 are supported")


def has_windows(fields: Fields, found: Found) -> None:
    """Whether some layers have sliding windows, whatever the number of layers."""
    found["own.has_windows"] = fields.has("sliding_window")


def default_width(fields: Fields, found: Found) -> None:
    """An FFN four times as wide as the hidden size, unless a width is given."""
    found.setdefault("feed_forward_length", 4 * number(found, "embedding_length"))


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


def other_layers(fields: Fields, others: list[bool]) -> Fields | None:
    """The fields of ``per_layer_config``, by which all those layers differ from the rest that
    ``others`` says, each in the same way; None if absent."""
    given = fields.given("per_layer_config", dict, {})
    if not given:
        return None
    objects = list(given.values())
    numbers = {str(layer) for layer, other in enumerate(others) if other}
    written = {str(name).lstrip("0") or "0" for name in given}  # "05" beside "11"
    if written != numbers or any(of != objects[0] for of in objects):
        raise fields.refused("per_layer_config", "equal layers of one kind are supported")
    if not isinstance(objects[0], dict):
        raise fields.wrong("per_layer_config", objects[0])
    return Fields(objects[0], fields.path)


def gemma3n_layers(fields: Fields, found: Found) -> None:
    """Gemma 3n's layers with keys and values of their own, and those with sparse gates, which must
    be as many as in the published models, as GGUF has them."""
    layers, shared = layers_of(fields, found), "num_kv_shared_layers"
    fields.fix(shared, (max(layers - 20, 0),))
    found["own.tokens"] = tokens = fields.size("vocab_size")
    TOKENS.check(tokens, f"{fields.path}: 'vocab_size'", ConfigError)
    gates = fields.items("activation_sparsity_pattern", float)
    usual = [0.95 if layer < 10 else 0.0 for layer in range(layers)]
    if (gates or (usual if layers > 10 else None)) != usual:
        raise fields.refused("activation_sparsity_pattern", "0.95 in 10 layers is supported")


def gemma4_layers(fields: Fields, found: Found) -> None:
    """Gemma 4's sizes by layer: full-attention layers have wider heads and their own number of
    them, and layers that reuse keys and values may have a wider FFN."""
    layers, kinds = layers_of(fields, found), layer_kinds(fields, found, FULL, "sliding_attention")
    if kinds is None:
        raise fields.wrong("layer_types", kinds)
    dim = fields.size("head_dim", 256)
    heads = number(found, "attention.head_count_kv")
    if (own := other_layers(fields, [kind == FULL for kind in kinds])) is not None:
        wide = own.size("head_dim", dim)
        full = own.size("num_key_value_heads", heads)
        HEADS.check(full, f"{fields.path}: 'per_layer_config'", ConfigError)
        own.finish()
    else:
        wide = fields.size("global_head_dim", dim)
        full = _full_heads(fields, heads)
    for kind in ("key", "value"):
        found[f"attention.{kind}_length"] = wide
        found[f"attention.{kind}_length_swa"] = dim
    fields.take("attention_k_eq_v", bool)
    counts = [full if kind == FULL else heads for kind in kinds]
    found["attention.head_count_kv"] = np.array(counts, np.int32)
    width = number(found, "feed_forward_length")
    shared = layers - number(found, "attention.shared_kv_layers")
    twice = fields.given("use_double_wide_mlp", bool, False)
    widths = [2 * width if twice and layer >= shared else width for layer in range(layers)]
    found["feed_forward_length"] = np.array(widths, np.int32)


def _full_heads(fields: Fields, heads: int) -> int:
    """KV heads of full-attention layers: a number of their own if keys are values."""
    full = fields.take("num_global_key_value_heads", int)
    if full is not None and not 0 < full <= HEADS.most:
        raise fields.wrong("num_global_key_value_heads", full)
    same = fields.given("attention_k_eq_v", bool, False)
    return heads if full is None or not same else full
