"""Prompts that begin alike: what the scheduler finds of them, in pages and in states."""

from __future__ import annotations

from typing import Any

import pytest

from tests.model.engine.requests.toy_server import Server, ask, serve, small_limits
from tests.model.engine.requests.toy_storage import ToyPlaces, ToyRecurrent, ToyStorage
from urdir.model.engine.requests.request import Ending, Finish, Request

pytestmark = pytest.mark.usefixtures("short_prompts_are_worth_a_state")

PROMPT = (1, 2, 1, 1, 2, 2, 1, 2, 1, 2, 1)


def test_answers_to_one_prompt_share_its_pages_and_the_rest_by_copies() -> None:
    server = serve([ask(*PROMPT, limit=n) for n in (3, 4, 5, 6)])
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


def test_a_prompt_alone_is_computed_for_later_ones() -> None:
    """Beside others, in parts, and again, where its last token alone is new."""
    server = serve([ask(*PROMPT, *PROMPT, 2, limit=0), ask(2, 1, limit=3)])
    assert server.answers[1] == []
    assert server.endings[1] == Ending(Finish.LENGTH, 23, 0, 0)
    assert server.scheduler.counts.generated_tokens == 3
    more = [server.add(ask(*PROMPT, *PROMPT, 2, *end, limit=n)) for end, n in (((1,), 2), ((), 0))]
    server.run()
    server.check()
    assert [server.endings[number].cached_tokens for number in more] == [23, 22]


def test_nothing_is_shared_where_it_is_not_wanted() -> None:
    server = serve([ask(*PROMPT)] * 3, share_prefixes=False)
    assert server.scheduler.counts.cached_tokens == 0
    assert server.storage.pool.kept == 0


@pytest.mark.parametrize("kind", ["pages", "states", "places"])
def test_a_scope_finds_nothing_of_another(kind: str) -> None:
    """Whether one has ended, or both come at once: then neither waits for the other's steps."""
    storage = {
        "pages": lambda: ToyStorage(200, 4, 3),
        "states": lambda: ToyRecurrent(200, 4, 3, 8),
        "places": lambda: ToyPlaces(1, 60),
    }[kind]()
    server = Server(storage, 40, small_limits(prompt_rows=48))
    for scope in (b"a", b"b", b"", b"a", b"b", b""):
        server.add(ask(*PROMPT, scope=scope))
        server.run()
        server.check()
    if kind == "places":  # the one place has what the last scope has left there
        assert cached(server) == [0] * 6
    else:
        assert [found > 0 for found in cached(server)] == [False] * 3 + [True] * 3


@pytest.mark.parametrize("kind", [ToyStorage, ToyRecurrent])
def test_nobody_waits_for_what_another_scope_computes(kind: Any) -> None:
    storage = ToyStorage(200, 4, 4) if kind is ToyStorage else ToyRecurrent(200, 4, 4, 8)
    server = Server(storage, 40, small_limits(prompt_rows=48))
    for scope in (b"a", b"b", b"a"):
        server.add(ask(*PROMPT, scope=scope))
    plan = server.plan()
    assert plan is not None
    assert [number for number, _ in plan.admitted] == [1, 2]  # the third waits for the first
    server.run()
    server.check()
    first, second, third = (server.endings[number].cached_tokens for number in (1, 2, 3))
    assert (first, second) == (0, 0)
    assert third > 0


def test_scopes_take_each_other_s_pages_the_least_recently_used_first() -> None:
    """Nobody keeps pages by having asked often, or in many scopes."""
    server = Server(ToyStorage(6, 4, 1), 24, small_limits())
    for scope in (b"a", b"b", b"a", b"c", b"a", b"b"):
        server.add(ask(*PROMPT, scope=scope, limit=2))
        server.run()
        server.check()
    assert [found > 0 for found in cached(server)] == [False, False, True, False, True, False]


def test_what_many_scopes_leave_is_bounded_by_the_pages() -> None:
    server = Server(ToyRecurrent(12, 4, 2, 3), 40, small_limits())
    for number in range(100):
        server.add(ask(*PROMPT, scope=b"%d" % number, limit=2))
        server.run()
    server.check()
    storage = server.storage
    assert isinstance(storage, ToyRecurrent)
    assert storage.shared_states is not None
    assert 0 < len(storage.pool.tree.roots) <= 12
    assert 0 < len(storage.shared_states._roots) <= 3


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


def test_an_answer_that_was_preempted_goes_on_from_a_state() -> None:
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
    assert server.scheduler.counts.preemptions
    assert len(computed) == 2  # nothing was computed from its first token again
