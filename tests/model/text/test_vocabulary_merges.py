"""The form in which the test data has vocabularies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from urdir.model.files.gguf import Gguf

TOKENS = ["a", "b", "é", " ", "ab", "éa", "abé", "éaa"]
MERGES = ["a b", "é a", "ab é", "a bé", "éa a"]


def test_merges_come_back(make_gguf: Callable[..., Path], vocabulary_merges: Any) -> None:
    metadata = {"tokenizer.ggml.tokens": TOKENS, "general.name": "x"}
    path = make_gguf(metadata | {"tokenizer.ggml.merges": MERGES, "last": 3})
    raw = path.read_bytes()
    path.write_bytes(vocabulary_merges.shorten(path))
    with Gguf(path) as file:
        numbers = file.metadata["tokenizer.ggml.merges"]
        assert np.array_equal(numbers, [4, 1, 1, 0, 1, 1, 2, 2, 1, 3])
    for _ in range(2):  # the second time there is nothing to do
        vocabulary_merges.restore(path)
        assert path.read_bytes() == raw


def test_a_merge_of_no_token_is_refused(
    make_gguf: Callable[..., Path], vocabulary_merges: Any
) -> None:
    path = make_gguf({"tokenizer.ggml.tokens": TOKENS, "tokenizer.ggml.merges": ["b a"]})
    with pytest.raises(KeyError):
        vocabulary_merges.shorten(path)
