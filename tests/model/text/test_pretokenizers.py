"""Where each pre-tokeniser cuts, against llama.cpp's own splitter (see data/vocab/README.md)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from urdir.model.errors import UnsupportedError
from urdir.model.text.pretokenizers import PRE_TOKENIZERS, pre_tokenizer


@pytest.fixture
def expected(data: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((data / "vocab" / "words.json").read_text())
    return content


def cut(text: str, lengths: str) -> list[str]:
    words, at = [], 0
    for length in map(int, lengths.split()):
        words.append(text[at : at + length])
        at += length
    assert at == len(text)
    return words


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_words(expected: dict[str, Any], name: str) -> None:
    [group] = [group for group in expected["groups"] if name in group["names"]]
    splitter = pre_tokenizer(name).splitter()
    for text, lengths in zip(expected["texts"], group["lengths"], strict=True):
        assert [word for word, _ in splitter.pre_tokenize_str(text)] == cut(text, lengths)


def test_the_cases_tell_pre_tokenizers_apart(expected: dict[str, Any]) -> None:
    """Names share a list of words only if they share the expressions."""
    for group in expected["groups"]:
        # other expressions, which come to the same: digits cut beforehand, possessive repetition
        same = ("minicpm5", "bailingmoe", "bailingmoe2", "llada-moe")
        names = [name for name in group["names"] if name not in same]
        assert len({PRE_TOKENIZERS[name].patterns for name in names}) == 1, names


def test_every_name_of_llama_cpp_but_one_is_known(expected: dict[str, Any]) -> None:
    assert {name for group in expected["groups"] for name in group["names"]} == set(PRE_TOKENIZERS)
    assert len(PRE_TOKENIZERS) == 90
    with pytest.raises(UnsupportedError, match=r"pre-tokeniser 'whitespace'.*known: .*qwen2"):
        pre_tokenizer("whitespace")  # of an encoder


def test_options() -> None:
    llama3 = "falcon-h1 falcon3 jina-v5-nano lfm2 llama-bpe llama-v3 llama3 midm-2.0 pixtral"
    whole = f"{llama3} glm4 glm5 granite-embed-multi-97m minicpm5 tekken youtu"

    def having(option: str) -> set[str]:
        return {name for name, entry in PRE_TOKENIZERS.items() if getattr(entry, option)}

    assert having("whole_words") == set(whole.split())
    assert having("adds_bos") == {*llama3.split(), "tekken", "chameleon"}
    assert having("always_adds_bos") == {"gemma4", "granite-embed-multi-311m"}
    assert having("whole_newlines") == {"gemma4", "granite-embed-multi-311m"}
    spaced = {"gemma4", "granite-embed-multi-311m", "sarvam-moe"}
    assert set(PRE_TOKENIZERS) - having("byte_level") == spaced
