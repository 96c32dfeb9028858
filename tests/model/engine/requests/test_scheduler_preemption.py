"""Too few pages: which requests the scheduler admits, and which it sets back."""

from __future__ import annotations

import numpy as np

from tests.model.engine.requests.toy_server import Server, ask, serve, small_limits
from tests.model.engine.requests.toy_storage import ToyStorage


def test_a_small_pool_sets_the_youngest_back_and_all_answers_come_out_right() -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 5, rng.integers(3, 12)).tolist() for _ in range(12)]
    server = serve([ask(*p, limit=20) for p in prompts], pages=11, slots=6, ahead=2)
    assert server.scheduler.counts.preemptions > 3
    assert server.begun == list(range(1, 13))
    large = serve([ask(*p, limit=20) for p in prompts])
    assert large.scheduler.counts.preemptions == 0
    assert large.answers == server.answers


def test_prompts_whose_tokens_are_scored_are_set_back_and_go_on() -> None:
    """Each token is scored once, whatever was computed again: `Server.check_answers`. A prompt that
    was cached before is computed too."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 5, rng.integers(1, 16)).tolist() for _ in range(9)]
    asked = [
        ask(*prompt, limit=int(rng.integers(0, 14)), prompt_logprobs=likely)
        for prompt in (*prompts, *prompts)
        for likely in (0, None)
    ]
    server = serve(asked, pages=11, slots=6, ahead=2, queue=len(asked))
    assert server.scheduler.counts.preemptions > 3
    assert any(server.endings[number].cached_tokens for number in server.endings)


def test_a_request_goes_first_that_was_preempted() -> None:
    server = Server(ToyStorage(6, 4, 4), context=24, limits=small_limits(ahead=1))
    old, young = server.add(ask(*[1] * 8, limit=16)), server.add(ask(*[2] * 8, limit=16))
    while not server.scheduler.counts.preemptions:
        server.plan()
        server.complete()
    late = server.add(ask(1, 1, limit=1))
    server.run(1)
    server.check()
    assert server.admitted == [old, young, young, late]


def test_none_is_admitted_that_would_soon_set_another_back() -> None:
    server = Server(ToyStorage(7, 4, 4), limits=small_limits(ahead=8))
    server.add(ask(*[1] * 8, limit=16))
    server.add(ask(*[2] * 14, limit=2))  # its four pages leave one free: not room for 8 tokens
    server.run()
    server.check()
    assert (server.admitted, server.scheduler.counts.preemptions) == ([1, 2], 0)


def test_what_was_preempted_waits_for_its_tokens_under_way() -> None:
    server = Server(ToyStorage(6, 4, 4), context=24, limits=small_limits(ahead=1))
    old, young = server.add(ask(*[1] * 8, limit=16)), server.add(ask(*[2] * 8, limit=16))
    while not server.scheduler.counts.preemptions:
        server.plan()
    server.scheduler.cancel(old)  # there is room for the other again
    assert server.plan() is None
    while server.queued:
        server.complete()
    server.run()
    server.check()
    assert server.admitted == [old, young, young]
