"""The kinds of tokenisers that GGUF files hold, by tokenizer.ggml.model."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol

import numpy as np
from tokenizers import pre_tokenizers

from urdir.model.errors import TokenizerError
from urdir.model.files.metadata import Metadata, StringArray
from urdir.model.text.merging import Merger
from urdir.model.text.pretokenizers import PreTokenizer, pre_tokenizer
from urdir.model.text.vocabulary import TokenType, Vocabulary, read_vocabulary

_ESCAPED_SPACE = "▁"  # U+2581


class TokenModel(Protocol):
    """A vocabulary and the rule that cuts ordinary text into its tokens."""

    vocabulary: Vocabulary
    adds_bos: bool
    adds_space: bool  # before the text and after each special token

    def encode(self, text: str, after_special: bool) -> list[int]:
        """Token ids of text without special tokens."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for."""


class ByteLevelBpe:
    """GPT-2's BPE over bytes, each byte written as a printable character (model "gpt2").

    A word whose pieces are no tokens is spelled in its characters; those that are no tokens either
    are left out.
    """

    adds_space = False

    def __init__(self, metadata: Metadata, pre: PreTokenizer) -> None:
        merges = _read_merges(metadata)
        self.vocabulary = read_vocabulary(metadata, {}, merges.makes)
        self.adds_bos = metadata.optional("tokenizer.ggml.add_bos_token", bool, pre.adds_bos)
        self._words = self.vocabulary.words()
        self._whole_words = pre.whole_words
        self._merge = Merger(merges.ranks, between=" ")
        self._split = pre_tokenizers.Sequence(
            [pre.splitter(), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )

    def encode(self, text: str, after_special: bool) -> list[int]:
        """Token ids of text without special tokens."""
        words, ids = self._words, []
        for word, _ in self._split.pre_tokenize_str(text):
            if self._whole_words and word in words:
                ids.append(words[word])
                continue
            for piece in self._merge(word):
                if piece in words:
                    ids.append(words[piece])
                else:
                    ids += [words[char] for char in piece if char in words]
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; special tokens are spelled as they are."""
        token = self.vocabulary.tokens[token_id]
        if self.vocabulary.types[token_id] in (TokenType.CONTROL, TokenType.USER_DEFINED):
            return token.encode()
        return b"".join(_BYTES.get(char) or char.encode() for char in token)


class SpacedBpe:
    """BPE over text whose spaces are written as U+2581 (model "gemma4", and some "gpt2").

    Characters without a token become bytes.
    """

    adds_space = False

    def __init__(self, metadata: Metadata, pre: PreTokenizer) -> None:
        merges = _read_merges(metadata)
        self.vocabulary = read_vocabulary(metadata, {}, merges.makes)
        self.adds_bos = pre.always_adds_bos or metadata.optional(
            "tokenizer.ggml.add_bos_token", bool, pre.adds_bos
        )
        _check_bytes(self.vocabulary)
        self._spell = _Speller(self.vocabulary)
        self._whole_newlines = pre.whole_newlines
        self._merge = Merger(merges.ranks, between=" ")
        self._split = pre.splitter()
        self._cut = _cut_between_words(self.vocabulary)

    def encode(self, text: str, after_special: bool) -> list[int]:
        """Token ids of text without special tokens."""
        ids: list[int] = []
        for line, _ in self._split.pre_tokenize_str(text.replace(" ", _ESCAPED_SPACE)):
            if self._whole_newlines and line[0] == "\n" and line in self._spell.words:
                ids.append(self._spell.words[line])
                continue
            for word in self._cut.split(line):
                ids += self._spell(self._merge(word))
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; special tokens are spelled as they are."""
        return _spaced_bytes(self.vocabulary, token_id)


class SentencePieceBpe:
    """SentencePiece's BPE (model "llama"): of all pairs, merge the one with the best score.

    A pair merges if the result is a piece, the best score first, the leftmost of equals first.
    Control and byte tokens are never the result of a merge. Characters without a piece become
    bytes.
    """

    def __init__(self, metadata: Metadata) -> None:
        self.vocabulary = read_vocabulary(metadata, {"bos": 1, "eos": 2, "unknown": 0})
        self.adds_bos = metadata.optional("tokenizer.ggml.add_bos_token", bool, True)
        self.adds_space = metadata.optional("tokenizer.ggml.add_space_prefix", bool, True)
        scores = read_scores(metadata, self.vocabulary)
        _check_bytes(self.vocabulary)
        self._spell = _Speller(self.vocabulary)
        ranks = {piece: -scores[i] for piece, i in self._spell.words.items()}
        for token_id in self.vocabulary.ids(TokenType.BYTE):
            ranks.pop(self.vocabulary.tokens[token_id], None)
        self._merge = Merger(ranks, between="")
        self._cut = _cut_between_words(self.vocabulary)

    def encode(self, text: str, after_special: bool) -> list[int]:
        """Token ids of text without special tokens."""
        if self.adds_space and after_special:
            text = " " + text
        ids: list[int] = []
        for word in self._cut.split(text.replace(" ", _ESCAPED_SPACE)):
            ids += self._spell(self._merge(word))
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; special tokens are spelled as they are."""
        return _spaced_bytes(self.vocabulary, token_id)


def _bpe(metadata: Metadata) -> TokenModel:
    pre = pre_tokenizer(metadata.optional("tokenizer.ggml.pre", str, "default"))
    return ByteLevelBpe(metadata, pre) if pre.byte_level else SpacedBpe(metadata, pre)


TOKEN_MODELS: dict[str, Callable[[Metadata], TokenModel]] = {
    "gpt2": _bpe,
    "gemma4": lambda metadata: SpacedBpe(metadata, pre_tokenizer("gemma4")),
    "llama": SentencePieceBpe,
}


class _Merges:
    """tokenizer.ggml.merges: "left right", the first is merged first."""

    def __init__(self, lines: list[str]) -> None:
        self.ranks = dict(zip(reversed(lines), range(len(lines) - 1, -1, -1), strict=True))

    def makes(self, token: str) -> bool:
        """True if a merge has `token` as its result."""
        return any(f"{token[:cut]} {token[cut:]}" in self.ranks for cut in range(1, len(token)))


def _read_merges(metadata: Metadata) -> _Merges:
    lines = metadata.require("tokenizer.ggml.merges", StringArray).decoded()
    for line in lines:
        if " " not in line:
            raise TokenizerError(f"tokenizer.ggml.merges: {line!r} is no pair of tokens")
    return _Merges(lines)


def read_scores(metadata: Metadata, vocabulary: Vocabulary) -> list[float]:
    """tokenizer.ggml.scores, one a token; TokenizerError for another number of them, or NaN."""
    scores = metadata.require("tokenizer.ggml.scores", np.ndarray)
    if len(scores) != len(vocabulary.tokens):
        raise TokenizerError(
            f"tokenizer.ggml.scores has {len(scores)} entries for {len(vocabulary.tokens)} tokens"
        )
    if np.isnan(scores).any():
        raise TokenizerError("tokenizer.ggml.scores: NaN is no score")
    values: list[float] = scores.tolist()
    return values


class _Speller:
    """Pieces to ids; a piece that is no token becomes its bytes, or the unknown token."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.words = vocabulary.words()
        self._unknown = [] if vocabulary.unknown_id is None else [vocabulary.unknown_id]
        self._bytes = [vocabulary.id_of.get(f"<0x{byte:02X}>") for byte in range(256)]

    def __call__(self, pieces: list[str]) -> list[int]:
        ids: list[int] = []
        for piece in pieces:
            if (token_id := self.words.get(piece)) is not None:
                ids.append(token_id)
                continue
            for char in piece:
                spelled = [self._bytes[byte] for byte in char.encode()]
                known = [i for i in spelled if i is not None]
                ids += known if len(known) == len(spelled) else self._unknown
        return ids


def _cut_between_words(vocabulary: Vocabulary) -> re.Pattern[str]:
    """Where text can be cut before it is merged, because no token reaches across.

    That is before each U+2581 but where some token has the character in front of it before a
    U+2581 as well. Short words are merged faster, and remembered.
    """
    between = "\ud800"  # in no text
    joined = re.findall(f"[^{between}]{_ESCAPED_SPACE}", between.join(vocabulary.tokens))
    inside = "".join(map(re.escape, sorted({_ESCAPED_SPACE} | {pair[0] for pair in joined})))
    return re.compile(f"(?<=[^{inside}])(?={_ESCAPED_SPACE})")


def _spaced_bytes(vocabulary: Vocabulary, token_id: int) -> bytes:
    """The bytes of a token in an alphabet that writes spaces as U+2581."""
    token, token_type = vocabulary.tokens[token_id], vocabulary.types[token_id]
    if token_type == TokenType.BYTE:
        return bytes([int(token[3:-1], 16)])  # "<0x0A>", checked when it was built
    if token_type in (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN):
        return token.encode()
    return token.replace(_ESCAPED_SPACE, " ").encode()


def _check_bytes(vocabulary: Vocabulary) -> None:
    for token_id in vocabulary.ids(TokenType.BYTE):
        token = vocabulary.tokens[token_id]
        if not re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token):
            raise TokenizerError(f"token {token_id} {token!r} is no byte token such as <0x0A>")


def _byte_alphabet() -> dict[str, bytes]:
    """The printable characters that GPT-2's encoder.py writes bytes as."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    chars = {chr(byte): bytes([byte]) for byte in printable}
    return chars | {chr(0x100 + i): bytes([byte]) for i, byte in enumerate(others)}


_BYTES = _byte_alphabet()
