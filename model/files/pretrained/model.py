"""A transformers folder as a model file, in place of GGUF."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from urdir.model.errors import ConfigError, SafetensorsError
from urdir.model.files.metadata import REORDERED, Metadata, Value
from urdir.model.files.opened import OpenedModel, Tensor
from urdir.model.files.pretrained.config import family_of, is_class, read_config, text_config
from urdir.model.files.pretrained.drafts import EAGLE3, is_draft, split_fields, take_token_map
from urdir.model.files.pretrained.fields import shown
from urdir.model.files.pretrained.places import (
    SKIPPED_LAYERS,
    check_skipped,
    find_places,
    first_experts,
    is_unused,
    stored_layers,
)
from urdir.model.files.pretrained.quantised.experts import with_rows_in_order
from urdir.model.files.pretrained.quantised.modules import kinds_of, merge_parts
from urdir.model.files.pretrained.quantised.scheme import read_scheme
from urdir.model.files.pretrained.sentences import dense_after_pooling, sentence_metadata
from urdir.model.files.pretrained.steps.encoders import ENCODING
from urdir.model.files.pretrained.tensors import make_tensors, vector
from urdir.model.files.pretrained.tokens import read_json, text_metadata
from urdir.model.files.safetensors import read_folder


class SafetensorsModel(OpenedModel):
    """config.json, vocabulary and *.safetensors as a ``ModelFile``: keys and tensors have the names
    that families read (`family`), types are ggml's. ``ignored_fields`` of config.json have no
    effect, ``unused_tensors`` belong to other parts of the model; ``quantisation`` says how its
    matrices are stored (`quantised.modules.kinds_of`).

    Matrices are converted row by row while read. They get the type ``quantize`` ("q8_0", "q4_0",
    ...; None: as stored). ``name`` is the model's name (None: the folder's).
    """

    format = "safetensors"

    def __init__(
        self, path: str | os.PathLike[str], quantize: str | None = None, name: str | None = None
    ) -> None:
        """Check the folder ``path``.

        Raises SafetensorsError for missing or malformed files, UnsupportedError for an unsupported
        architecture, field or tensor, ConfigError for inconsistent sizes.
        """
        self.path = Path(path)
        config_file = self.path / "config.json"
        if not config_file.exists():
            raise SafetensorsError(f"{self.path}: no config.json in this folder{_ggufs(self.path)}")
        whole = read_json(config_file)
        scheme, config = read_scheme(whole, config_file), dict(text_config(whole))
        own: dict[str, Value] = {}
        if is_draft(config):
            family = EAGLE3
            config, own = split_fields(config, config_file)
        else:
            family = family_of(config, config_file)
        read = read_config(config, family, config_file)
        values = dict(read.keys)
        self.ignored_fields = read.ignored
        stored, numbers = read_folder(self.path), stored_layers(family, values)
        check_skipped(stored, np.asarray(values.pop(SKIPPED_LAYERS, [])).tolist(), self.path)
        if scheme is not None:  # matrices of other parts may be of shapes that no type has
            others = {name: of for name, of in stored.items() if is_unused(name, family, numbers)}
            own_parts = {name: of for name, of in stored.items() if name not in others}
            stored = others | merge_parts(own_parts, scheme, self.path)
        self.quantisation = kinds_of(stored, scheme)
        self.nbytes = sum(len(tensor.data) for tensor in stored.values())
        token_map = take_token_map(stored, config, self.path) if family is EAGLE3 else {}
        layers = values["block_count"]
        assert isinstance(layers, int)
        places = first_experts(find_places(stored, family, numbers, self.path), family, values)
        self.unused_tensors = places.unused
        dense, more = dense_after_pooling(self.path)
        found, stored = {**places.found, **dense}, stored | more
        if dense:
            values["dense_2_feat_out"] = stored[dense["dense_2.weight"].parts[0]].shape[0]
        if read.tied or (read.tied is None and family.tied):
            found.pop("output.weight", None)
        changed = with_rows_in_order(found, stored, self.path)
        self.tensors: dict[str, Tensor] = token_map | make_tensors(
            found, changed, values, quantize=quantize, path=self.path
        )
        if family is not EAGLE3:  # whose output may be the model's
            rows = values.get("own.tokens", config.get("vocab_size"))
            _check_vocabulary(config, rows, self.tensors, config_file)
        for factors in [key for key in values if key.endswith(".weight")]:
            self.tensors[factors] = vector(factors, np.asarray(values.pop(factors)))
        values |= _take_scalars(self.tensors, layers)
        if "pooling_type" not in values:
            values |= sentence_metadata(self.path)
        general: dict[str, Value] = {
            "general.architecture": family.architecture,
            "general.name": name or self.path.absolute().name,
        }
        if any(of is not stored[name] for name, of in changed.items()):
            general[REORDERED] = True
        keys = {
            key if key.startswith("xielu.") else f"{family.architecture}.{key}": value
            for key, value in values.items()
        }
        text = text_metadata(self.path, config, self.tensors.get("token_embd.weight"))
        self.metadata = Metadata(general | keys | own | text, str(self.path))


def _ggufs(folder: Path) -> str:
    """What to give in place of a folder of GGUF files."""
    found = sorted(folder.glob("*.gguf"))
    return f": give one of its GGUF files, such as {found[0].name}" if found else ""


def _take_scalars(tensors: dict[str, Tensor], layers: int) -> dict[str, Value]:
    """Remove the parameters of xIELU, which a folder stores as tensors of one value; as arrays with
    a value for each layer."""
    found: dict[str, Value] = {}
    for name in [name for name in tensors if ".xielu." in name]:
        key = name.split(".", 2)[2]
        values = np.asarray(tensors.pop(name).data[:]).view(np.float32)
        if len(values) != 1:
            raise ConfigError(f"tensor '{name}' has {len(values)} values, expected one")
        of_layers = found.setdefault(key, np.zeros(layers, np.float32))
        np.asarray(of_layers)[int(name.split(".")[1])] = values[0]
    return found


def _check_vocabulary(
    config: Mapping[str, Any], rows: object, tensors: Mapping[str, Tensor], path: Path
) -> None:
    has_output = config.get("tie_word_embeddings") is False and not is_class(config, ENCODING)
    if has_output and "output.weight" not in tensors:
        raise SafetensorsError(
            f"{path.parent}: tensor 'lm_head.weight' is missing, 'tie_word_embeddings' of "
            f"{path.name} is false: set it to true if the output is the embedding"
        )
    embedding = tensors.get("token_embd.weight")
    if embedding is not None and rows not in (None, embedding.shape[0]):
        raise ConfigError(
            f"{path}: 'vocab_size' is {shown(config.get('vocab_size'))}, the embedding has "
            f"{embedding.shape[0]} rows, expected {shown(rows)}"
        )
