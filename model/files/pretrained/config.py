"""config.json read by a family's table. Every field is understood, without effect, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np

from urdir.model.errors import ConfigError, UnsupportedError
from urdir.model.files import limits
from urdir.model.files.limits import Limit
from urdir.model.files.metadata import Value
from urdir.model.files.pretrained.family import (
    FIXED,
    IGNORED,
    IGNORED_OUTSIDE,
    IGNORED_PREFIXES,
    KEYS,
    READ_ELSEWHERE,
    Family,
    Found,
)
from urdir.model.files.pretrained.fields import Fields, shown
from urdir.model.files.pretrained.rope import read_rope
from urdir.model.files.pretrained.steps.encoders import ENCODING, RANKING
from urdir.model.files.pretrained.tables import FAMILIES
from urdir.model.files.pretrained.tables.text_defaults import SET_BY_WHOLE, TEXT_DEFAULTS

#: Sizes that are checked before anything is computed with them.
_LIMITS: Mapping[str, Limit] = {
    "block_count": limits.LAYERS,
    "embedding_length": limits.WIDTH,
    "attention.head_count": limits.HEADS,
    "attention.key_length": limits.HEAD_WIDTH,
}
_MOST: Mapping[str, Limit] = {
    "feed_forward_length": limits.WIDTH,
    "attention.head_count_kv": limits.HEADS,
    "attention.shared_kv_layers": limits.LAYERS,
    "expert_count": limits.EXPERTS,
}
#: Objects that repeat the fields of every configuration.
_INNER = ("attn_config", "ffn_config")
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act")


@dataclass(frozen=True, slots=True)
class Configuration:
    """What config.json says: the keys that the family reads (RoPE's divisors under the names of
    tensors), and the fields that do not matter."""

    family: Family
    keys: Mapping[str, Value]
    tied: bool | None  # None: not said
    ignored: tuple[str, ...]


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of the text decoder: of a multi-modal model those of its "text_config"
    ("llm_config": InternVL, as it is published), with those that its class has where they are left
    out."""
    if isinstance(thinker := config.get("thinker_config"), dict):  # of models that speak, too
        config = {**config, **thinker}
    inner = config.get("text_config", config.get("llm_config"))
    if not isinstance(inner, dict):
        return config
    outer = ("quantization_config", "tie_word_embeddings", "eos_token_id", "bos_token_id")
    # the output matrix is the outer model's
    inner = {name: value for name, value in inner.items() if name != "tie_word_embeddings"}
    said = {KEYS.get(name, name) for name in inner}  # by any name of a size
    usual = TEXT_DEFAULTS.get(str(inner.get("model_type")), {})
    defaults = {name: of for name, of in usual.items() if KEYS.get(name, name) not in said}
    fixed = SET_BY_WHOLE.get(str(config.get("model_type")), {})
    absent = {name: value for name, value in fixed.items() if inner.get(name) is None}
    given = {name: config[name] for name in outer if name in config}
    return given | defaults | inner | absent


def family_of(config: Mapping[str, Any], path: Path) -> Family:
    """The family of a text decoder; UnsupportedError if unknown."""
    name = config.get("model_type")
    if name is None:
        raise UnsupportedError(f"{path}: it has no model_type, which says what the model is")
    if not isinstance(name, str) or name not in FAMILIES:
        near = ", ".join(get_close_matches(str(name)[:60], FAMILIES, 3))
        hint = f"; near it: {near}" if near else ""
        raise UnsupportedError(
            f"{path}: model_type {shown(name)!r} is not supported ({len(FAMILIES)} are, "
            f"see model/MODELS.md{hint})"
        )
    family = FAMILIES[name]
    if family.without_experts is not None and not config.get("num_local_experts"):
        return family.without_experts
    if family.bidirectional is not None and config.get("use_bidirectional_attention") is True:
        return family.bidirectional
    if family.ranking is not None and is_class(config, RANKING):
        return family.ranking
    if family.encoding is not None and is_class(config, ENCODING):
        return family.encoding
    return family


def is_class(config: Mapping[str, Any], end: str) -> bool:
    """Whether the name of the class ends so."""
    classes = config.get("architectures")
    named = classes[0] if isinstance(classes, list) and classes else ""
    return isinstance(named, str) and named.endswith(end)


def read_config(config: Mapping[str, Any], family: Family, path: Path) -> Configuration:
    """Read the fields of a text decoder. Raises ConfigError or UnsupportedError, naming the
    field."""
    fields = Fields({**family.defaults, **config}, path)
    found = _renamed(fields, family)
    layers = _size(fields, found, "block_count", "num_hidden_layers")
    _size(fields, found, "embedding_length", "hidden_size")
    head_dim = _head_dim(fields, found, family)
    for step in family.steps:
        step(fields, found)
    if "attention.key_length" in found:
        head_dim = _size(fields, found, "attention.key_length", "head_dim")
    _windows(fields, found, family, layers)
    read_rope(fields, found, family, head_dim)
    for name in set(_ACTIVATIONS) - family.ignored:
        fields.fix(name, family.activations)
        if "gelu" in family.activations and fields.given(name, str, "") == "gelu":
            found["own.exact_gelu"] = True
    tied = fields.take("tie_word_embeddings", bool)
    inner = {f"{of}.{name}": FIXED[name] for of in _INNER for name in FIXED}
    for name, values in {**FIXED, **inner, **family.fixed}.items():
        fields.fix(name, values)
    fields.leave(READ_ELSEWHERE)
    fields.ignore(IGNORED | family.ignored, IGNORED_PREFIXES)
    fields.ignore_outside(IGNORED_OUTSIDE)
    fields.finish()
    return Configuration(family, found, tied, tuple(fields.ignored))


