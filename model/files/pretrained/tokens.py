"""Text metadata of a folder: its vocabulary, chat template, special token ids, sampling.

Keys are GGUF's if it has one (including tokenizer.huggingface.json, see GGUF's specification).
tokenizer.huggingface.{bos_token, eos_token, end_token_ids} are our own, for values that GGUF gives
by id or not at all. The tokeniser's kind is "huggingface".
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from urdir.model.errors import SafetensorsError
from urdir.model.files.json_text import parse_json
from urdir.model.files.limits import JSON_NBYTES
from urdir.model.files.metadata import Value
from urdir.model.files.open_file import read_whole
from urdir.model.files.opened import Tensor
from urdir.model.files.pretrained.fields import shown
from urdir.model.files.pretrained.sentencepiece import sentencepiece_metadata
from urdir.model.files.pretrained.tiktoken import is_tiktoken, tiktoken_metadata

#: Fields of generation_config.json, and their keys.
_SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
#: Files of vocabularies; of several the first one counts.
VOCABULARIES = (
    *("tokenizer.json", "tokenizer.model", "tiktoken.model", "qwen.tiktoken"),
    "tokenizer.tiktoken",
)


def read_json(path: Path) -> dict[str, Any]:
    """Parse a file as a JSON object. Raises SafetensorsError."""
    text = read_whole(path, "a JSON file", JSON_NBYTES, SafetensorsError)
    return parse_json(text, f"{path}: the file", SafetensorsError)


def text_metadata(
    folder: Path, config: Mapping[str, Any], embedding: Tensor | None = None
) -> dict[str, Value]:
    """The metadata; without a vocabulary if there is no tokenizer.json. The rows of an
    ``embedding`` bound the tokens."""
    settings = _optional_json(folder / "tokenizer_config.json")
    found: dict[str, Value] = {}
    if (template := _template(folder, settings)) is not None:
        found["tokenizer.chat_template"] = template
    generation = _optional_json(folder / "generation_config.json")
    found |= _sampling(generation)
    if not (folder / "tokenizer.json").exists():
        return found | _other_vocabulary(folder, config, settings, generation)
    found["tokenizer.ggml.model"] = "huggingface"
    found["tokenizer.huggingface.json"] = _text(folder / "tokenizer.json")
    if embedding is not None:
        found["tokenizer.huggingface.rows"] = embedding.shape[0]
    if (bos := _bos_id(config, generation)) is not None:
        found["tokenizer.ggml.bos_token_id"] = bos
    if ends := _end_ids(folder, config, generation):
        found["tokenizer.huggingface.end_token_ids"] = np.array(ends, np.int32)
    if isinstance(adds_bos := settings.get("add_bos_token"), bool):
        found["tokenizer.ggml.add_bos_token"] = adds_bos
    for role in ("bos_token", "eos_token"):
        token = settings.get(role)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            found[f"tokenizer.huggingface.{role}"] = token
    return found


def _given(name: str, config: Mapping[str, Any], generation: Mapping[str, Any]) -> Any:
    """A field of generation_config.json, or else of config.json; null and [] are none."""
    found = generation.get(name)
    return config.get(name) if found is None or found == [] else found


def _bos_id(config: Mapping[str, Any], generation: Mapping[str, Any]) -> int | None:
    """The token that begins a text; of several the first."""
    bos = _given("bos_token_id", config, generation)
    bos = bos[0] if isinstance(bos, list) and bos else bos
    return bos if type(bos) is int else None


def _end_ids(folder: Path, config: Mapping[str, Any], generation: Mapping[str, Any]) -> list[int]:
    """The tokens that end an answer."""
    ends = _given("eos_token_id", config, generation)
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if not all(type(end) is int and 0 <= end < 1 << 31 for end in ends):
        raise SafetensorsError(f"{folder}: eos_token_id is {shown(ends)}, expected token ids")
    return ends


def _sampling(generation: Mapping[str, Any]) -> dict[str, Value]:
    """The sampling that generation_config.json recommends, by GGUF's keys; vLLM takes the same."""
    found: dict[str, Value] = {}
    for name, key in _SAMPLING.items():
        value = generation.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[f"general.sampling.{key}"] = value
    return found


def _other_vocabulary(
    folder: Path,
    config: Mapping[str, Any],
    settings: Mapping[str, Any],
    generation: Mapping[str, Any],
) -> dict[str, Value]:
    """The vocabulary of a SentencePiece or tiktoken file; nothing if there is none."""
    path = next((folder / name for name in VOCABULARIES[1:] if (folder / name).is_file()), None)
    if path is None:
        return {}
    if is_tiktoken(path):
        found = tiktoken_metadata(path, settings, config.get("model_type"))
    else:
        found = sentencepiece_metadata(path, settings)
    if (bos := _bos_id(config, generation)) is not None:
        found["tokenizer.ggml.bos_token_id"] = bos
    if ends := _end_ids(folder, config, generation):
        found["tokenizer.ggml.eos_token_id"] = ends[0]
        found["tokenizer.huggingface.end_token_ids"] = np.array(ends, np.int32)
    for role in ("bos", "eos"):
        if isinstance(adds := settings.get(f"add_{role}_token"), bool):
            found[f"tokenizer.ggml.add_{role}_token"] = adds
    return found


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """The template file, or the one in chat_template.json (of multi-modal models) or in
    tokenizer_config.json, of several the one named "default"."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return _text(file)
    beside = _optional_json(folder / "chat_template.json")
    template = beside.get("chat_template", settings.get("chat_template"))
    if isinstance(template, list):
        named = [t for t in template if isinstance(t, dict) and t.get("name") == "default"]
        template = named[0].get("template") if named else None
    return template if isinstance(template, str) else None


def _text(path: Path) -> str:
    try:
        return read_whole(path, "a text file", JSON_NBYTES, SafetensorsError).decode()
    except UnicodeDecodeError as error:
        raise SafetensorsError(f"{path}: not UTF-8: {error.reason}") from None
