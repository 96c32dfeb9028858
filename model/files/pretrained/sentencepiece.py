"""tokenizer.model, a SentencePiece vocabulary, as the keys that GGUF has for it.

The file is a protocol buffer, `ModelProto` of SentencePiece's `sentencepiece_model.proto`: pieces
with scores and types, and specifications of the trainer and the normaliser.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from urdir.model.errors import SafetensorsError
from urdir.model.files.limits import JSON_NBYTES, TOKENS
from urdir.model.files.metadata import StringArray, Value
from urdir.model.files.open_file import read_whole
from urdir.model.files.pretrained.fields import shown

#: Numbers of fields: of the model, of a piece, of the trainer's and the normaliser's specification.
_PIECE, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE, _TYPE = 1, 2, 3
_MODEL_TYPE, _IDS = 3, {"unknown": 40, "bos": 41, "eos": 42, "padding": 43}
_CHARSMAP, _ADDS_PREFIX, _REMOVES_SPACES = 2, 3, 4
#: GGUF's kinds of tokenisers, by the number of the trainer's algorithm.
_KINDS = {1: "t5", 2: "llama"}
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_USUAL_IDS = {"unknown": 0, "bos": 1, "eos": 2, "padding": -1}


def sentencepiece_metadata(path: Path, settings: Mapping[str, Any]) -> dict[str, Value]:
    """The keys tokenizer.ggml.* of a file, with the tokens that tokenizer_config.json adds.

    Raises SafetensorsError for a malformed file or another algorithm than BPE and unigram.
    """
    data = read_whole(path, "a SentencePiece model", JSON_NBYTES, SafetensorsError)
    texts: list[bytes] = []
    scores, types = array("f"), array("i")
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, value in _fields(data, path):
        if number == _PIECE:
            piece = dict(_fields(_message(value, path), path))
            texts.append(_message(piece.get(_TEXT, b""), path))
            scores.append(_float(piece.get(_SCORE, b"\0\0\0\0"), path))
            types.append(_small(piece.get(_TYPE, _NORMAL), path))
            TOKENS.check(len(texts), str(path), SafetensorsError)
        elif number in (_TRAINER, _NORMALIZER):
            inner = trainer if number == _TRAINER else normalizer
            inner.update(_fields(_message(value, path), path))
    _add(texts, scores, types, settings, path)
    kind = _KINDS.get(_small(trainer.get(_MODEL_TYPE, 1), path))
    charsmap = _message(normalizer.get(_CHARSMAP, b""), path)
    if kind is None or (kind == "llama" and charsmap):
        raise SafetensorsError(f"{path}: neither unigrams, nor BPE of unchanged text")
    found: dict[str, Value] = {
        "model": kind,
        "tokens": strings(texts),
        "scores": np.array(scores, np.float32),
        "token_type": np.array(types, np.int32),
        "add_space_prefix": bool(normalizer.get(_ADDS_PREFIX, 1)),
        "remove_extra_whitespaces": bool(normalizer.get(_REMOVES_SPACES, 1)),
    }
    if charsmap:
        found["precompiled_charsmap"] = np.frombuffer(charsmap, np.uint8)
    for name, field in _IDS.items():
        token_id = _small(trainer.get(field, _USUAL_IDS[name]), path)
        if 0 <= token_id < len(texts):
            found[f"{name}_token_id"] = token_id
    return {f"tokenizer.ggml.{key}": value for key, value in found.items()}


def strings(texts: Iterable[bytes]) -> StringArray:
    """Texts as an array of a GGUF file's metadata."""
    stored, ends = bytearray(), array("Q")
    for text in texts:
        stored += struct.pack("<Q", len(text)) + text
        ends.append(len(stored))
    return StringArray(memoryview(bytes(stored)), 0, ends)


def added_tokens(settings: Mapping[str, Any], path: Path) -> dict[int, tuple[bytes, bool]]:
    """The tokens that tokenizer_config.json adds, and whether each is special, by id."""
    found = {}
    added = settings.get("added_tokens_decoder")
    for number, token in (added if isinstance(added, dict) else {}).items():
        content = token.get("content") if isinstance(token, dict) else None
        if not number.isdecimal() or len(number) > 9 or not isinstance(content, str):
            raise SafetensorsError(f"{path}: an added token is {shown(number)}: {shown(token)}")
        found[int(number)] = content.encode("utf-8", "replace"), token.get("special") is True
    return dict(sorted(found.items()))


def _add(
    texts: list[bytes],
    scores: array[float],
    types: array[int],
    settings: Mapping[str, Any],
    path: Path,
) -> None:
    """Add the tokens of tokenizer_config.json, which follow those of the file or replace them."""
    for number, (content, is_special) in added_tokens(settings, path).items():
        if number > len(texts):
            raise SafetensorsError(f"{path}: added token {number} follows {len(texts)} tokens")
        if number == len(texts):
            texts.append(content)
            scores.append(-1000.0)
            types.append(_USER_DEFINED)
        if is_special and texts[number] == content and types[number] in (_NORMAL, _USER_DEFINED):
            types[number] = _CONTROL


def _fields(data: bytes, path: Path) -> Iterator[tuple[int, Any]]:
    """The numbers and values of a message's fields: an integer, or bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at, path)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, at = _varint(data, at, path)
            yield number, value
            continue
        if wire == 2:
            size, at = _varint(data, at, path)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise _malformed(path)
        if at + size > len(data):
            raise _malformed(path)
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int, path: Path) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 64:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
    raise _malformed(path)


def _message(value: object, path: Path) -> bytes:
    if not isinstance(value, bytes):
        raise _malformed(path)
    return value


def _float(value: object, path: Path) -> float:
    if not isinstance(value, bytes) or len(value) != 4:
        raise _malformed(path)
    score: float = struct.unpack("<f", value)[0]
    return score


def _small(value: object, path: Path) -> int:
    """An integer of 32 bits; negative ones are stored as 64 bits."""
    if not isinstance(value, int):
        raise _malformed(path)
    value = value - (1 << 64) if value >= 1 << 63 else value
    if not -(1 << 31) <= value < 1 << 31:
        raise _malformed(path)
    return value


def _malformed(path: Path) -> SafetensorsError:
    return SafetensorsError(f"{path}: not a SentencePiece model, or corrupt")
