"""Many prompts at once, for who has them all: whole answers, in the order of the requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from urdir.model.engine.requests.limits import Limits
from urdir.model.engine.requests.request import Ending, Item, Piece, Request, TokenChoice
from urdir.model.engine.requests.service import OpenModel, Service
from urdir.model.engine.sampling_settings import SamplingSettings
from urdir.model.errors import ModelError, SettingsError


@dataclass(frozen=True, slots=True)
class Continuation:
    """A whole answer: its text, its tokens, why it ended, and the settings that it was drawn by:
    with their seed and nonce it can be repeated."""

    text: str
    choices: tuple[TokenChoice, ...]
    ending: Ending
    settings: SamplingSettings

    def __str__(self) -> str:
        return self.text


def several(prompts: object) -> list[Any]:
    """The prompts, checked to be in a sequence. Raises SettingsError."""
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        raise SettingsError(f"{prompts!r:.80} is not a list of prompts: give [TEXT, ...]")
    return [*prompts]


@contextmanager
def noting(number: int) -> Iterator[None]:
    """Add to a ModelError which of the prompts it is about."""
    try:
        yield
    except ModelError as error:
        error.add_note(f"prompts[{number}]")
        raise


def continuations(engine: OpenModel, requests: Sequence[Request]) -> Iterator[Continuation]:
    """Answer ``requests`` with as many sequences at once as the engine was opened with.

    Closing the iterator cancels what is left. Raises what the first request that fails does:
    ContextFullError, ModelError, DriverError.
    """
    patient = Limits.for_throughput(engine.session.shapes, len(requests))
    with Service(engine, engine.tokenizer, patient) as service:
        inboxes = [SimpleQueue[Item]() for _ in requests]
        for number, (request, inbox) in enumerate(zip(requests, inboxes, strict=True)):
            with noting(number):
                service.submit(request, inbox.put)
        for number, (request, inbox) in enumerate(zip(requests, inboxes, strict=True)):
            with noting(number):
                answer = _whole(inbox, request.settings)
            yield answer


def _whole(inbox: SimpleQueue[Item], settings: SamplingSettings) -> Continuation:
    pieces: list[Piece] = []
    while not isinstance(item := inbox.get(), Ending):
        if isinstance(item, Exception):
            raise item
        pieces.append(item)
    choices = tuple(choice for piece in pieces for choice in piece.choices)
    return Continuation("".join(piece.text for piece in pieces), choices, item, settings)
