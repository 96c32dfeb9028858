"""The kinds of tokenisers: two that GGUF files hold, over the `tokenizers` library's BPE, and
`huggingface`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol

import numpy as np
from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Engine

from urdir.model.errors import TokenizerError
from urdir.model.files.metadata import Metadata, StringArray
from urdir.model.text.byte_alphabet import BYTES
from urdir.model.text.huggingface import HuggingFaceTokens
from urdir.model.text.pretokenizers import pre_tokenizer
from urdir.model.text.vocabulary import TokenType, Vocabulary, read_vocabulary

_ESCAPED_SPACE = "▁"  # U+2581


class TokenModel(Protocol):
    """A vocabulary and the rule that cuts ordinary text into its tokens."""

    vocabulary: Vocabulary
    adds_bos: bool
    adds_space: bool  # before the text and after each special token

    def encode(self, text: str, after_special: bool, at_start: bool) -> list[int]:
        """Token ids of text without special tokens; the start of a text is ``after_special``."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for."""


class ByteLevelBpe:
    """GPT-2's BPE over bytes, each byte written as a printable character (model "gpt2")."""

    adds_space = False

    def __init__(self, metadata: Metadata) -> None:
        self.vocabulary = read_vocabulary(metadata, {})
        pre = pre_tokenizer(metadata.optional("tokenizer.ggml.pre", str, "default"))
        self.adds_bos = metadata.optional("tokenizer.ggml.add_bos_token", bool, pre.adds_bos)
        lines = metadata.require("tokenizer.ggml.merges", StringArray)
        merges = [merge.partition(" ")[::2] for merge in lines]
        for index, (left, right) in enumerate(merges):
            if not (left and right):
                raise TokenizerError(
                    f"tokenizer.ggml.merges: {lines[index]!r} is no pair of tokens"
                )
        self._engine = _engine(_text_ids(self.vocabulary), merges, ignore_merges=pre.whole_words)
        self._engine.pre_tokenizer = pre_tokenizers.Sequence(
            [
                *(pre_tokenizers.Split(Regex(p), "isolated") for p in pre.patterns),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    def encode(self, text: str, after_special: bool, at_start: bool) -> list[int]:
        """Token ids of text without special tokens."""
        return list(self._engine.encode(text, add_special_tokens=False).ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; special tokens are spelled as they are."""
        token = self.vocabulary.tokens[token_id]
        if self.vocabulary.types[token_id] in (TokenType.CONTROL, TokenType.USER_DEFINED):
            return token.encode()
        return b"".join(BYTES.get(char) or char.encode() for char in token)


class SentencePieceBpe:
    """SentencePiece's BPE (model "llama"): of all pairs, merge the one with the best score.

    A pair merges if the result is a piece, the best score first, the leftmost of equals first:
    ranking each split of each piece by the piece's score gives BPE merges that do the same.
    Control tokens are never the result of a merge. Characters without a piece become bytes.
    """

    def __init__(self, metadata: Metadata) -> None:
        self.vocabulary = read_vocabulary(metadata, {"bos": 1, "eos": 2, "unknown": 0})
        self.adds_bos = metadata.optional("tokenizer.ggml.add_bos_token", bool, True)
        self.adds_space = metadata.optional("tokenizer.ggml.add_space_prefix", bool, True)
        scores = metadata.require("tokenizer.ggml.scores", np.ndarray)
        tokens = self.vocabulary.tokens
        if len(scores) != len(tokens):
            raise TokenizerError(
                f"tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens"
            )
        _check_bytes(self.vocabulary)
        pieces = _text_ids(self.vocabulary)
        merges = _merges_by_score(
            {p: i for p, i in pieces.items() if self.vocabulary.types[i] != TokenType.BYTE},
            scores.tolist(),
        )
        options: dict[str, object] = {"byte_fallback": True}
        if (unknown := self.vocabulary.unknown_id) is not None:
            options["unk_token"] = tokens[unknown]
            pieces[tokens[unknown]] = unknown
        self._engine = _engine(pieces, merges, **options)

    def encode(self, text: str, after_special: bool, at_start: bool) -> list[int]:
        """Token ids of text without special tokens."""
        if self.adds_space and after_special:
            text = " " + text
        escaped = text.replace(" ", _ESCAPED_SPACE)
        return list(self._engine.encode(escaped, add_special_tokens=False).ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; special tokens are spelled as they are."""
        token = self.vocabulary.tokens[token_id]
        token_type = self.vocabulary.types[token_id]
        if token_type == TokenType.BYTE:
            return bytes([int(token[3:-1], 16)])  # "<0x0A>", checked when it was built
        if token_type in (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN):
            return token.encode()
        return token.replace(_ESCAPED_SPACE, " ").encode()


TOKEN_MODELS: dict[str, Callable[[Metadata], TokenModel]] = {
    "gpt2": ByteLevelBpe,
    "llama": SentencePieceBpe,
    "huggingface": HuggingFaceTokens,
}


def _engine(vocab: dict[str, int], merges: list[tuple[str, str]], **options: object) -> Engine:
    try:
        return Engine(models.BPE(vocab=vocab, merges=merges, **options))
    except Exception as error:  # the library raises nothing more specific
        raise TokenizerError(f"the vocabulary does not fit its merges: {error}") from None


def _text_ids(vocabulary: Vocabulary) -> dict[str, int]:
    """Ids of the tokens that ordinary text can become: the first of duplicates, none of control."""
    reserved = (TokenType.CONTROL, TokenType.UNKNOWN)
    ids: dict[str, int] = {}
    for token_id, (token, token_type) in enumerate(
        zip(vocabulary.tokens, vocabulary.types, strict=True)
    ):
        if token_type not in reserved:
            ids.setdefault(token, token_id)
    return ids


def _merges_by_score(pieces: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every split of every piece into two pieces, best score first."""
    ranked = sorted(pieces, key=lambda piece: -scores[pieces[piece]])
    return [
        (piece[:cut], piece[cut:])
        for piece in ranked
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]


def _check_bytes(vocabulary: Vocabulary) -> None:
    for token_id in vocabulary.ids(TokenType.BYTE):
        token = vocabulary.tokens[token_id]
        if not re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token):
            raise TokenizerError(f"token {token_id} {token!r} is no byte token such as <0x0A>")
