"""Fields of single model types that are no rename."""

from __future__ import annotations

import math

import numpy as np

from urdir.model.errors import ConfigError
from urdir.model.files.limits import TOKENS
from urdir.model.files.pretrained.family import Found
from urdir.model.files.pretrained.fields import Fields
from urdir.model.files.pretrained.steps.common import FULL, layer_kinds, layers_of, number
from urdir.model.files.pretrained.steps.recurrent import set_heads

_WINDOW = "sliding_attention"
#: Rows of Llama 3.2 Vision's embedding beyond the tokens that it chooses from.
_MORE_ROWS = 8
#: Values of a table of positions that is made: published ones have 8 million.
_MOST_WAVES = 1 << 25


def mllama_layers(fields: Fields, found: Found) -> None:
    """Llama 3.2 Vision's layers that attend to pictures, which its class skips without one, and
    the tokens that are never chosen."""
    layers = layers_of(fields, found)
    given = fields.items("cross_attention_layers", int)
    skipped = range(3, layers, 5) if given is None else given
    if len({*skipped}) != len(skipped) or not {*skipped} < {*range(layers)}:
        raise fields.wrong("cross_attention_layers", given)
    found["own.skipped_layers"] = np.array(sorted(skipped), np.int32)
    found["block_count"] = layers - len(skipped)
    tokens = fields.size("vocab_size")
    TOKENS.check(tokens + _MORE_ROWS, f"{fields.path}: 'vocab_size'", ConfigError)
    found["own.tokens"] = tokens + _MORE_ROWS
    found["own.first_hidden_token"] = tokens


def gpt_neo_layers(fields: Fields, found: Found) -> None:
    """GPT-Neo's layers with windows: lists of kinds, each with how often it repeats; older
    configurations have the kinds of all layers beside them."""
    layers, kinds = layers_of(fields, found), []
    given = fields.given("attention_types", list, [[["global", "local"], layers // 2]])
    for item in given:
        pair = item if isinstance(item, list) else []
        names, times = pair if len(pair) == 2 else (None, None)
        if not isinstance(names, list) or type(times) is not int or not 0 < times <= layers:
            raise fields.wrong("attention_types", given)
        kinds += (names * times)[: layers + 1] if len(names) <= layers else names
    if len(kinds) != layers:
        raise fields.wrong("attention_types", f"{len(kinds)} kinds for {layers} layers")
    if (written := fields.items("attention_layers", str)) not in (None, kinds):
        raise fields.wrong("attention_layers", f"{written}, 'attention_types' {kinds}")
    if not all(kind in ("global", "local") for kind in kinds):
        raise fields.refused("attention_types", "global and local are supported")
    fields.put("layer_types", [_WINDOW if kind == "local" else FULL for kind in kinds])
    fields.put("sliding_window", fields.size("window_size", 256))


def compass_rope(fields: Fields, found: Found) -> None:
    """RoPE of Cohere Compass by the kind of a layer; null for those without."""
    layers = layers_of(fields, found)
    kinds = layer_kinds(fields, found, FULL, _WINDOW) or [FULL] * layers
    fields.put("layer_types", kinds)
    needs_window(fields, found)
    given = fields.given("rope_parameters", dict, {})
    if not given.keys() >= {*kinds}:
        raise fields.refused("rope_parameters", "a rotation for each kind of layer is supported")
    ropes = [given[kind] for kind in sorted({*kinds}) if given[kind] is not None]
    if not ropes or any(rope != ropes[0] for rope in ropes) or not isinstance(ropes[0], dict):
        raise fields.refused("rope_parameters", "one rotation for all is supported")
    found["own.rotates"] = np.array([given[kind] is not None for kind in kinds])
    fields.put("rope_parameters", ropes[0])


def scaled_embedding(fields: Fields, found: Found) -> None:
    """Whether embeddings are multiplied by the root of their size."""
    if fields.given("scale_embedding", bool, False):
        found["own.embedding_scale"] = math.sqrt(number(found, "embedding_length"))


def waves(fields: Fields, found: Found) -> None:
    """Positions of XGLM, sines and cosines that no tensor has, from the third one on (arXiv
    1706.03762, 3.5)."""
    hidden, positions = number(found, "embedding_length"), number(found, "context_length")
    if hidden < 4 or hidden % 2 or not 0 < positions * hidden <= _MOST_WAVES:
        raise fields.wrong("max_position_embeddings", f"{positions}, with {hidden} values each")
    periods = 10000.0 ** (np.arange(hidden // 2) / (hidden // 2 - 1))
    angles = np.arange(2, positions + 2)[:, None] / periods
    found["position_embd.weight"] = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)


def lfm3_layers(fields: Fields, found: Found) -> None:
    """LFM3's layers: convolutions, and attention to a window or to everything."""
    layers = layers_of(fields, found)
    usual = [FULL if i % 4 == 2 else _WINDOW if i % 4 == 0 and i else "conv" for i in range(layers)]
    kinds = layer_kinds(fields, found, "conv", FULL, _WINDOW) or usual
    fields.put("layer_types", kinds)
    needs_window(fields, found)
    set_heads(fields, found, [kind != "conv" for kind in kinds])
    fields.put("layer_types", [kind if kind == _WINDOW else FULL for kind in kinds])


def needs_window(fields: Fields, found: Found) -> None:
    """Layers with a window must have a size of it."""
    kinds = fields.peek("layer_types")
    if isinstance(kinds, list) and _WINDOW in kinds and fields.peek("sliding_window") is None:
        raise fields.wrong("sliding_window", None)


def all_dense(fields: Fields, found: Found) -> None:
    """No layer has experts."""
    found["leading_dense_block_count"] = number(found, "block_count")


def first_dense(fields: Fields, found: Found) -> None:
    """Layers without experts by number, which must be the first ones."""
    dense = fields.items("mlp_only_layers", int) or []
    if dense != [*range(len(dense))] or len(dense) > layers_of(fields, found):
        raise fields.refused("mlp_only_layers", "the first layers are supported")
    found["leading_dense_block_count"] = len(dense)


def aria_experts(fields: Fields, found: Found) -> None:
    """The width of Aria's experts, which published configurations give by another name, too."""
    width = found.pop("expert_feed_forward_length", None) or number(found, "feed_forward_length")
    count = fields.size("moe_num_shared_experts", 2)
    found["feed_forward_length"] = width
    found["expert_shared_feed_forward_length"] = count * number(found, "feed_forward_length")
