"""LoRA adapters as peft writes them: adapter_config.json and adapter_model.safetensors.

Modules have the names of the transformers class; `find_places` says which tensors of the
description they are, as for the model's own folder. B has the rows of these: rows in another order,
or some of a fused matrix.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from urdir.model.errors import ConfigError, SafetensorsError, UnsupportedError
from urdir.model.files.low_rank import Adapter, Floats, LowRank, low_rank
from urdir.model.files.model_file import ModelFile
from urdir.model.files.pretrained.config import family_of, read_config, text_config
from urdir.model.files.pretrained.family import Family
from urdir.model.files.pretrained.fields import shown
from urdir.model.files.pretrained.places import Place, find_places, stored_layers
from urdir.model.files.pretrained.rows import GGML_TYPES, Rows
from urdir.model.files.pretrained.tables import FAMILIES
from urdir.model.files.pretrained.tokens import read_json
from urdir.model.files.safetensors import StoredTensor, read_folder, read_safetensors

CONFIG = "adapter_config.json"
_FILE = "adapter_model.safetensors"
#: Characters, and repetitions, of a pattern of modules at most.
_MOST_PATTERN, _MOST_REPEATS = 200, 3
#: base_model.model.MODULE.lora_A[.default].weight
_PAIR = re.compile(r"^(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight$")
#: Fields of adapter_config.json that change the result, with the values that are taken.
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    # others change the model's own weights: PiSSA, OLoRA, LoftQ
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
    "use_rslora": (True, False, None),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "lora_bias": (False, None),
    "alora_invocation_tokens": (None,),
    "modules_to_save": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, {}, []),
    "layer_replication": (None, []),
    "megatron_config": (None,),
    "corda_config": (None,),
    "arrow_config": (None,),
}


def read_peft(folder: Path, base: ModelFile, *, interleaved: bool) -> Adapter:
    """The adapter of a folder, for the model ``base``; ``interleaved``: its heads are rotated by
    neighbouring pairs, as GGUF files of some families have them, and rows of queries and keys are
    in another order than those of the transformers class.

    Raises ModelError: no adapter, a field or tensor that is not supported, which it names.
    """
    where = folder / CONFIG
    if not where.exists():
        raise SafetensorsError(f"{folder}: not a LoRA adapter: no {CONFIG} in this folder")
    config = read_json(where)
    for name, allowed in _FIXED.items():
        if config.get(name) not in allowed:
            raise UnsupportedError(f"{where}: {name} {shown(config.get(name))} is not supported")
    family, keys = _family(base)
    pairs = _pairs(folder)
    names = [f"{module}.weight" for module in pairs]
    places = find_places(names, family, stored_layers(family, keys), folder)
    if places.unused:
        raise UnsupportedError(
            f"{folder}: adapters of '{places.unused[0].removesuffix('.weight')}' are not supported"
        )
    matrices = {}
    for name, place in places.found.items():
        made = [_scaled(config, module, pairs, folder) for module in _modules(place)]
        matrices[name] = _placed(name, place, made, keys, folder, interleaved)
    return Adapter(folder, family.architecture, matrices)


def _family(base: ModelFile) -> tuple[Family, Mapping[str, Any]]:
    """The family's table, and sizes by key: of a folder its own, of GGUF those of its metadata."""
    config_file = base.path / "config.json"
    if config_file.exists():
        config = dict(text_config(read_json(config_file)))
        family = family_of(config, config_file)
        return family, read_config(config, family, config_file).keys
    prefix = f"{base.architecture}."
    known = [family for family in FAMILIES.values() if family.architecture == base.architecture]
    if not known:
        raise UnsupportedError(
            f"{base.path}: no names of modules are known for '{base.architecture}': convert the "
            "adapter to GGUF"
        )
    keys = {key.removeprefix(prefix): base.metadata[key] for key in base.metadata}
    return known[0], keys


def _pairs(folder: Path) -> dict[str, dict[str, StoredTensor]]:
    """A and B by module."""
    file = folder / _FILE
    stored = read_safetensors(file) if file.exists() else read_folder(folder)
    pairs: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        if (match := _PAIR.match(name)) is None:
            raise UnsupportedError(
                f"{folder}: tensor '{name}' is neither the lora_A nor the lora_B of a linear module"
            )
        if tensor.dtype not in GGML_TYPES:
            raise UnsupportedError(f"{folder}: tensor '{name}' has dtype {tensor.dtype}")
        pairs.setdefault(match[1], {})[match[2]] = tensor
    if not pairs:
        raise ConfigError(f"{folder}: an adapter without tensors")
    for module, pair in pairs.items():
        for which in "AB":
            if which not in pair:
                raise ConfigError(f"{folder}: lora_{which} of '{module}' is missing")
    return pairs


def _modules(place: Place) -> list[str]:
    return [part.removesuffix(".weight") for part in place.parts]


def _scaled(
    config: Mapping[str, Any],
    module: str,
    pairs: Mapping[str, Mapping[str, StoredTensor]],
    folder: Path,
) -> LowRank:
    """A and B of a module, times its alpha."""
    a, b = (_values(pairs[module][which]) for which in "AB")
    alpha = config.get("lora_alpha", 8)
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict) or not all(map(_is_simple, patterns)):
        _wrong(folder, "alpha_pattern", patterns)
    for pattern, own in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            alpha = own
            break
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not alpha:
        _wrong(folder, "lora_alpha", alpha)
    where, root = f"{folder}: '{module}'", bool(config.get("use_rslora"))
    return low_rank(where, a, b, float(alpha), root=root)


def _is_simple(pattern: str) -> bool:
    """Whether a pattern of module names compiles, and cannot take long."""
    if len(pattern) > _MOST_PATTERN or set(pattern) & {*"(){}"}:
        return False
    try:
        re.compile(pattern)
    except re.error:
        return False
    return sum(map(pattern.count, "*+?")) <= _MOST_REPEATS


def _values(tensor: StoredTensor) -> Floats:
    return Rows((tensor,)).values().reshape(tensor.shape)


def _placed(
    name: str,
    place: Place,
    made: list[LowRank],
    keys: Mapping[str, Any],
    folder: Path,
    interleaved: bool,
) -> LowRank:
    """The matrices of one tensor, of experts those of all of its modules."""
    layout = place.layout
    if any(of is not None for of in (layout.shape, layout.factors, layout.scale, layout.values)):
        raise UnsupportedError(f"{folder}: adapters of '{name}' are not supported")
    try:
        a, b = (np.concatenate([getattr(of, which) for of in made]) for which in "ab")
        if layout.rows is not None:
            b = b[:, layout.rows(keys, b.shape[1])]
        if interleaved and name.endswith(("attn_q.weight", "attn_k.weight")):
            b = b[:, _neighbours(keys, name, b.shape[1])]
    except (ValueError, IndexError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder}: '{name}': the sizes do not fit the model: {error}") from None
    return LowRank(np.ascontiguousarray(a), np.ascontiguousarray(b))


def _neighbours(keys: Mapping[str, Any], name: str, rows: int) -> np.ndarray:
    """Rows of heads in the order of GGUF files of such models: the halves of a head interleaved."""
    of_keys = "attention.head_count_kv" if "attn_k" in name else "attention.head_count"
    heads = keys.get(of_keys, keys["attention.head_count"])
    return np.arange(rows).reshape(int(heads), 2, -1).swapaxes(1, 2).reshape(-1)


def _wrong(folder: Path, name: str, value: object) -> NoReturn:
    raise ConfigError(f"{folder / CONFIG}: {name} is {shown(value)}")
