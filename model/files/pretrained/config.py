"""config.json converted to GGUF metadata. Every field is understood, irrelevant, or refused.

Source: `TextModel.set_gguf_parameters` of llama.cpp's converter and its model classes; fields have
transformers' meaning.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from urdir.model.errors import ConfigError, UnsupportedError
from urdir.model.files import limits
from urdir.model.files.limits import Limit
from urdir.model.files.metadata import Value
from urdir.model.files.pretrained.families import FAMILIES, Family

_T = TypeVar("_T")

#: Fields of all families that do not affect answers, or are read elsewhere.
_IGNORED = frozenset(
    {
        "architectures", "model_type", "auto_map", "dtype", "torch_dtype",
        "transformers_version", "use_cache", "initializer_range", "attention_dropout",
        "hidden_dropout", "residual_dropout", "embedding_dropout", "resid_pdrop",
        "embd_pdrop", "classifier_dropout", "bos_token_id", "eos_token_id", "pad_token_id",
        "cache_implementation", "output_attentions", "output_hidden_states", "return_dict",
        "id2label", "label2id", "problem_type", "torchscript", "use_bfloat16",
        "task_specific_params", "finetuning_task", "name_or_path",
        "chunk_size_feed_forward", "tokenizer_class", "prefix",
    }
)  # fmt: skip
_IGNORED_PREFIXES = ("_", "unsloth_")
#: Fields of all families, with the only supported values.
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "is_decoder": (True, False),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({},),
}


class Fields:
    """The fields of config.json, each taken once; null counts as absent."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self.path = path
        self._rest = {key: value for key, value in values.items() if value is not None}

    def take(self, name: str, kind: type[_T]) -> _T | None:
        """The value of a field, or None; ConfigError for another type."""
        value = self._rest.pop(name, None)
        if type(value) is int and abs(value) >= 1 << 63:
            raise self.wrong(name, "an absurd number")
        if kind is float and type(value) is int:
            value = float(value)
        if value is not None and (
            not isinstance(value, kind)
            or (isinstance(value, bool) and kind is not bool)
            or (isinstance(value, float) and not math.isfinite(value))
        ):
            raise self.wrong(name, value)
        return value

    def take_number(self, name: str) -> int | float | None:
        """The value of a numeric field, unconverted."""
        value = self._rest.get(name)
        return self.take(name, int if type(value) is int else float)

    def require(self, name: str, kind: type[_T]) -> _T:
        """The value of a required field."""
        value = self.take(name, kind)
        if value is None:
            raise ConfigError(f"{self.path}: '{name}' is missing")
        return value

    def wrong(self, name: str, value: object) -> ConfigError:
        """The error for an invalid value."""
        return ConfigError(f"{self.path}: '{name}' is {_shown(value)}")

    def fix(self, name: str, values: tuple[Any, ...]) -> None:
        """Raise UnsupportedError unless a field has one of ``values``."""
        value = self._rest.pop(name, None)
        if value is not None and not any(type(v) is type(value) and v == value for v in values):
            wanted = " or ".join(repr(v) for v in values)
            raise UnsupportedError(
                f"{self.path}: '{name}' is {str(value)[:60]!r}; {wanted} is supported"
            )

    def ignore(self, names: frozenset[str]) -> None:
        """Drop fields."""
        self._rest = {key: value for key, value in self._rest.items() if key not in names}

    def finish(self) -> None:
        """Raise UnsupportedError if a field was never taken."""
        for name in self._rest:
            if not name.startswith(_IGNORED_PREFIXES):
                value = _shown(self._rest[name])
                raise UnsupportedError(f"{self.path}: unknown field '{_shown(name)}' ({value})")


def _shown(value: object) -> str:
    """A value for a message, printable."""
    text = str(value)[:60]
    return text if text.isprintable() else ascii(text)


def family_of(config: Mapping[str, Any], path: Path) -> Family:
    """The family of a model; UnsupportedError if unknown."""
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise UnsupportedError(
            f"{path}: model_type {str(name)[:60]!r} is not supported (supported: "
            f"{', '.join(FAMILIES)})"
        )
    return FAMILIES[name]


