"""RWKV's tokeniser (tokenizer.ggml.model "rwkv"): greedy longest match over bytes."""

from __future__ import annotations

import re

from urdir.model.files.metadata import Metadata
from urdir.model.text.vocabulary import Defaults, read_vocabulary

_ESCAPE = re.compile(rb"\\(?:x([0-9A-Fa-f]{2})|(.))", re.DOTALL)
_ESCAPED = {b"t": b"\t", b"n": b"\n", b"r": b"\r"}


class LongestMatch:
    r"""Tokens are bytes, written as text with escapes (`\n`, `\xe4`).

    A byte that begins no token becomes the unknown token, or is dropped if there is none.
    """

    adds_space = False

    def __init__(self, metadata: Metadata) -> None:
        self.vocabulary = read_vocabulary(metadata, Defaults())
        self._tokens = [_unescape(token) for token in self.vocabulary.tokens]
        self._ids: dict[bytes, int] = {}
        lengths: dict[bytes, set[int]] = {}
        for token_id in self.vocabulary.words().values():
            token = self._tokens[token_id]
            self._ids[token] = token_id
            lengths.setdefault(token[:2], set()).add(len(token))
        self._lengths = {start: sorted(known)[::-1] for start, known in lengths.items()}

    def encode(self, text: str, after_special: bool) -> list[int]:
        """Token ids of text without special tokens."""
        raw, ids, at = text.encode(), list[int](), 0
        while at < len(raw):
            for length in self._lengths.get(raw[at : at + 2], []):
                if (token_id := self._ids.get(raw[at : at + length])) is not None:
                    break
            else:
                length, token_id = 1, self._ids.get(raw[at : at + 1], self.vocabulary.unknown_id)
            if token_id is not None:
                ids.append(token_id)
            at += length
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token."""
        return self._tokens[token_id]


def _unescape(token: str) -> bytes:
    r"""The bytes of a token: `\t`, `\n`, `\r`, `\x` and two digits; others are literal."""

    def unescaped(match: re.Match[bytes]) -> bytes:
        digits, char = match.groups()
        return bytes([int(digits, 16)]) if digits else _ESCAPED.get(char, char)

    return _ESCAPE.sub(unescaped, token.encode())
