"""EAGLE-3 heads in transformers folders, as SpecForge, AngelSlim and the paper's authors publish
them: fields, names of tensors, and the draft's vocabulary.

Source: `LlamaModel` of llama.cpp's converter (`conversion/llama.py`), and SGLang's
`set_eagle3_layers_to_capture`: layers in eagle_config are those whose results are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from urdir.model.errors import ConfigError, SafetensorsError
from urdir.model.files.limits import DRAFT_STREAMS
from urdir.model.files.metadata import Value
from urdir.model.files.opened import Tensor
from urdir.model.files.pretrained.family import Family
from urdir.model.files.pretrained.fields import Fields
from urdir.model.files.safetensors import StoredTensor
from urdir.model.files.tensor_types import TENSOR_TYPES

_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3DraftModel")
#: The draft's own vocabulary: for each of its tokens how much more the model's id is, and for each
#: of the model's whether the draft has it.
_OFFSETS, _KNOWN = "d2t", "t2d"
EAGLE3 = Family(
    "eagle3",
    {"hidden_norm": "attn_norm_2"},
    {"target_hidden_size": "target_hidden_size", "draft_vocab_size": ""},
    ends={"fc": "fc"},
    windows="none",
)
_I64 = next(number for number, of in TENSOR_TYPES.items() if of.name == "I64")


def is_draft(config: Mapping[str, Any]) -> bool:
    """Whether config.json is that of an EAGLE-3 head."""
    names = config.get("architectures")
    return isinstance(names, list) and any(name in _ARCHITECTURES for name in names)


def split_fields(config: Mapping[str, Any], path: Path) -> tuple[dict[str, Any], dict[str, Value]]:
    """The fields that any model may have, and the metadata that the others become. Raises
    ConfigError, UnsupportedError."""
    own = ("norm_before_residual", "norm_before_fc", "eagle_config")
    fields = Fields({name: config[name] for name in own if name in config}, path)
    found: dict[str, Value] = {}
    for name in own[:2]:
        if (value := fields.take(name, bool)) is not None:
            found[f"eagle3.{name}"] = value
    layers = Fields(fields.take("eagle_config", dict) or {}, path)
    if (ids := layers.take("eagle_aux_hidden_state_layer_ids", list)) is not None:
        if not all(type(layer) is int and 0 <= layer < 1 << 16 for layer in ids):
            raise layers.wrong("eagle_aux_hidden_state_layer_ids", ids)
        DRAFT_STREAMS.check(len(ids), f"{path}: 'eagle_config'", ConfigError)
        found["eagle3.target_layers"] = np.array(ids, np.int32) + 1
    for name, value in {
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
    }.items():
        layers.fix(name, (value,))
    layers.finish()
    return {name: value for name, value in config.items() if name not in own}, found


def take_token_map(
    stored: dict[str, StoredTensor], config: Mapping[str, Any], path: Path
) -> dict[str, Tensor]:
    """Remove the tensors of the draft's vocabulary from ``stored``: the model's ids of its tokens,
    (n,) i64, as GGUF has them; none where every token is the model's. Raises SafetensorsError."""
    stored.pop(_KNOWN, None)
    offsets = stored.pop(_OFFSETS, None)
    if offsets is None:
        return {}
    size = config.get("draft_vocab_size", offsets.shape[0] if offsets.shape else 0)
    if type(size) is not int or offsets.dtype != "I64" or offsets.shape != (size,):
        raise SafetensorsError(
            f"{path}: tensor '{_OFFSETS}' is {offsets.dtype} {offsets.shape}, expected I64 "
            f"({size},)"
        )
    values = np.ascontiguousarray(offsets.data[:]).view(np.int64)
    if np.any(np.abs(values) >= 1 << 31):
        raise SafetensorsError(f"{path}: tensor '{_OFFSETS}' has an absurd number")
    data = (values + np.arange(size)).view(np.uint8)
    data.flags.writeable = False
    return {_OFFSETS: Tensor(_OFFSETS, _I64, offsets.shape, 0, data.nbytes, data)}
