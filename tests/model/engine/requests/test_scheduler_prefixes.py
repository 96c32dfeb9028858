"""Prompts that begin alike: what the scheduler finds of them, in pages and in states."""

from __future__ import annotations

from typing import Any

import pytest

from tests.model.engine.requests.toy_server import Server, ask, serve, small_limits
from tests.model.engine.requests.toy_storage import ToyRecurrent
from urdir.model.engine.requests.request import Request

pytestmark = pytest.mark.usefixtures("short_prompts_are_worth_a_state")


def test_answers_to_one_prompt_share_its_pages_and_the_rest_by_copies() -> None:
    prompt = (1, 2, 1, 1, 2, 2, 1, 2, 1, 2, 1)
    server = serve([ask(*prompt, limit=n) for n in (3, 4, 5, 6)])
    cached = [server.endings[n].cached_tokens for n in (1, 2, 3, 4)]
    assert cached == [0, 10, 10, 10]  # a step must process the last token to find the next
    assert server.scheduler.counts.cached_tokens == server.storage.pool.hits == 30
    assert server.storage.pool.queries == 4 * 10


def test_the_next_question_of_a_conversation_finds_its_beginning() -> None:
    server = serve([ask(1, 2, 1, 1, 2)])
    conversation = (1, 2, 1, 1, 2, *server.answers[1])
    number = server.add(ask(*conversation, 2, 2, 1))
    server.run()
    server.check()
    assert (
        server.endings[number].cached_tokens == len(conversation) - 1
    )  # the last was not computed


def test_nothing_is_shared_where_it_is_not_wanted() -> None:
    prompt = (1, 2, 1, 1, 2, 2, 1, 2, 1, 2, 1)
    server = serve([ask(*prompt)] * 3, share_prefixes=False)
    assert server.scheduler.counts.cached_tokens == 0
    assert server.storage.pool.kept == 0


def recurrent(*requests: Request, places: int = 8, pages: int = 200, **limits: Any) -> Server:
    """As `serve`, one after the other has come, beside states."""
    server = Server(ToyRecurrent(pages, 4, 8, places), 200, small_limits(**limits))
    for request in requests:
        server.add(request)
        server.run()
        server.check()
    return server


def cached(server: Server) -> list[int]:
    return [ending.cached_tokens for ending in server.endings.values()]


def test_states_are_kept_at_the_last_page_and_where_prompts_part() -> None:
    """The first with the same beginning has no state to begin with; those after it have."""
    same = (1, 2, 1, 1, 2, 2, 1, 2, 1)
    server = recurrent(
        *(ask(*same, *own) for own in ([1] * 8, [2] * 8, [1, 2, 2, 2, 2, 2], [1] * 9, [1] * 8))
    )
    assert cached(server) == [0, 0, 8, 16, 16]
    server = recurrent(*(ask(*same, *own) for own in ([1] * 8, [2] * 8, [2] * 8)), places=0)
    assert cached(server) == [0, 0, 0]


def test_answers_to_one_prompt_wait_for_its_state() -> None:
    server = Server(ToyRecurrent(100, 4, 8, 2), 40, small_limits())
    for limit in (3, 4, 5):
        server.add(ask(*[1, 2, 2] * 5, limit=limit))
    server.run()
    server.check()
    assert cached(server) == [0, 12, 12]


def test_states_not_used_for_longest_go_first() -> None:
    first, second, third = (ask(*[n] * 9) for n in (1, 2, 3))
    server = recurrent(first, second, first, third, first, second, places=2)
    assert cached(server) == [0, 0, 8, 0, 8, 0]
    server = recurrent(first, second, third, first, second, third, places=2)
    assert cached(server) == [0] * 6


def test_states_are_lost_with_their_pages() -> None:
    first, second = (ask(*[n] * 17, limit=3) for n in (1, 2))
    server = recurrent(first, first, second, first, first, second, pages=5)
    assert cached(server) == [0, 16, 0, 0, 16, 0]


def test_an_answer_that_was_set_back_goes_on_from_a_state() -> None:
    server = Server(ToyRecurrent(12, 4, 4, 4), 36, small_limits(ahead=1))
    for number in (1, 2):
        server.add(ask(*[number] * 13, limit=20))
    computed = []
    while server.scheduler.queued or server.scheduler.running or server.queued:
        if (plan := server.plan()) is not None:
            computed += [s for s in plan.batch.segments if s.start == 0]
        if server.queued:
            server.complete()
    server.check()
    assert server.scheduler.counts.set_back
    assert len(computed) == 2  # nothing was computed from its first token again
