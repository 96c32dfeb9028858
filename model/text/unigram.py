"""SentencePiece's unigram model (tokenizer.ggml.model "t5"): the most probable segmentation.

Each piece has a log probability; the segmentation with the greatest sum is found by Viterbi search.
A character that is not a piece costs `_UNKNOWN_PENALTY` more than the worst piece.
"""

from __future__ import annotations

import numpy as np

from urdir.model.errors import TokenizerError
from urdir.model.files.metadata import Metadata
from urdir.model.text.charsmap import CharsMap
from urdir.model.text.spelling import ESCAPED_SPACE, check_bytes, read_scores, spaced_bytes
from urdir.model.text.vocabulary import Defaults, TokenType, read_vocabulary

_UNKNOWN_PENALTY = 10.0  # SentencePiece's kUnkPenalty


class Unigram:
    """The most probable pieces of normalised text; other characters become the unknown token.

    Decoding returns the normalised text, not the original.
    """

    def __init__(self, metadata: Metadata) -> None:
        self.vocabulary = read_vocabulary(metadata, Defaults(eos=1, unknown=2, adds_eos=True))
        if self.vocabulary.unknown_id is None:
            raise TokenizerError("tokenizer.ggml.unknown_token_id is missing")
        self._unknown_id = self.vocabulary.unknown_id
        check_bytes(metadata)
        self._prepends = metadata.optional("tokenizer.ggml.add_space_prefix", bool, False)
        self._squeezes = metadata.optional("tokenizer.ggml.remove_extra_whitespaces", bool, False)
        self.adds_space = self._prepends or self._squeezes
        self._charsmap = CharsMap.read(metadata)

        scores = read_scores(metadata, len(self.vocabulary.tokens)).tolist()
        usable = (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)
        user_defined = set(self.vocabulary.ids(TokenType.USER_DEFINED))
        self._pieces: dict[str, tuple[int, float]] = {}
        for token_id in self.vocabulary.ids(*usable):
            score = 0.0 if token_id in user_defined else scores[token_id]
            self._pieces[self.vocabulary.tokens[token_id]] = (token_id, score)
        self._pieces.pop("", None)
        self._longest: dict[str, int] = {}  # by first character: length of the longest piece
        for piece in self._pieces:
            self._longest[piece[0]] = max(len(piece), self._longest.get(piece[0], 0))
        worst = min((scores[i] for i in self.vocabulary.ids(TokenType.NORMAL)), default=0.0)
        self._unknown_score = float(np.float32(worst) - np.float32(_UNKNOWN_PENALTY))

    def encode(self, text: str, after_special: bool) -> list[int]:
        """Token ids of text without special tokens."""
        text = self._normalised(text)
        best = np.full(len(text) + 1, -np.inf).tolist()  # sum of scores up to a position
        best[0] = 0.0
        last: list[tuple[int, int]] = [(0, 0)] * len(best)  # (token, its start)
        for start, char in enumerate(text):
            one_character = False
            for end in range(start + 1, min(start + self._longest.get(char, 0), len(text)) + 1):
                if (found := self._pieces.get(text[start:end])) is None:
                    continue
                one_character |= end == start + 1
                token_id, score = found
                if best[start] + score > best[end]:
                    best[end], last[end] = best[start] + score, (token_id, start)
            if not one_character and best[start] + self._unknown_score > best[start + 1]:
                best[start + 1] = best[start] + self._unknown_score
                last[start + 1] = (self._unknown_id, start)
        ids: list[int] = []
        end = len(text)
        while end:
            token_id, end = last[end]
            if token_id != self._unknown_id or ids[-1:] != [token_id]:
                ids.append(token_id)
        return ids[::-1]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token; special tokens are spelled literally."""
        return spaced_bytes(self.vocabulary, token_id)

    def _normalised(self, text: str) -> str:
        """`text` with characters replaced, and a U+2581 at the start of words."""
        pieces: list[str] = []
        within_word = prepended = False
        for char in self._charsmap.replace(text):
            if char == " ":
                within_word = False
                if not self._squeezes:
                    pieces.append(ESCAPED_SPACE)
                continue
            if not within_word:
                within_word = True
                if self._squeezes or (self._prepends and not prepended):
                    pieces.append(ESCAPED_SPACE)
                    prepended = True
            pieces.append(char)
        return "".join(pieces)
