"""Sequences of a session for tests: stepped by the test, or answering a request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from urdir.driver import execute
from urdir.driver.device import Device
from urdir.driver.group import Group
from urdir.driver.stream import Stream
from urdir.model.engine.batch import Output, StepShape
from urdir.model.engine.generate import Generation
from urdir.model.engine.realizar import EagerSteps
from urdir.model.engine.requests.request import Request
from urdir.model.engine.runner import Observer
from urdir.model.engine.sampling_settings import GREEDY, SamplingSettings
from urdir.model.engine.session import Session
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.weights import Weights


@contextmanager
def stepping(
    device: Device, weights: Weights, settings: SessionSettings, observer: Observer | None = None
) -> Iterator[EagerSteps]:
    """The empty sequences of a new session, for steps one at a time."""
    with (
        Session(device, weights, settings, observer=observer) as session,
        EagerSteps(session) as eager,
    ):
        yield eager


class Eager:
    """An observer that runs steps launch by launch."""

    def run(self, bound: execute.BoundPlan, stream: Stream) -> None:
        execute.run(bound, bound.device, stream)


class Numbers:
    """A vocabulary whose tokens are numbers and a space."""

    def __init__(self, *end_ids: int) -> None:
        self.end_ids = end_ids

    def is_control(self, token: int) -> bool:
        return False

    def token_bytes(self, token: int) -> bytes:
        return b"%d " % token


@contextmanager
def loaded_group(
    device_name: str, model: Any, shares: Sequence[Any]
) -> Iterator[tuple[Group, list[Weights]]]:
    """Devices, and the share of a model's weights on each."""
    with ExitStack() as owners:
        group = owners.enter_context(Group.open(device_name, len(shares)))
        yield (
            group,
            [
                owners.enter_context(Weights.load(model, share, device))
                for share, device in zip(shares, group, strict=True)
            ],
        )


def launched_steps(session: Session) -> list[int]:
    """Steps of each launch from now on that chooses tokens."""
    steps: list[int] = []
    launch = session.steps.launch

    def counting(shape: StepShape, stream: Stream) -> None:
        if shape.output is not Output.NONE:
            steps.append(shape.steps)
        launch(shape, stream)

    session.steps.launch = counting  # type: ignore[method-assign]
    return steps


def set_sampling(eager: EagerSteps, settings: SamplingSettings, sequence: int = 0) -> None:
    """How a sequence's tokens are chosen from now on by steps that draw."""
    words = settings.words(len(eager.tokens[sequence]))
    eager.session.parts.state.write_sampling(sequence, words)


def answer(
    session: Session,
    prompt: Sequence[int],
    limit: int | None = None,
    settings: SamplingSettings = GREEDY,
    end_ids: Sequence[int] = (),
) -> list[int]:
    """The tokens of one answer, whose steps run ahead."""
    request = Request(prompt=tuple(prompt), settings=settings, limit=limit)
    tokenizer: Any = Numbers(*end_ids)
    generation = Generation(session, tokenizer, request)
    for _ in generation.pieces():
        pass
    return generation.tokens


def logits_of(session: Session, tokens: Sequence[int]) -> Any:
    """The logits (n_vocab,) f32 after a whole prompt."""
    with EagerSteps(session) as eager:
        eager.feed(tokens)
        return eager.logits()[0]


def logits_of_each(session: Session, tokens: Sequence[int]) -> Any:
    """The logits (tokens, n_vocab) f32 after each of some tokens, a decode step each."""
    rows = []
    with EagerSteps(session) as eager:
        for token in tokens:
            eager.feed([token])
            rows.append(eager.logits()[0])
    return np.stack(rows)
