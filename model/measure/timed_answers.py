"""Requests whose tokens are timed: `urdir bench` measures what a user of the engine gets."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from urdir.model.engine.batch import Batch, Output, Segment
from urdir.model.engine.realizar.eager import EagerSteps
from urdir.model.engine.requests.answer import Answer
from urdir.model.engine.requests.answer_loop import AnswerLoop
from urdir.model.engine.requests.limits import Limits
from urdir.model.engine.requests.request import Ending, Request
from urdir.model.engine.sampling_settings import GREEDY
from urdir.model.engine.session import Session
from urdir.model.errors import ModelError


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds in which ``tokens`` became known, ``busy`` of which the host did not wait."""

    tokens: int
    seconds: float
    busy: float


def fill(session: Session, tokens: Sequence[int], sequences: int) -> None:
    """Leave ``tokens`` in the cache for each of this many sequences, and nothing in others:
    requests that begin with these tokens resume from there. They are computed once, then copied;
    the device has done so on return."""
    with EagerSteps(session) as steps:
        steps.feed(tokens)
        steps.process(len(tokens))
        for other in range(1, sequences):
            steps.fork(0, other)
        session.steps.settled(session.stream)


def drawn_tokens(session: Session, count: int) -> list[int]:
    """Random tokens of the vocabulary, the same at every call."""
    vocab = session.parts.config.vocab_size
    return [int(token) for token in np.random.default_rng(count).integers(0, vocab, count)]


def usual_spread(sequences: int) -> int:
    """Tokens that the first of several sequences have more than the last, without drafts: these
    begin in later steps, which have room for several prompts each."""
    return min(sequences - 1, 15 + sequences // 16)


def record_prompt(session: Session, start: int, end: int) -> None:
    """Record the graphs of steps with the tokens from ``start`` to ``end`` of a prompt alone, or
    they may run by graphs of more rows."""
    shapes, needed = session.shapes, []
    while start < end:
        shape, stop = shapes.prompt(start, end, Output.GREEDY)
        needed.append(shapes.fine(shape, stop - start))
        if stop < end <= start + shapes.chunks[-1]:
            batch = Batch((), (Segment(0, start, end, chooses=True),))
            whole = shapes.of_batch(batch, end, Output.GREEDY)
            needed.append(shapes.fine(whole, end - start))
        start = stop
    session.steps.record(needed)


def time_answer(session: Session, prompt: Sequence[int], count: int) -> Timing:
    """The time from a request to the last of its ``count`` tokens."""
    with _Answers(session) as answers:
        return answers.timed(lambda: answers.add([prompt], count), lambda: answers.ended == 1)


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Seconds to the first token of an ``answer`` to ``tokens``, of which ``cached`` were found."""

    seconds: float
    tokens: int
    cached: int
    answer: tuple[int, ...]


def time_turn(session: Session, prompt: Sequence[int], count: int) -> FirstToken:
    """The time from a request for ``count`` tokens to the first of them; then the others."""
    with _Answers(session) as answers:
        timing = answers.timed(lambda: answers.add([prompt], count), lambda: answers.begun == 1)
        answers.turn_until(lambda: answers.ended == 1)
        return FirstToken(timing.seconds, len(prompt), answers.cached, tuple(answers.tokens))


def time_decoding(
    session: Session, prompts: Sequence[Sequence[int]], steps: int, spread: int
) -> Timing:
    """The time of ``steps`` steps that choose a token for each of several ``prompts``: from when
    all have their first one. The first ones to begin have up to ``spread`` tokens more; where that
    is not enough, the steps until one of them ends."""
    with _Answers(session) as answers:
        answers.add(prompts, steps + 1 + spread)
        answers.turn_until(lambda: answers.begun == len(prompts))
        wanted = answers.known + steps * len(prompts)
        timing = answers.timed(lambda: None, lambda: answers.known >= wanted or answers.ended > 0)
    if not timing.tokens:
        raise ModelError(
            f"{len(prompts)} sequences are not decoded together in {steps} steps: the first have "
            "ended when the last begin; take more steps"
        )
    return timing


def time_beside(
    session: Session,
    prompts: Sequence[Sequence[int]],
    others: Sequence[Sequence[int]],
    limits: Limits,
) -> Timing:
    """The time in which the ``others``, prompts of one step each by the ``limits``, get a token
    each beside answers to ``prompts``."""
    with _Answers(session, limits) as answers:
        answers.add(prompts, len(prompts) // 4 + 4 * len(others) + 32)
        answers.turn_until(lambda: answers.begun == len(prompts))
        wanted = answers.ended + len(others)
        return answers.timed(lambda: answers.add(others, 1), lambda: answers.ended >= wanted)


class _Answers:
    """Requests to a loop of their own."""

    def __init__(self, session: Session, limits: Limits | None = None) -> None:
        self._session = session
        self._limits = limits
        self._counts: Counter[Answer] = Counter()
        self.ended = 0
        self.cached = 0  # tokens of prompts that were found, of answers that ended
        self.tokens: list[int] = []  # all tokens, in the order in which they became known

    def __enter__(self) -> _Answers:
        shapes, sequences = self._session.shapes, self._session.sequences
        one = sequences == 1
        usual = Limits.for_one(shapes) if one else Limits.for_throughput(shapes, sequences)
        self._loop = AnswerLoop(self._session, None, self._limits or usual)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.close()

    @property
    def known(self) -> int:
        """Tokens of all answers."""
        return self._counts.total()

    @property
    def begun(self) -> int:
        """Answers that have a token."""
        return len(self._counts)

    def add(self, prompts: Sequence[Sequence[int]], limit: int) -> None:
        """Request this many tokens after each prompt, with one of the loaded adapters each."""
        loaded = self._session.adapters
        names = [] if loaded is None else [*loaded.names]
        for number, prompt in enumerate(prompts):
            own = ((names[number % len(names)], 1.0),) if names else None
            request = Request(prompt=tuple(prompt), settings=GREEDY, limit=limit, adapters=own)
            self._loop.add(self._loop.answer_to(request))

    def turn_until(self, is_done: Callable[[], bool]) -> None:
        """Turn the loop. Raises what a request fails by."""
        while not is_done():
            self._loop.turn()
            for answer, items in self._loop.take_items().items():
                for item in items:
                    if isinstance(item, Exception):
                        raise item
                    if isinstance(item, Ending):
                        self.ended += 1
                        self.cached += item.cached_tokens
                    else:
                        self._counts[answer] += len(item.choices)
                        self.tokens += [choice.token for choice in item.choices]

    def timed(self, begin: Callable[[], None], is_done: Callable[[], bool]) -> Timing:
        """Do ``begin`` and turn the loop, timed."""
        known, waited = self.known, self._loop.waited_seconds
        start = time.perf_counter()
        begin()
        self.turn_until(is_done)
        seconds = time.perf_counter() - start
        return Timing(self.known - known, seconds, seconds - self._loop.waited_seconds + waited)
