"""The kinds of tokenisers, by tokenizer.ggml.model: those of GGUF files, and tokenizer.json."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Protocol

from urdir.model.files.metadata import Metadata
from urdir.model.text.bpe import ByteLevelBpe, SentencePieceBpe, SpacedBpe
from urdir.model.text.pretokenizers import pre_tokenizer
from urdir.model.text.vocabulary import Vocabulary


class TokenModel(Protocol):
    """A vocabulary and the rule that cuts ordinary text into its tokens."""

    vocabulary: Vocabulary
    adds_space: bool  # before the text and after each special token

    def encode(self, text: str, after_special: bool) -> list[int]:
        """Token ids of text without special tokens."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for."""


def _bpe(metadata: Metadata) -> TokenModel:
    pre = pre_tokenizer(metadata.optional("tokenizer.ggml.pre", str, "default"))
    return ByteLevelBpe(metadata, pre) if pre.byte_level else SpacedBpe(metadata, pre)


def _seldom(module: str, name: str) -> Callable[[Metadata], TokenModel]:
    """The class ``name`` of a module that is imported for the files that need it."""

    def make(metadata: Metadata) -> TokenModel:
        model: TokenModel = getattr(import_module(f"urdir.model.text.{module}"), name)(metadata)
        return model

    return make


TOKEN_MODELS: dict[str, Callable[[Metadata], TokenModel]] = {
    "gpt2": _bpe,
    "gemma4": lambda metadata: SpacedBpe(metadata, pre_tokenizer("gemma4")),
    "llama": SentencePieceBpe,
    "t5": _seldom("unigram", "Unigram"),
    "rwkv": _seldom("longest_match", "LongestMatch"),
    "plamo2": _seldom("plamo", "Plamo"),
    "huggingface": _seldom("huggingface", "HuggingFaceTokens"),
}
