"""Vocabularies without the text of their merges, to keep the test data small.

A merge of two tokens makes a third. So a merge "ab c" is stored as two numbers: how far token "abc"
lies after the one that the merge before makes, and the length of "ab" in bytes. In a shortened file
`tokenizer.ggml.merges` is an array of i32: all distances, then all lengths.

    python tests/model/vocabulary_merges.py VOCABULARY.gguf   writes VOCABULARY.gguf.xz
"""

from __future__ import annotations

import lzma
import struct
import sys
from pathlib import Path

import numpy as np

from urdir.model.files.gguf import Gguf

_TOKENS, _MERGES = "tokenizer.ggml.tokens", "tokenizer.ggml.merges"
_ARRAY, _I32, _STRING = 9, 5, 8


def _numbers(values: np.ndarray) -> bytes:
    """An array of i32 as GGUF stores it."""
    return struct.pack("<IIQ", _ARRAY, _I32, len(values)) + values.astype("<i4").tobytes()


def _strings(texts: list[bytes]) -> bytes:
    """An array of strings as GGUF stores it."""
    parts = [struct.pack("<Q", len(text)) + text for text in texts]
    return struct.pack("<IIQ", _ARRAY, _STRING, len(texts)) + b"".join(parts)


def _bytes(texts: list[str | bytes]) -> list[bytes]:
    return [text if isinstance(text, bytes) else text.encode() for text in texts]


def shorten(path: Path) -> bytes:
    """The file with numbers for merges. Raises KeyError where a merge makes no token."""
    with Gguf(path) as file:
        tokens, merges = (_bytes(file.metadata[key]) for key in (_TOKENS, _MERGES))
    number = {token: index for index, token in enumerate(tokens)}
    lengths = [merge.index(b" ", 1) for merge in merges]
    made = [number[m[:n] + m[n + 1 :]] for m, n in zip(merges, lengths, strict=True)]
    numbers = np.concatenate([np.diff(made, prepend=0), lengths])
    return path.read_bytes().replace(_strings(merges), _numbers(numbers))


def restore(path: Path) -> None:
    """Put the text of the merges back, in place; a file that has it, or no merges, stays."""
    with Gguf(path) as file:
        numbers = file.metadata.get(_MERGES)
        if not isinstance(numbers, np.ndarray):
            return
        tokens = _bytes(file.metadata[_TOKENS])
    distances, lengths = np.split(numbers, 2)
    made = [tokens[index] for index in np.cumsum(distances).tolist()]
    merges = [t[:n] + b" " + t[n:] for t, n in zip(made, lengths.tolist(), strict=True)]
    path.write_bytes(path.read_bytes().replace(_numbers(numbers), _strings(merges)))


if __name__ == "__main__":
    source = Path(sys.argv[1])
    packed = lzma.compress(shorten(source), preset=9 | lzma.PRESET_EXTREME)
    source.with_name(f"{source.name}.xz").write_bytes(packed)
