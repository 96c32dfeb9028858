"""Several steps in one launch of a service: answers are as by single steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any

import pytest

from tests.model.stepping import Numbers, launched_steps, set_sampling
from urdir.driver.errors import DriverError
from urdir.model.engine.batch import Output, StepShape
from urdir.model.engine.realizar import EagerSteps
from urdir.model.engine.requests.request import Ending, Finish, Item, Piece, Request
from urdir.model.engine.requests.service import Service
from urdir.model.engine.run_ahead import AT_ONCE
from urdir.model.engine.sampling_settings import GREEDY, SamplingSettings
from urdir.model.engine.session import Session

DRAWN = SamplingSettings(temperature=1.5, seed=5)
PROMPT = (3, 1, 4)


@dataclass
class Opened:
    """What a service needs of an engine."""

    session: Session
    tokenizer: Any


@pytest.fixture
def launched(session: Session) -> list[int]:
    """Steps of each launch that chooses tokens."""
    return launched_steps(session)


def answer(service: Service, request: Request) -> tuple[list[int], str, Ending, int]:
    """Its tokens, text and ending, and the number of its pieces."""
    items: SimpleQueue[Item] = SimpleQueue()
    service.submit(request, items.put)
    tokens: list[int] = []
    text, pieces = "", 0
    while not isinstance(item := items.get(timeout=250), Ending):
        assert isinstance(item, Piece), item
        tokens += [choice.token for choice in item.choices]
        text += item.text
        pieces += 1
    return tokens, text, item, pieces


@pytest.mark.slow
def test_a_user_alone_gets_several_steps_at_once(session: Session, launched: list[int]) -> None:
    """And the tokens of single ones, which end where they would: at a length, an end token or a
    stop string in the midst of a launch."""
    output = Output.of(DRAWN)
    request = Request(prompt=PROMPT, settings=DRAWN, limit=12)
    with Service(Opened(session, None), None) as service:
        # the first token's step, and then one by one: the graph of several is not there yet
        tokens, _, ending, pieces = answer(service, replace(request, limit=4))
        assert set(launched) == {1}
        assert (pieces, ending.generated_tokens) == (4, 4)
        for rows in (1, 2):
            session.steps.record([StepShape(rows, session.shapes.keys(1), output, AT_ONCE)])
        del launched[:]
        several, _, ending, pieces = answer(service, request)
        assert launched == [1, AT_ONCE, AT_ONCE, 1, 1, 1]
        assert several[:4] == tokens
        assert (pieces, ending.finish, ending.generated_tokens) == (6, Finish.LENGTH, 12)
        assert service.metrics().steps == 4 + 12
    with EagerSteps(session) as eager:
        eager.feed(PROMPT)
        set_sampling(eager, DRAWN)
        singly = [eager.step((0,), output)[0] for _ in range(12)]
    assert several == singly
    at = next(n for n in range(5, 12) if singly[n] not in singly[:n])
    with Service(Opened(session, None), Numbers(singly[at])) as service:  # type: ignore[arg-type]
        tokens, _, ending, _ = answer(service, request)
        assert (tokens, ending.finish) == (singly[:at], Finish.END)
        stop = f" {singly[at - 1]} "
        tokens, text, ending, _ = answer(service, replace(request, stops=(stop,)))
        assert (ending.finish, ending.stopped_by) == (Finish.STOP, stop)
        assert f"{' '.join(map(str, singly))} ".startswith(text + stop)
        assert answer(service, replace(request, limit=5))[0] == singly[:5]
        metrics = service.metrics()
    assert (metrics.running, metrics.pages_used) == (0, 0)


@pytest.mark.slow
def test_a_newcomer_comes_in_between(session: Session, launched: list[int]) -> None:
    """It gets its own answer, and the other one goes on."""
    shapes = session.shapes
    session.steps.record([StepShape(n, shapes.keys(1, n), Output.GREEDY, AT_ONCE) for n in (1, 2)])
    long = Request(prompt=PROMPT, settings=GREEDY, limit=24)
    other = Request(prompt=(1, 5, 9, 2), settings=GREEDY, limit=7)
    with Service(Opened(session, None), None) as service:
        alone = [answer(service, request)[0] for request in (long, other)]
        items: SimpleQueue[Item] = SimpleQueue()
        begun = SimpleQueue[None]()

        def note(item: Item) -> None:
            items.put(item)
            begun.put(None)

        service.submit(long, note)
        begun.get(timeout=250)
        assert answer(service, other)[0] == alone[1]
        tokens: list[int] = []
        while isinstance(item := items.get(timeout=250), Piece):
            tokens += [choice.token for choice in item.choices]
    assert isinstance(item, Ending), item
    assert tokens == alone[0]
    assert AT_ONCE in launched


def test_what_is_prepared_may_fail(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers go on by the steps that there are."""
    failed: list[StepShape] = []

    def failing(shape: StepShape) -> bool:
        failed.append(shape)
        raise DriverError("no such luck")

    monkeypatch.setattr(session.steps, "prepare", failing)
    with Service(Opened(session, None), None) as service:
        ending = answer(service, Request(prompt=PROMPT, settings=GREEDY, limit=6))[2]
    assert ending.finish is Finish.LENGTH
    assert failed
