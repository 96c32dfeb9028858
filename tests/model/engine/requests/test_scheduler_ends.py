"""Requests that the scheduler refuses, and those that others end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.model.engine.requests.toy_server import Server, ask, small_limits
from tests.model.engine.requests.toy_storage import ToyStorage
from urdir.model.engine.requests.limits import Limits
from urdir.model.engine.requests.request import Ending, Finish, Request
from urdir.model.engine.requests.step_plan import Chosen
from urdir.model.engine.sampling_settings import GREEDY
from urdir.model.errors import BusyError, ContextFullError, ModelError, SettingsError


def test_cancelled_wherever_it_is() -> None:
    server = Server(ToyStorage(100, 4, 1), limits=small_limits())
    numbers = [server.add(ask(*[n] * 20)) for n in (1, 2, 3)]
    server.plan()
    waiting, running = server.scheduler.cancel(numbers[1]), server.scheduler.cancel(numbers[0])
    assert waiting == running == Ending(Finish.INTERRUPTED, 20, 0, 0)
    assert server.scheduler.cancel(numbers[0]) is None
    plan = server.plan()  # the slot is free, while the step that used it runs
    assert plan is not None
    assert plan.admitted == ((numbers[2], 0),)
    server.run()
    server.check()
    assert list(server.endings) == [numbers[2]]


def test_a_stop_string_is_the_callers_to_see() -> None:
    server = Server(ToyStorage(100, 4, 1), limits=small_limits())
    number = server.add(ask(1, 2, limit=None))
    for _ in range(4):
        server.plan()
        server.complete()
    ending = server.scheduler.cancel(number, Finish.STOP)
    assert ending == Ending(Finish.STOP, 2, 0, 4)
    assert server.plan() is None


def test_what_never_fits_is_refused() -> None:
    for pages, context, room in ((4, 40, 16), (40, 9, 9)):
        server = Server(ToyStorage(pages, 4, 2), context)
        with pytest.raises(ContextFullError, match=f"17 tokens exceed the context of {room} by"):
            server.add(ask(*[1] * 17))
        server.add(ask(*[1] * room, limit=None))
        server.run()
        assert server.endings[1].finish is Finish.FULL


def test_a_full_queue_says_when_to_come_back() -> None:
    now = 0.0
    server = Server(ToyStorage(10, 4, 1), limits=small_limits(queue=2), clock=lambda: now)
    for _ in range(2):
        server.add(ask(1))
    now = 7.5
    with pytest.raises(BusyError, match="2 requests are waiting already: try again in 8 s") as info:
        server.add(ask(1))
    assert info.value.retry_after == 8
    server.plan()
    server.add(ask(1))  # one has begun


def test_who_waits_too_long_is_told_but_not_who_has_begun() -> None:
    now = 0.0
    server = Server(ToyStorage(10, 4, 1), limits=small_limits(wait_seconds=30), clock=lambda: now)
    begun, late = server.add(ask(1, limit=20)), server.add(ask(1))
    server.plan()
    now = 20.0
    later = server.add(ask(1))
    now = 31.0
    errors = server.scheduler.dropped()
    assert list(errors) == [late]
    assert "waited 30 s without being begun: try again in 30 s" in str(errors[late])
    assert server.scheduler.dropped() == {}
    server.run()
    assert list(server.endings) == [begun, later]


def test_bad_requests_and_limits() -> None:
    with pytest.raises(ModelError, match="the prompt is empty"):
        Request(prompt=())
    with pytest.raises(SettingsError, match="at least 5 tokens of 4 that are wanted"):
        Request(prompt=(1,), limit=4, settings=replace(GREEDY, min_tokens=5))


@pytest.mark.parametrize("limit", [-1, 0.5, 1.5, "5", True, float("nan")])
def test_bad_lengths_are_refused(limit: Any) -> None:
    with pytest.raises(SettingsError, match=r"a limit of .* tokens: expected 0 or more"):
        Request(prompt=(1,), limit=limit)


@pytest.mark.parametrize("stops", [("",), ("a", ""), (5,), "end", ["end"], None])
def test_bad_stops_are_refused(stops: Any) -> None:
    with pytest.raises(SettingsError, match=r"stops are .*: expected texts, none empty"):
        Request(prompt=(1,), stops=stops)
    with pytest.raises(SettingsError, match="prompt_rows 100: expected a multiple of 16"):
        Limits(prompt_rows=100)
    with pytest.raises(SettingsError, match="ahead 0: expected 1 or more"):
        Limits(ahead=0)
    server = Server(ToyStorage(10, 4, 1))
    server.add(ask(1))
    plan = server.plan()
    assert plan is not None
    with pytest.raises(ModelError, match="2 choices of a step that chooses 1"):
        server.scheduler.chosen(plan, [Chosen((1,)), Chosen((2,))])