def read_metadata(config: Mapping[str, Any], family: Family, path: Path) -> dict[str, Value]:
    """The metadata of a GGUF file of the same model, except the tokeniser's.

    RoPE factors are included as arrays, under the names of their tensors. Raises ConfigError or
    UnsupportedError, naming the field.
    """
    fields = Fields(config, path)
    found: dict[str, Value] = {}
    if (method := config.get("quantization_config")) is not None:
        method = method.get("quant_method") if isinstance(method, dict) else method
        raise UnsupportedError(f"{path}: quantization_config: {_shown(method)} is not supported")
    head_dim = _check_layers(fields, config, family)
    found |= _rope(fields, config, family, head_dim)
    for name, keys in family.keys.items():
        value = fields.take_number(name)
        if value is not None:
            found |= dict.fromkeys(keys, value)
    _window(fields, family, found)
    for name, values in {**_FIXED, **family.fixed}.items():
        fields.fix(name, values)
    fields.ignore(_IGNORED | family.ignored | {"vocab_size", "tie_word_embeddings"})
    fields.finish()
    return {
        key if key.startswith("rope_") else f"{family.architecture}.{key}": value
        for key, value in found.items()
    }


def _check_layers(fields: Fields, config: Mapping[str, Any], family: Family) -> int:
    """Check per-layer fields against GGUF's architecture; the head dimension."""
    layers, heads, hidden = (
        _size(fields, name, config.get(name), limit)
        for name, limit in (
            ("num_hidden_layers", limits.LAYERS),
            ("num_attention_heads", limits.HEADS),
            ("hidden_size", limits.WIDTH),
        )
    )
    head_dim = config.get("head_dim")
    head_dim = hidden // heads if head_dim is None else head_dim
    head_dim = _size(fields, "head_dim", head_dim, limits.HEAD_WIDTH)
    if (kinds := fields.take("layer_types", list)) is not None:
        windows = [not _is_full(i, family.full_every) for i in range(min(layers, len(kinds)))]
        expected = ["sliding_attention" if window else "full_attention" for window in windows]
        if len(kinds) != layers or kinds != expected:
            raise UnsupportedError(
                f"{fields.path}: 'layer_types' differs from that of '{family.architecture}'"
            )
    rotated = fields.take("no_rope_layers", list)
    if rotated is not None and (
        family.architecture != "smollm3"
        or len(rotated) != layers
        or rotated != [int((i + 1) % 4 != 0) for i in range(len(rotated))]
    ):
        raise UnsupportedError(
            f"{fields.path}: 'no_rope_layers' differs from that of '{family.architecture}'"
        )
    if family.sqrt_head_scale:
        _check_scale(fields, family, layers, hidden // heads, head_dim)
    return head_dim


def _size(fields: Fields, name: str, value: object, limit: Limit) -> int:
    """A size that is used before tensors are compared with it."""
    if type(value) is not int or value <= 0:
        raise fields.wrong(name, value)
    limit.check(value, f"{fields.path}: '{name}'", ConfigError)
    return value


def _is_full(layer: int, full_every: int) -> bool:
    return not full_every or (layer + 1) % full_every == 0


def _check_scale(
    fields: Fields, family: Family, layers: int, hidden_share: int, head_dim: int
) -> None:
    """Gemma: GGUF has no key for the scale of scores; llama.cpp recognises the 27B models by their
    layer count (`src/models/gemma2.cpp`, `gemma3.cpp`).
    """
    largest = {"gemma2": 46, "gemma3": 62}[family.architecture]
    expected = hidden_share if layers == largest else head_dim
    given = fields.take("query_pre_attn_scalar", float)
    if given is not None and given != expected:
        raise UnsupportedError(
            f"{fields.path}: 'query_pre_attn_scalar' is {given:g}; '{family.architecture}' has "
            f"{expected}"
        )


def _window(fields: Fields, family: Family, found: dict[str, Value]) -> None:
    """A window in all layers: it has no effect on contexts up to its size."""
    if not family.window_limits_context:
        return
    window, context = fields.take("sliding_window", int), found.get("context_length")
    if window is not None and isinstance(context, int):
        found["context_length"] = min(window, context)


# Kinds of RoPE scaling, with their parameters: those that become keys, and others.
_YARN = {
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "attention_factor": "rope.scaling.yarn_attn_factor",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}


def _rope(
    fields: Fields, config: Mapping[str, Any], family: Family, head_dim: int
) -> dict[str, Value]:
    rope = fields.take("rope_parameters", dict) or {}
    rope = rope | (fields.take("rope_scaling", dict) or {})
    local = fields.take("rope_local_base_freq", float)
    if "full_attention" in rope or "sliding_attention" in rope:
        # windowed layers have their own base
        by_kind = Fields(rope, fields.path)
        rope = by_kind.take("full_attention", dict) or {}
        windows = Fields(by_kind.take("sliding_attention", dict) or {}, fields.path)
        windows.fix("rope_type", ("default",))
        local = windows.take("rope_theta", float) or local
        windows.finish()
        by_kind.finish()
    inner = Fields(rope, fields.path)
    original = fields.take("original_max_position_embeddings", int)
    theta = inner.take("rope_theta", float) or fields.take("rope_theta", float)
    fields.ignore(frozenset({"rope_theta"}))
    outer_share = fields.take("partial_rotary_factor", float)
    share = inner.take("partial_rotary_factor", float) or outer_share
    old_kind = inner.take("type", str)
    kind = inner.take("rope_type", str) or old_kind or "default"
    found: dict[str, Value] = {}
    if theta is not None:
        found["rope.freq_base"] = theta
    if local is not None:
        found["rope.freq_base_swa"] = local
    if share is not None and not 0 < share <= 1:
        raise inner.wrong("partial_rotary_factor", share)
    if share is not None or family.architecture == "llama":
        found["rope.dimension_count"] = int((1.0 if share is None else share) * head_dim)
    found |= _scaling(kind, inner, config, head_dim, theta or 10000.0, original)
    inner.finish()
    return found


def _scaling(
    kind: str,
    rope: Fields,
    config: Mapping[str, Any],
    head_dim: int,
    theta: float,
    original: int | None,
) -> dict[str, Value]:
    if kind == "default":
        return {}
    if kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": rope.require("factor", float)}
    if kind == "llama3":
        return {"rope_freqs.weight": _llama3_factors(rope, head_dim, theta)}
    if kind == "yarn":
        found: dict[str, Value] = {"rope.scaling.type": "yarn"}
        for name, key in _YARN.items():
            value = rope.take(name, int if name.startswith("original") else float)
            if value is not None:
                found[key] = value
        if "rope.scaling.factor" not in found:
            raise ConfigError(f"{rope.path}: 'factor' of YaRN is missing")
        context = original or config.get("max_position_embeddings")
        if type(context) is int:
            found.setdefault("rope.scaling.original_context_length", context)
        return found
    if kind in ("longrope", "su"):
        return _longrope(rope, config, original)
    raise UnsupportedError(f"{rope.path}: RoPE scaling '{_shown(kind)}' is not supported")


def _llama3_factors(rope: Fields, head_dim: int, theta: float) -> Value:
    """The divisor of each frequency (transformers, `_compute_llama3_parameters`)."""
    factor, low, high = (
        rope.require(name, float) for name in ("factor", "low_freq_factor", "high_freq_factor")
    )
    context = rope.require("original_max_position_embeddings", int)
    if not (factor > 0 and 0 < low < high and context > 0 and theta > 0):
        raise rope.wrong("rope_parameters", f"no scaling: {factor}, {low}, {high}, {context}")
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((context / wavelengths - low) / (high - low), 0, 1)
    factors: Value = (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)
    return factors


def _longrope(rope: Fields, config: Mapping[str, Any], original: int | None) -> dict[str, Value]:
    """Phi3's two sets of factors (`conversion/phi.py`)."""
    context = config.get("max_position_embeddings")
    original = rope.take("original_max_position_embeddings", int) or original
    if type(context) is not int or not 0 < context < 1 << 63:
        raise rope.wrong("max_position_embeddings", context)
    if original is None or original < 2:
        raise rope.wrong("original_max_position_embeddings", original)
    ratio = context / original
    rope.take("factor", float)  # redundant: the ratio of contexts
    given = rope.take("attention_factor", float)
    factor = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 else 1.0
    found: dict[str, Value] = {
        "rope.scaling.type": "longrope",
        "rope.scaling.original_context_length": original,
        "rope.scaling.attn_factor": factor if given is None else given,
    }
    for name, tensor in (
        ("long_factor", "rope_factors_long"),
        ("short_factor", "rope_factors_short"),
    ):
        values = rope.require(name, list)
        if not all(type(value) in (int, float) for value in values):
            raise rope.wrong(name, values)
        found[f"{tensor}.weight"] = np.array(values, np.float32)
    return found
