"""PLaMo-2's tokeniser (tokenizer.ggml.model "plamo2"): the segmentation with the lowest cost.

As a unigram model, but computed from the end of the text, in integer ten-thousandths of a score,
and with bytes for characters that are not pieces.
"""

from __future__ import annotations

import math

from urdir.model.errors import TokenizerError
from urdir.model.files.metadata import Metadata
from urdir.model.text.spelling import check_bytes, read_scores
from urdir.model.text.vocabulary import Defaults, TokenType, read_vocabulary

_UNKNOWN_COST = 10_000_000
_GREATEST_COST = 20_000_000  # a piece with this cost is never taken


class Plamo:
    """The segmentation of lowest cost; of equals the longest first piece wins."""

    adds_space = False

    def __init__(self, metadata: Metadata) -> None:
        self.vocabulary = read_vocabulary(metadata, Defaults(bos=1, eos=2, unknown=0))
        scores = read_scores(metadata, len(self.vocabulary.tokens)).tolist()
        check_bytes(metadata)
        self._bytes = [self.vocabulary.id_of.get(f"<0x{byte:02X}>", -1) for byte in range(256)]
        if -1 in self._bytes:
            missing = self._bytes.index(-1)
            raise TokenizerError(f"the vocabulary has no token <0x{missing:02X}>")
        byte_ids = set(self.vocabulary.ids(TokenType.BYTE))
        self._pieces: dict[str, tuple[int, int]] = {}  # (token, cost)
        self._longest: dict[str, int] = {}  # by first character: length of the longest piece
        for piece, token_id in self.vocabulary.words().items():
            if token_id in byte_ids or not math.isfinite(scores[token_id]):
                continue
            cost = -_rounded(scores[token_id] * 1e4)
            if cost < _GREATEST_COST:
                self._pieces[piece] = (token_id, cost)
                self._longest[piece[0]] = max(len(piece), self._longest.get(piece[0], 0))

    def encode(self, text: str, after_special: bool) -> list[int]:
        """Token ids of text without special tokens."""
        text = text.removeprefix("\ufeff")
        n = len(text)
        cost = [0] * (n + 1)  # of the rest of the text
        first: list[tuple[int | None, int]] = [
            (None, n)
        ] * n  # (token, its end) of the rest of the text
        for start in range(n - 1, -1, -1):
            cost[start] = 1 << 60
            for end in range(min(start + self._longest.get(text[start], 0), n), start, -1):
                if (found := self._pieces.get(text[start:end])) is None:
                    continue
                token_id, own = found
                if cost[end] + own < cost[start]:
                    cost[start], first[start] = cost[end] + own, (token_id, end)
            if cost[start + 1] + _UNKNOWN_COST < cost[start]:
                cost[start], first[start] = cost[start + 1] + _UNKNOWN_COST, (None, start + 1)
        ids: list[int] = []
        start = 0
        while start < n:
            piece, end = first[start]
            if piece is None:
                ids += [self._bytes[byte] for byte in text[start:end].encode()]
            else:
                ids.append(piece)
            start = end
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token."""
        token = self.vocabulary.tokens[token_id]
        if self.vocabulary.types[token_id] == TokenType.BYTE:
            return bytes([int(token[3:-1], 16)])  # "<0x0A>", checked at construction
        return token.encode()


def _rounded(value: float) -> int:
    """Round to the nearest integer, halves away from zero."""
    return math.floor(abs(value) + 0.5) * (1 if value >= 0 else -1)
