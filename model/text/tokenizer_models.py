"""Tokeniser kinds by tokenizer.ggml.model: those of GGUF files, and tokenizer.json.

A vocabulary is checked before a device is opened, and built concurrently with that. Checks of the
common kinds decode nothing: for 128,256 tokens with merges they take 20 ms, building 260 ms. Rare
kinds are built to be checked.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import NamedTuple, Protocol

from urdir.model.files.metadata import Metadata
from urdir.model.text.bpe import (
    ByteLevelBpe,
    SentencePieceBpe,
    SpacedBpe,
    adds_space_prefix,
    stored_merges,
)
from urdir.model.text.pretokenizers import PreTokenizer, pre_tokenizer
from urdir.model.text.spelling import check_bytes, read_scores
from urdir.model.text.vocabulary import Vocabulary, check_vocabulary


class TokenModel(Protocol):
    """A vocabulary and the algorithm that splits ordinary text into its tokens."""

    vocabulary: Vocabulary
    adds_space: bool  # before the text and after each special token

    def encode(self, text: str, after_special: bool) -> list[int]:
        """Token ids of text without special tokens."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token."""


class Checked(NamedTuple):
    """A valid vocabulary: its size, and the function that builds it."""

    n_tokens: int
    build: Callable[[], TokenModel]


def _bpe(metadata: Metadata) -> Checked:
    pre = pre_tokenizer(metadata.optional("tokenizer.ggml.pre", str, "default"))
    return _byte_level(metadata, pre) if pre.byte_level else _spaced(metadata, pre)


def _byte_level(metadata: Metadata, pre: PreTokenizer) -> Checked:
    stored_merges(metadata)
    return Checked(check_vocabulary(metadata), partial(ByteLevelBpe, metadata, pre))


def _spaced(metadata: Metadata, pre: PreTokenizer) -> Checked:
    stored_merges(metadata)
    n_tokens = check_vocabulary(metadata)
    check_bytes(metadata)
    return Checked(n_tokens, partial(SpacedBpe, metadata, pre))


def _sentence_piece(metadata: Metadata) -> Checked:
    n_tokens = check_vocabulary(metadata)
    read_scores(metadata, n_tokens)
    check_bytes(metadata)
    adds_space_prefix(metadata)
    return Checked(n_tokens, partial(SentencePieceBpe, metadata))


def _rare(module: str, name: str) -> Callable[[Metadata], Checked]:
    """Checks by building the class ``name`` of a module that is imported on demand."""

    def built(metadata: Metadata) -> Checked:
        model: TokenModel = getattr(import_module(f"urdir.model.text.{module}"), name)(metadata)
        return Checked(len(model.vocabulary.tokens), lambda: model)

    return built


TOKEN_MODELS: dict[str, Callable[[Metadata], Checked]] = {
    "gpt2": _bpe,
    "gemma4": lambda metadata: _spaced(metadata, pre_tokenizer("gemma4")),
    "llama": _sentence_piece,
    "t5": _rare("unigram", "Unigram"),
    "bert": _rare("wordpiece", "WordPiece"),
    "rwkv": _rare("longest_match", "LongestMatch"),
    "plamo2": _rare("plamo", "Plamo"),
    "huggingface": _rare("huggingface", "HuggingFaceTokens"),
}
