"""tiktoken vocabularies as the keys that GGUF has for byte-level BPE.

Each line is a token in base64 and its rank. The expression that cuts text is not in the file: a
table gives its name in GGUF by model type. Merges follow from ranks: a token is the merge of the
two parts that remain when its bytes are merged by all lower ranks.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from urdir.model.errors import SafetensorsError, UnsupportedError
from urdir.model.files.limits import JSON_NBYTES, TOKEN_NBYTES, TOKENS
from urdir.model.files.metadata import Value
from urdir.model.files.open_file import OpenFile, read_whole
from urdir.model.files.pretrained.sentencepiece import added_tokens, strings

#: Names of expressions that cut text, by model type.
_CUTS = {
    **dict.fromkeys(("kimi_k2", "kimi_linear", "deepseek_v3"), "kimi-k2"),
    **dict.fromkeys(("qwen", "qwen2", "qwen3", "qwen3_moe"), "qwen2"),
    **dict.fromkeys(("llama", "llama4_text"), "llama-bpe"),
    **dict.fromkeys(("hunyuan_v1_moe", "hunyuan_v1_dense"), "hunyuan"),
}
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
#: Finding the merges of a token takes time with the square of its length: some 10 million steps for
#: published vocabularies.
_MOST_STEPS = 1 << 25


def is_tiktoken(path: Path) -> bool:
    """Whether a file begins with a token in base64 and its rank."""
    file = OpenFile(path, "a vocabulary", SafetensorsError)
    words = file.read(0, min(8192, len(file))).tobytes().partition(b"\n")[0].split()
    return len(words) == 2 and words[1].isdigit()


def tiktoken_metadata(
    path: Path, settings: Mapping[str, Any], model_type: object
) -> dict[str, Value]:
    """The keys tokenizer.ggml.* of a file, with the tokens that tokenizer_config.json adds.

    Raises SafetensorsError for a malformed file, UnsupportedError for a model type whose expression
    is not known.
    """
    if not isinstance(model_type, str) or model_type not in _CUTS:
        raise UnsupportedError(
            f"{path}: how model_type {str(model_type)[:40]!r} cuts text before it merges tokens "
            "is not known; a tokenizer.json says it"
        )
    ranks = _read(path)
    if sum(len(token) ** 2 for token in ranks) > _MOST_STEPS:
        raise SafetensorsError(f"{path}: tokens are too long to find their merges")
    added = added_tokens(settings, path)
    count = max([*ranks.values(), *added], default=-1) + 1
    TOKENS.check(count, str(path), SafetensorsError)
    texts = [b""] * count
    types = np.full(count, _UNUSED, np.int32)
    for token, rank in ranks.items():
        texts[rank], types[rank] = _spelled(token), _NORMAL
    for number, (content, is_special) in added.items():
        texts[number], types[number] = content, _CONTROL if is_special else _USER_DEFINED
    found: dict[str, Value] = {
        "model": "gpt2",
        "pre": _CUTS[model_type],
        "tokens": strings(texts),
        "token_type": types,
        "merges": strings(_merges(ranks)),
    }
    return {f"tokenizer.ggml.{key}": value for key, value in found.items()}


def _read(path: Path) -> dict[bytes, int]:
    """The rank of each token."""
    data = read_whole(path, "a tiktoken file", JSON_NBYTES, SafetensorsError)
    ranks: dict[bytes, int] = {}
    taken: set[int] = set()
    for number, line in enumerate(data.splitlines(), 1):
        words = line.split()
        if len(words) != 2 or not words[1].isdigit() or len(words[1]) > 9:
            raise SafetensorsError(f"{path}: line {number} lacks a token or its rank")
        try:
            token, rank = base64.b64decode(words[0], validate=True), int(words[1])
        except binascii.Error:
            raise SafetensorsError(f"{path}: line {number} lacks a token or its rank") from None
        if not token or rank >= TOKENS.most:
            raise SafetensorsError(f"{path}: line {number} lacks a token or its rank")
        if token in ranks or rank in taken:
            raise SafetensorsError(f"{path}: line {number} has a token or rank of a line before")
        TOKEN_NBYTES.check(len(token), str(path), SafetensorsError)
        ranks[token] = rank
        taken.add(rank)
    return ranks


def _merges(ranks: Mapping[bytes, int]) -> list[bytes]:
    """The pairs that are merged, by rank."""
    found = []
    for token, rank in sorted(ranks.items(), key=lambda of: of[1]):
        if len(token) < 2:
            continue
        parts = _parts_below(token, rank, ranks)
        if len(parts) == 2:  # another number: no merge makes this token
            found.append(b" ".join(map(_spelled, parts)))
    return found


def _parts_below(token: bytes, limit: int, ranks: Mapping[bytes, int]) -> list[bytes]:
    """The parts of a token that merges of ranks below ``limit`` leave."""
    parts = [token[at : at + 1] for at in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(a + b, limit) for a, b in pairwise(parts)]
        best = min(range(len(pairs)), key=pairs.__getitem__)
        if pairs[best] >= limit:
            break
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts


def _alphabet() -> list[bytes]:
    """GPT-2's printable character for each byte, in UTF-8."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in printable)
    codes = {byte: 256 + place for place, byte in enumerate(others)}
    return [chr(codes.get(byte, byte)).encode() for byte in range(256)]


_BYTES = _alphabet()


def _spelled(token: bytes) -> bytes:
    """A token in GPT-2's alphabet."""
    return b"".join(_BYTES[byte] for byte in token)
