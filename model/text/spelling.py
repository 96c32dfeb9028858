"""Spelling of bytes and spaces in tokens, shared by several kinds of tokenisers."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from urdir.model.errors import TokenizerError
from urdir.model.files.metadata import Metadata
from urdir.model.text.vocabulary import TokenType, Vocabulary, read_types, stored_tokens

ESCAPED_SPACE = "▁"  # U+2581


def read_scores(metadata: Metadata, n_tokens: int) -> NDArray[Any]:
    """tokenizer.ggml.scores, one per token; TokenizerError for a wrong number of them, or NaN."""
    scores = metadata.require("tokenizer.ggml.scores", np.ndarray)
    if len(scores) != n_tokens:
        raise TokenizerError(
            f"tokenizer.ggml.scores has {len(scores)} entries for {n_tokens} tokens"
        )
    if np.isnan(scores).any():
        raise TokenizerError("tokenizer.ggml.scores contains NaN")
    return scores


class Speller:
    """Maps pieces to ids; a piece that is not a token becomes bytes, or the unknown token."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.words = vocabulary.words()
        self._unknown = [] if vocabulary.unknown_id is None else [vocabulary.unknown_id]
        self._bytes = [vocabulary.id_of.get(f"<0x{byte:02X}>") for byte in range(256)]

    def __call__(self, pieces: list[str]) -> list[int]:
        """The ids of pieces of a text."""
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


def spaced_bytes(vocabulary: Vocabulary, token_id: int) -> bytes:
    """The bytes of a token in an alphabet that writes spaces as U+2581."""
    token, token_type = vocabulary.tokens[token_id], vocabulary.types[token_id]
    if token_type == TokenType.BYTE:
        return bytes([int(token[3:-1], 16)])  # "<0x0A>", checked at construction
    if token_type in (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN):
        return token.encode()
    return token.replace(ESCAPED_SPACE, " ").encode()


def check_bytes(metadata: Metadata) -> None:
    """Raise TokenizerError for a byte token that is not spelled as one."""
    stored = stored_tokens(metadata)
    for token_id in np.flatnonzero(read_types(metadata, len(stored)) == TokenType.BYTE).tolist():
        token = stored[token_id]
        if not re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token):
            raise TokenizerError(f"token {token_id} {token!r} is not a byte token such as <0x0A>")


def _byte_alphabet() -> dict[str, bytes]:
    """GPT-2's printable characters for bytes (encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    chars = {chr(byte): bytes([byte]) for byte in printable}
    return chars | {chr(0x100 + i): bytes([byte]) for i, byte in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()