def _renamed(fields: Fields, family: Family) -> Found:
    """The keys that fields are under another name, and those that the class implies."""
    found: Found = {}
    for name, key in {**KEYS, **family.keys}.items():
        if not key:
            fields.ignore((name,))
        elif fields.has(name) and (value := fields.take_number(name)) is not None:
            _set(fields, found, name, key, value)
    if "block_count" not in found and (kinds := fields.items("layers_block_type", str)):
        found["block_count"] = len(kinds)
    return {**family.implied, **found}


def _set(fields: Fields, found: Found, name: str, key: str, value: int | float) -> None:
    """Set a key; fields of the same meaning must agree."""
    if key in found and found[key] != value:
        raise fields.wrong(name, f"{value}, another field says {shown(found[key])}")
    if (limit := _LIMITS.get(key)) is not None:
        _check_size(fields, name, value, limit)
    elif key in _MOST and not 0 <= value <= _MOST[key].most:
        raise fields.wrong(name, value)
    found[key] = value


def _check_size(fields: Fields, name: str, value: object, limit: Limit) -> None:
    """Raise ConfigError unless a size is a positive integer within its limit."""
    if type(value) is not int or value <= 0:
        raise fields.wrong(name, value)
    limit.check(value, f"{fields.path}: '{name}'", ConfigError)


def _size(fields: Fields, found: Found, key: str, name: str) -> int:
    """A required size, which a field named ``name`` or alike has set."""
    value = found.get(key)
    _check_size(fields, name, value, _LIMITS[key])
    assert isinstance(value, int)
    return value


def _head_dim(fields: Fields, found: Found, family: Family) -> int:
    """The dimension of a head, which RoPE is a share of; 0 without heads."""
    names = [n for n in ("head_dim", "attention_head_dim") if n not in family.keys]
    dims = [dim for dim in (fields.take(name, int) for name in names) if dim is not None]
    given = dims[0] if dims else None
    for kind in ("key", "value"):
        if given is not None:
            found.setdefault(f"attention.{kind}_length", given)
    if "attention.key_length" in found:
        return _size(fields, found, "attention.key_length", "head_dim")
    if "attention.head_count" not in found:
        return 0
    heads = _size(fields, found, "attention.head_count", "num_attention_heads")
    return _size(fields, found, "embedding_length", "hidden_size") // heads


def _windows(fields: Fields, found: Found, family: Family, layers: int) -> None:
    """The sliding window of each layer, or of none."""
    window, size = (fields.take(f"sliding_window{end}", int) for end in ("", "_size"))
    if window is not None and size is not None and size != window:
        raise fields.wrong("sliding_window_size", f"{size}, 'sliding_window' is {window}")
    window = window or size or 0
    if window >= 1 << 31:
        raise fields.wrong("sliding_window", window)
    used = fields.given("use_sliding_window", bool, family.defaults.get("use_sliding_window", True))
    flags = _windowed_layers(fields, layers)
    if "attention.recurrent_layers" in found or window <= 0 or not used:
        return
    if flags is None and family.windows == "pattern":
        found["attention.sliding_window"] = window
        return
    flags = [True] * layers if flags is None else flags
    if not any(flags):
        return
    if family.windows == "none":
        raise fields.refused("sliding_window", "this family has no windows")
    if family.windows == "pattern":
        found["attention.sliding_window"] = window
        found["attention.sliding_window_pattern"] = np.array(flags)
    else:
        found["own.windows"] = np.array([window if flag else 0 for flag in flags], np.int32)


def _windowed_layers(fields: Fields, layers: int) -> list[bool] | None:
    """Which layers have a window: by ``layer_types``, a period, or the first such layer."""
    first = fields.take("max_window_layers", int)
    pattern = fields.take_pattern(layers)
    own_kinds = not fields.is_untaken("layer_types")  # that a step of the family knows
    kinds = fields.items("layer_types", str)
    if kinds is None:
        if pattern is None and first is not None:
            return [layer >= first for layer in range(layers)]
        return pattern
    if len(kinds) != layers:
        raise fields.wrong("layer_types", f"{len(kinds)} kinds for {layers} layers")
    if not own_kinds and set(kinds) - {"sliding_attention", "full_attention"}:
        raise fields.refused("layer_types", "sliding_attention and full_attention are supported")
    return [kind == "sliding_attention" for kind in kinds]
