"""Perplexity of a text, as llama.cpp measures it, and the log-probabilities behind it.

The text is cut into chunks of the context, which do not see each other. The tokens of the second
half of each are scored, by the logits after those before them. With BOS a chunk's first token is
BOS.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp, sqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from urdir.model.engine.requests.answer import Answer
from urdir.model.engine.requests.answer_loop import AnswerLoop
from urdir.model.engine.requests.limits import Limits
from urdir.model.engine.requests.request import Item, Piece, Request
from urdir.model.engine.sampling import Logits
from urdir.model.engine.sampling_settings import GREEDY
from urdir.model.engine.session import Session
from urdir.model.errors import ModelError

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A perplexity, with the standard error of its mean, of ``count`` tokens."""

    value: float
    error: float
    count: int

    @classmethod
    def of(cls, losses: Floats) -> Estimate:
        """Of -ln p of each scored token."""
        value = exp(float(losses.mean()))
        spread = sqrt(float(losses.var()) / max(1, losses.size - 1))
        return cls(value, value * spread, losses.size)

    def __str__(self) -> str:
        return f"{self.value:.4f} ± {self.error:.5f}"


@dataclass(frozen=True, slots=True)
class Chunk:
    """``tokens`` of one chunk, of which those from ``first`` + 1 on are scored."""

    tokens: tuple[int, ...]

    @property
    def first(self) -> int:
        """The place of the first token whose logits count."""
        return len(self.tokens) // 2

    @property
    def scored(self) -> tuple[int, ...]:
        """The tokens that the logits predict."""
        return self.tokens[self.first + 1 :]

    def losses(self, logits: Logits) -> Floats:
        """-ln p of each scored token, by its row of ``logits`` (n_scored, n_vocab)."""
        rows = zip(logits, self.scored, strict=True)
        return np.array([-log_probabilities(row)[token] for row, token in rows])


def log_probabilities(logits: npt.NDArray[np.floating[Any]]) -> Floats:
    """ln softmax of a row in float64."""
    shifted: Floats = logits.astype(np.float64) - float(logits.max())
    return shifted - float(np.log(np.exp(shifted).sum()))


def cut(tokens: Sequence[int], size: int, bos: int | None, most: int | None = None) -> list[Chunk]:
    """Whole chunks of ``size`` tokens, ``most`` at most; what is left of the text is not used.
    Raises ModelError for a text of fewer than two."""
    if size < 4:
        raise ModelError(f"a context of {size} tokens: expected 4 or more")
    if len(tokens) < 2 * size:
        raise ModelError(
            f"the text has {len(tokens)} tokens: {2 * size} are needed, two contexts of {size}; "
            "give a longer text or a smaller context"
        )
    count = len(tokens) // size
    chunks = [
        tuple(tokens[at * size : (at + 1) * size])
        for at in range(count if most is None else min(most, count))
    ]
    return [Chunk(each if bos is None else (bos, *each[1:])) for each in chunks]


def losses_of_chunks(session: Session, chunks: Sequence[Chunk]) -> Iterator[Floats]:
    """-ln p of each chunk's scored tokens, in their order, at the speed of prompts: as
    `logits_of_chunks`, without the logits. Raises what that does."""
    session.check_predicts_texts()
    for start in range(0, len(chunks), session.sequences):
        some = chunks[start : start + session.sequences]
        found: dict[Answer, list[Floats]] = {}
        with AnswerLoop(session, None, Limits.for_throughput(session.shapes, len(some))) as loop:
            for chunk in some:
                request = Request(prompt=chunk.tokens, settings=GREEDY, limit=0, prompt_logprobs=0)
                answer = loop.answer_to(request)
                found[answer] = []
                loop.add(answer)
            for answer, item in _items(loop):
                if isinstance(item, Piece):
                    found[answer] += [of.values[:, 0].astype(np.float64) for of in item.scores]
        for chunk, parts in zip(some, found.values(), strict=True):
            yield -np.concatenate(parts)[chunk.first :]


def _items(loop: AnswerLoop) -> Iterator[tuple[Answer, Item]]:
    """What comes of all answers, to the last ending. Raises what an answer fails by."""
    while not loop.is_idle:
        loop.turn()
        for answer, items in loop.take_items().items():
            for item in items:
                if isinstance(item, Exception):
                    raise item
                yield answer, item


def logits_of_chunks(session: Session, chunks: Sequence[Chunk]) -> Iterator[Logits]:
    """The logits that score each chunk, (n_scored, n_vocab) f32, in their order.

    As many chunks as ``session`` has sequences share the steps. Raises ModelError for a token
    outside the vocabulary or while an answer is open, UnsupportedError for an encoder-decoder,
    DriverError.
    """
    session.check_predicts_texts()
    together = session.sequences
    for start in range(0, len(chunks), together):
        yield from _side_by_side(session, chunks[start : start + together])


def _side_by_side(session: Session, chunks: Sequence[Chunk]) -> list[Logits]:
    """The logits of chunks that run together: the first half is a prompt, the others are taken in
    place of the tokens that the steps choose."""
    vocab = session.parts.config.vocab_size
    found = [np.empty((len(chunk.scored), vocab), np.float32) for chunk in chunks]
    places: dict[Answer, int] = {}

    def take(answer: Answer, tokens: Sequence[int], logits: Logits) -> int:
        number = places[answer]
        chunk = chunks[number]
        found[number][len(tokens) - 1 - chunk.first] = logits
        return chunk.tokens[len(tokens)]

    limits = Limits.for_throughput(session.shapes, len(chunks))
    with AnswerLoop(session, None, limits, choose=take) as loop:
        for number, chunk in enumerate(chunks):
            session.check_tokens(chunk.scored)
            prompt = chunk.tokens[: chunk.first + 1]
            request = Request(prompt=prompt, settings=GREEDY, limit=len(chunk.scored))
            answer = loop.answer_to(request)
            places[answer] = number
            loop.add(answer)
        for _ in _items(loop):
            pass
    return found
