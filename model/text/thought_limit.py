"""Limits of reasoning: how many tokens, and how it is ended."""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from urdir.model.text.tokenizer import Tokenizer

UNLIMITED = 1 << 62


@dataclass(frozen=True, slots=True)
class ThoughtLimit:
    """At most ``tokens`` of reasoning between the texts ``begin`` and ``end``; then ``ending`` is
    written, which closes it. ``is_open``: the prompt has begun it."""

    tokens: int
    begin: str
    end: str
    ending: str
    is_open: bool


class _State(Enum):
    START = auto()  # only white space or part of the tag so far
    THOUGHT = auto()
    ENDING = auto()
    OVER = auto()


class ThoughtClock:
    """Counts the tokens of one answer's reasoning, and says which end it."""

    def __init__(self, limit: ThoughtLimit, tokenizer: Tokenizer) -> None:
        self._limit = limit
        self._tokenizer = tokenizer
        self._ending = tokenizer.encode(limit.ending, parse_special=True, add_bos=False)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""
        self._count = 0
        self._state = _State.THOUGHT if limit.is_open else _State.START
        self._check()

    @property
    def free(self) -> int:
        """How many of the next tokens may be chosen before any of them is known."""
        match self._state:
            case _State.OVER:
                return UNLIMITED
            case _State.ENDING:
                return 0
        return self._limit.tokens - self._count

    @property
    def forced(self) -> int | None:
        """The token that must come next, if there is one."""
        return self._ending[0] if self._state is _State.ENDING else None

    def accept(self, token: int) -> None:
        """Append a token of the answer."""
        if self._state is _State.OVER:
            return
        self._text += self._decoder.decode(self._tokenizer.token_bytes(token))
        if self._state is _State.START:
            self._begin()
        else:
            self._think(token)
        self._check()

    def _think(self, token: int) -> None:
        self._count += 1
        if self._state is _State.ENDING and token == self._ending[0]:
            del self._ending[0]
        if self._limit.end in self._text or not self._ending:
            self._state = _State.OVER
        self._text = self._text[-len(self._limit.end) :]

    def _begin(self) -> None:
        begin = self._limit.begin
        self._text = self._text.lstrip()
        if self._text.startswith(begin):
            self._state, self._text = _State.THOUGHT, self._text[len(begin) :]
        elif not begin.startswith(self._text):
            self._state = _State.OVER

    def _check(self) -> None:
        if self._state is _State.THOUGHT and self._count >= self._limit.tokens:
            self._state = _State.ENDING if self._ending else _State.OVER
