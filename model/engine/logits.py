"""The logits of every position of a text, by the steps that answer requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing

from urdir.model.engine.generate import Generation
from urdir.model.engine.requests.answer import Answer
from urdir.model.engine.requests.request import Request
from urdir.model.engine.sampling import Logits
from urdir.model.engine.sampling_settings import GREEDY
from urdir.model.engine.session import Session


def logits_after(
    session: Session, prompt: Sequence[int], given: Sequence[int] = ()
) -> Iterator[Logits]:
    """The logits (n_vocab,) f32 after ``prompt``, then after each of the tokens ``given``.

    Each given token takes a step and replaces the token that the step would choose. Raises
    ContextFullError if they do not fit, ModelError for a token outside the vocabulary or if the
    sequences are in use, DriverError.
    """
    session.check_room(len(prompt) + len(given))
    session.check_tokens(given)
    found: list[Logits] = []
    following = iter([*given, 0])

    def note(answer: Answer, tokens: Sequence[int], logits: Logits) -> int:
        found.append(logits)
        return next(following)

    request = Request(prompt=tuple(prompt), settings=GREEDY, limit=len(given) + 1)
    with closing(Generation(session, None, request, note).pieces()) as pieces:
        for _ in pieces:
            yield found.pop()
