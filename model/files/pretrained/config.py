"""config.json read by a family's table. Every field is understood, without effect, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from urdir.model.errors import UnsupportedError
from urdir.model.files.metadata import Value
from urdir.model.files.pretrained.family import (
    FIXED,
    IGNORED,
    IGNORED_PREFIXES,
    KEYS,
    Family,
    Found,
)
from urdir.model.files.pretrained.fields import Fields, shown
from urdir.model.files.pretrained.rope import read_rope
from urdir.model.files.pretrained.tables import FAMILIES

_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act")
_WINDOW_FIELDS = ("sliding_window", "sliding_window_size", "use_sliding_window")
_WINDOW_PATTERNS = ("sliding_window_pattern", "_sliding_window_pattern", "layer_types")


@dataclass(frozen=True, slots=True)
class Configuration:
    """What config.json says: the keys that the family reads (RoPE's divisors under the names of
    tensors), and the fields that do not matter."""

    family: Family
    keys: Mapping[str, Value]
    tied: bool | None  # None: not said
    ignored: tuple[str, ...]


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of the text decoder: of a multi-modal model those of its "text_config"."""
    inner = config.get("text_config")
    if not isinstance(inner, dict):
        return config
    outer = ("quantization_config", "tie_word_embeddings", "eos_token_id", "bos_token_id")
    # the output matrix is the outer model's
    inner = {name: value for name, value in inner.items() if name != "tie_word_embeddings"}
    return {name: config[name] for name in outer if name in config} | inner


def family_of(config: Mapping[str, Any], path: Path) -> Family:
    """The family of a text decoder; UnsupportedError if unknown."""
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise UnsupportedError(
            f"{path}: model_type {shown(name)!r} is not supported (supported: "
            f"{', '.join(FAMILIES)})"
        )
    return FAMILIES[name]


def read_config(config: Mapping[str, Any], family: Family, path: Path) -> Configuration:
    """Read the fields of a text decoder. Raises ConfigError or UnsupportedError, naming the
    field."""
    fields = Fields({**family.defaults, **config}, path)
    found: Found = dict(family.implied)
    for name, key in {**KEYS, **family.keys}.items():
        if not fields.has(name):
            continue
        if not key:
            fields.ignore((name,))
            continue
        value = fields.take_number(name)
        if value is not None:
            _set(fields, found, name, key, value)
    layers = fields_size(fields, found, "block_count")
    head_dim = _head_dim(fields, found)
    for step in family.steps:
        step(fields, found)
    _windows(fields, found, family, layers)
    read_rope(fields, found, family, head_dim)
    for name in _ACTIVATIONS:
        fields.fix(name, family.activations)
    tied = fields.take("tie_word_embeddings", bool)
    for name, values in {**FIXED, **family.fixed}.items():
        fields.fix(name, values)
    fields.ignore(IGNORED | family.ignored, IGNORED_PREFIXES)
    fields.finish()
    return Configuration(family, found, tied, tuple(fields.ignored))


def _set(fields: Fields, found: Found, name: str, key: str, value: int | float) -> None:
    """Set a key; fields of the same meaning must agree."""
    if key in found and found[key] != value:
        raise fields.wrong(name, f"{value}, another field says {shown(found[key])}")
    found[key] = value


def fields_size(fields: Fields, found: Found, key: str) -> int:
    """A size among the keys; ConfigError unless it is a positive integer."""
    value = found.get(key)
    if type(value) is not int or not 0 < value < 1 << 20:
        raise fields.wrong(key, value)
    return value


def _head_dim(fields: Fields, found: Found) -> int:
    """The dimension of a head, which RoPE is a share of; 0 without heads."""
    given = fields.take("head_dim", int) or fields.take("attention_head_dim", int)
    fields.take("attention_head_dim", int)
    for kind in ("key", "value"):
        if given is not None:
            found.setdefault(f"attention.{kind}_length", given)
    if "attention.key_length" in found:
        return fields_size(fields, found, "attention.key_length")
    heads = found.get("attention.head_count", 0)
    if type(heads) is not int or heads <= 0:
        return 0
    return fields_size(fields, found, "embedding_length") // heads


def _windows(fields: Fields, found: Found, family: Family, layers: int) -> None:
    """Sliding windows: ``layer_types``, a period, or every layer."""
    for name in _WINDOW_FIELDS[1:2]:
        fields.take(name, int)
    window = fields.take("sliding_window", int)
    used = fields.given("use_sliding_window", bool, True)
    first = fields.take("max_window_layers", int)
    kinds, pattern = fields.take("layer_types", list), fields.take_pattern(layers)
    if "own.windows" in found or "attention.recurrent_layers" in found:
        return
    if not window or window < 0 or not used:
        return
    if kinds is not None and len(kinds) != layers:
        raise fields.wrong("layer_types", f"{len(kinds)} kinds for {layers} layers")
    if kinds is not None:
        if not set(map(str, kinds)) <= {"sliding_attention", "full_attention"}:
            raise fields.refused("layer_types", "sliding and full attention are supported")
        flags = [kind == "sliding_attention" for kind in kinds]
    elif pattern is not None:
        flags = pattern
    elif family.windows == "pattern":
        found["attention.sliding_window"] = window
        return
    else:
        flags = [index >= (first or 0) for index in range(layers)]
    if not any(flags):
        return
    if family.windows == "none":
        raise fields.refused("sliding_window", "this family has no windows")
    if family.windows == "pattern":
        found["attention.sliding_window"] = window
        found["attention.sliding_window_pattern"] = np.array(flags)
    else:
        found["own.windows"] = np.array([window if flag else 0 for flag in flags], np.int32)
