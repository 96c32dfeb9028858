"""The first token of a conversation's second turn, whose beginning is in the prefix cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

import numpy as np

from urdir.model.engine.session import Session
from urdir.model.measure.timed_answers import FirstToken, record_prompt, time_turn

#: Tokens of the answer, and of what a user writes in the second turn.
ANSWER, QUESTION = 128, 64


@dataclass(frozen=True, slots=True)
class TurnRow:
    """A turn of a conversation: ``tokens`` of its prompt, of which ``cached`` were found, on the
    "device" or the "host", and the median ms to its first token, ``share`` of those of the first
    turn."""

    turn: int
    source: str
    tokens: int
    cached: int
    first_token_ms: float
    share: float


def second_turn_context(tokens: int) -> int:
    """Tokens of context for a first turn of this many tokens."""
    return tokens + QUESTION + 2 * ANSWER


def second_turn_rows(session: Session, tokens: int, repeats: int) -> Iterator[TurnRow]:
    """Time both turns of conversations with a first prompt of this many tokens, in a session with
    pages: ``repeats`` times after one that tells which steps are to be recorded, as a server has
    them. Every first prompt is new. With host memory for prefixes another second turn begins with
    what has moved there."""
    rng = np.random.default_rng(0)
    vocab = session.parts.config.vocab_size
    turns: list[list[FirstToken]] = []
    for _ in range(1 + repeats):
        drawn = [int(token) for token in rng.integers(0, vocab, tokens + QUESTION)]
        first = time_turn(session, drawn[:tokens], ANSWER)
        second = time_turn(session, [*drawn[:tokens], *first.answer, *drawn[tokens:]], ANSWER)
        turns.append([first, second])
        prefixes = session.cache.prefixes
        if prefixes is not None and prefixes.host is not None:
            prefixes.evict()
            other = [*drawn[:tokens], *first.answer, *reversed(drawn[tokens:])]
            turns[-1].append(time_turn(session, other, ANSWER))
        if len(turns) == 1:
            for of in turns[0]:
                record_prompt(session, of.cached, of.tokens)
    seconds = [median(run[row].seconds for run in turns[1:]) for row in range(len(turns[0]))]
    names = ((1, ""), (2, "device"), (2, "host"))
    for (turn, source), of, taken in zip(names, turns[-1], seconds, strict=False):
        yield TurnRow(turn, source, of.tokens, of.cached, 1e3 * taken, taken / seconds[0])
