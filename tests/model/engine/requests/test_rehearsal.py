"""A first step's host work, done for none: nothing of it shows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.patience import wait_for
from urdir.model.engine.requests.answer_loop import AnswerLoop
from urdir.model.engine.requests.limits import Limits
from urdir.model.engine.requests.request import Piece, Request
from urdir.model.engine.requests.service import Service
from urdir.model.engine.sampling_settings import SamplingSettings
from urdir.model.engine.session import Session
from urdir.model.memory.storage import SequenceStorage

DRAWN = SamplingSettings(temperature=1.3, top_k=0, top_p=1.0, min_p=0.0, seed=11)
PROMPTS = ((3, 1, 4, 1, 5), (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8), (7,))


def tokens(loop: AnswerLoop, prompt: Sequence[int], before_turn: Callable[[], None]) -> list[int]:
    answer = loop.answer_to(Request(prompt=tuple(prompt), settings=DRAWN, limit=9))
    loop.add(answer)
    found: list[int] = []
    while not loop.is_idle:
        before_turn()
        loop.turn()
        for item in loop.take_items().get(answer, ()):
            if isinstance(item, Piece):
                found += [choice.token for choice in item.choices]
    return found


def test_answers_are_the_same_and_nothing_is_counted(session: Session) -> None:
    """Between answers; while one is open nothing is done."""
    with AnswerLoop(session, None, Limits.for_latency(session.shapes)) as loop:
        expected = [tokens(loop, prompt, lambda: None) for prompt in PROMPTS]
        counted = loop.metrics()
    session.cache.prefixes.evict()  # type: ignore[union-attr]
    with AnswerLoop(session, None, Limits.for_latency(session.shapes)) as loop:
        found = []
        for prompt in PROMPTS:
            loop.rehearse()
            loop.rehearse()
            assert loop.is_idle
            assert not loop.take_items()
            found.append(tokens(loop, prompt, loop.rehearse))
        assert found == expected
        after = loop.metrics()
    others: Any = {  # which depend on when graphs are recorded
        name: getattr(counted, name) for name in ("steps", "queue_seconds", "graph_bytes")
    }
    assert replace(after, **others) == counted


def test_rows_of_a_prompt_are_written(session: Session) -> None:
    """So it goes as far as a launch; where a request comes meanwhile, not as far."""
    with AnswerLoop(session, None, Limits.for_latency(session.shapes)) as loop:
        before = session.parts.state.positions()
        loop.rehearse(lambda: True)
        assert loop.is_idle
        assert session.parts.state.positions() == before
        loop.rehearse()
        assert session.parts.state.positions() == {0: session.context - 2}


@pytest.mark.parametrize("is_recurrent", [False, True])
def test_a_prompt_whose_sequence_leaves_states_is_not_written(
    session: Session, monkeypatch: pytest.MonkeyPatch, is_recurrent: bool
) -> None:
    """What is kept of one would be of no prompt."""
    monkeypatch.setattr(SequenceStorage, "has_states", is_recurrent)
    before = session.parts.state.positions()
    with AnswerLoop(session, None, Limits.for_latency(session.shapes)) as loop:
        loop.rehearse()
        assert (session.parts.state.positions() == before) == is_recurrent


def test_an_idle_service_does_it(session: Session) -> None:
    opened: Any = SimpleNamespace(session=session, tokenizer=None)
    with Service(opened, None) as service:
        session.parts.state.write_rows([(1, 2)])

        def is_rehearsed() -> bool:
            service.expect()
            threading.Event().wait(0.01)  # with more work there it is left out
            return service._between(session.parts.state.positions) == {0: session.context - 2}

        wait_for(is_rehearsed)
