"""Who waits for a first token does not wait for graphs of others."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from tests.model.engine.requests.paper_session import PaperSession
from tests.patience import wait_for
from urdir.driver.gate import Gate
from urdir.model.engine.batch import Output, ShapeBuckets, StepShape
from urdir.model.engine.requests.answer import Answer
from urdir.model.engine.requests.request import Ending, Item, Request
from urdir.model.engine.requests.service import Service
from urdir.model.engine.requests.warm_up import WarmUp
from urdir.model.engine.sampling_settings import GREEDY
from urdir.model.engine.session import Session
from urdir.model.errors import ModelError
from urdir.model.memory.buckets import chunks_of

SHAPES = [StepShape(rows, 256, Output.GREEDY) for rows in (1, 2, 4)]
REQUEST = Request(prompt=(3, 1, 4), settings=GREEDY, limit=8)


def paper() -> PaperSession:
    return PaperSession(ShapeBuckets.of(chunks_of(exact=False), 1024, 4, 16), 1024, 4)


def test_a_first_token_is_awaited_until_it_is_there() -> None:
    with paper().answers() as loop:
        answers = [loop.answer_to(REQUEST) for _ in range(2)]
        assert not loop.awaits
        for answer in answers:
            loop.add(answer)
            assert loop.awaits
        while loop.awaits:
            assert not any(isinstance(item, Ending) for item in items_of(loop.take_items()))
            loop.turn()
        assert not loop.is_idle
        assert {*loop.take_items()} == {*answers}
        while not loop.is_idle:
            loop.turn()
            assert not loop.awaits


def items_of(taken: Any) -> list[Item]:
    return [item for items in taken.values() for item in items]


@pytest.mark.parametrize("how", ["cancelled", "failed", "rejected", "lost"])
def test_nobody_waits_for_an_answer_that_has_ended(how: str) -> None:
    with paper().answers() as loop:
        other, answer = loop.answer_to(REQUEST), loop.answer_to(REQUEST)
        if how == "rejected":
            long = Answer(
                Request(prompt=(1,) * 5000, settings=GREEDY, limit=1), (), None, lambda _: None
            )
            loop.add(long)
        else:
            loop.add(answer)
            assert loop.awaits
        if how == "cancelled":
            loop.cancel(answer)
        elif how == "failed":
            loop._answers.fail(answer, ModelError("no"))
        elif how == "lost":
            loop._answers.fail_all(ModelError("no"))
        assert not loop.awaits
        loop.add(other)
        assert loop.awaits


class Noted(Gate):
    """A gate that stays closed until it is opened, and notes what is asked."""

    def __init__(self) -> None:
        super().__init__(most=1e9, clock=lambda: 0.0)
        self.asked: list[str] = []

    def close(self, seconds: float) -> None:
        self.asked.append("close")
        super().close(seconds)

    def open(self) -> None:
        self.asked.append("open")
        super().open()


def test_nothing_is_prepared_while_it_is_closed(session: Session) -> None:
    """Neither by the thread that turns steps nor by others; then all of it."""
    gate = session.steps.gate = Noted()
    warm_up = WarmUp(session.steps, SHAPES)
    gate.close(1)
    assert not warm_up.work(1.0)
    assert not session.steps._begun
    gate.open()
    while not session.steps.is_waiting:
        warm_up.work(0)
    gate.close(1)
    gate.open()
    while warm_up.left:
        warm_up.work(0.001)
    assert all(session.steps.is_recorded(shape) for shape in SHAPES)


def test_threads_stop_within_a_plan(session: Session) -> None:
    """Which is made in small pieces; a step that needs it does not wait for the gate."""
    gate = session.steps.gate = Noted()
    passes: list[int] = []
    wait = gate.wait

    def close_later() -> None:
        passes.append(len(passes))
        if len(passes) == 12:
            gate.close(1)
        wait()

    gate.wait = close_later  # type: ignore[method-assign]
    assert session.steps.prepare(SHAPES[2])
    wait_for(lambda: len(passes) == 12)
    assert session.steps.waits(SHAPES[2])
    session.steps.graph(SHAPES[2])
    assert len(passes) > 12
    assert session.steps.is_recorded(SHAPES[2])


def test_a_service_closes_it_for_first_tokens(session: Session) -> None:
    """And while the host has something to do; it is open while only the device has."""
    gate = session.steps.gate = Noted()
    engine: Any = SimpleNamespace(session=session, tokenizer=None)
    seen: list[tuple[bool, bool]] = []
    items: list[Item] = []
    with Service(engine, None) as service:
        wait = service._loop._launcher._ahead.wait

        def noted(*args: Any) -> Any:
            seen.append((service._loop.awaits, gate.left > 0))
            return wait(*args)

        service._loop._launcher._ahead.wait = noted  # type: ignore[method-assign]
        service.submit(REQUEST, items.append)
        assert gate.asked[-1] == "close" or seen
        wait_for(lambda: items and isinstance(items[-1], Ending))
    assert seen[0] == (True, True)
    assert (False, False) in seen
    assert not any(awaits and not closed for awaits, closed in seen)


def test_a_service_closes_it_for_a_request_that_is_being_read(session: Session) -> None:
    """Unless it is busy: then it waits for a first token, or other threads have their turn."""
    gate = session.steps.gate = Noted()
    engine: Any = SimpleNamespace(session=session, tokenizer=None)
    closed: list[bool] = []
    items: list[Item] = []

    def expect() -> None:
        gate.open()
        service.expect(lambda: True)
        closed.append(gate.left > 0)

    with Service(engine, None) as service:
        wait_for(lambda: gate.asked)  # by the service, which is idle
        expect()
        wait = service._loop._launcher._ahead.wait

        def expecting(*args: Any) -> Any:
            expect()
            return wait(*args)

        service._loop._launcher._ahead.wait = expecting  # type: ignore[method-assign]
        service.submit(REQUEST, items.append)
        wait_for(lambda: items and isinstance(items[-1], Ending))
    first, *others = closed
    assert first
    assert others
    assert not any(others)


def test_a_service_looks_for_a_request_that_is_being_read(session: Session) -> None:
    """In its own thread, until something is found; not while something is open."""
    engine: Any = SimpleNamespace(session=session, tokenizer=None)
    looked: list[str] = []
    busy: list[bool] = []
    items: list[Item] = []

    def look() -> bool:
        looked.append(threading.current_thread().name)
        return len(looked) == 3

    with Service(engine, None) as service:
        assert service.expect(look)
        wait_for(lambda: len(looked) == 3)
        wait = service._loop._launcher._ahead.wait

        def expecting(*args: Any) -> Any:
            busy.append(service.expect(look))
            return wait(*args)

        service._loop._launcher._ahead.wait = expecting  # type: ignore[method-assign]
        service.submit(REQUEST, items.append)
        wait_for(lambda: items and isinstance(items[-1], Ending))
    assert looked == ["service"] * 3
    assert busy
    assert not any(busy)


def test_a_service_that_others_came_to_does_not_look(session: Session) -> None:
    """What it expected comes while it is busy."""
    engine: Any = SimpleNamespace(session=session, tokenizer=None)
    looked: list[bool] = []
    items: list[Item] = []

    def look() -> bool:
        looked.append(True)
        return True

    with Service(engine, None) as service:
        answer = service.answer_to(REQUEST, items.append)

        def come() -> None:
            service._loop.add(answer)
            service._look(look)

        service._inbox.put(come)
        wait_for(lambda: items and isinstance(items[-1], Ending))
    assert not looked


def test_a_service_goes_on_where_a_request_is_late(session: Session) -> None:
    """Or where another thread has read it."""
    engine: Any = SimpleNamespace(session=session, tokenizer=None)
    items: list[Item] = []
    with Service(engine, None) as service:
        assert service.expect(lambda: False)
        service.submit(REQUEST, items.append)
        wait_for(lambda: items and isinstance(items[-1], Ending))


def test_work_is_done_while_the_device_has_some(session: Session) -> None:
    """Of a busy service, too: graphs for crowds come while there are some."""
    engine: Any = SimpleNamespace(session=session, tokenizer=None)
    warm_up = WarmUp(session.steps, SHAPES)
    items: list[Item] = []
    with Service(engine, None) as service:
        service._loop._launcher._use_wait = lambda: warm_up.work(0.001)
        while warm_up.left:
            service.submit(REQUEST, items.append)
            wait_for(lambda: items and isinstance(items[-1], Ending))
            items.clear()
    assert all(session.steps.is_recorded(shape) for shape in SHAPES)
