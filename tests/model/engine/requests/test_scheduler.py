"""What the scheduler puts into a step: rows of answers and chunks of prompts."""

from __future__ import annotations

import time
from collections import Counter

from tests.model.engine.requests.toy_server import Server, answer_to, ask, serve, small_limits
from tests.model.engine.requests.toy_storage import ToyStorage
from urdir.model.engine.batch import Batch, Segment
from urdir.model.engine.requests.limits import Limits
from urdir.model.engine.requests.request import Finish, Request
from urdir.model.engine.requests.scheduler import Scheduler
from urdir.model.engine.requests.step_plan import Chosen, StepPlan
from urdir.model.memory.buckets import chunks_of
from urdir.model.memory.walk import Walk


def test_rows_of_answers_and_chunks_of_prompts_share_steps() -> None:
    server = Server(ToyStorage(100, 4, 4), limits=small_limits())
    first = server.add(ask(1, 2, 3))
    second = server.add(ask(*[1] * 18))
    plans = [server.plan()]
    assert plans[0] == StepPlan(
        Batch((), (Segment(0, 0, 3, chooses=True), Segment(1, 0, 8))),
        (),
        (),
        (first, second),
        ((first, 0), (second, 1)),
    )
    assert (plans[0].places, plans[0].longest) == ([(0, 2)], 8)
    assert plans[0].choosers == (first,)
    plan = server.plan()  # one ahead: the first answer's token is not known yet
    batch = Batch((0,), (Segment(1, 8, 12),))
    assert plan == StepPlan(batch, (first,), (3,), (second,), ())
    assert (plan.places, plan.longest) == ([(0, 3)], 12)
    assert plan.choosers == (first,)
    server.complete()
    plan = server.plan()
    assert plan is not None
    assert (plan.positions, plan.batch.segments[0].end) == ((4,), 16)
    server.complete()
    plan = server.plan()
    assert plan is not None
    assert plan.batch.segments == (Segment(1, 16, 18, chooses=True),)
    assert plan.choosers == (first, second)


def test_prompts_of_a_step_walk_no_further_than_one_sequence_may() -> None:
    walk = Walk(unit=4, step=16, room=1, most=2, rows=4)
    limits = small_limits(prompt_rows=64, share_prefixes=False, walk=walk)
    server = Server(ToyStorage(100, 4, 4), limits=limits)
    for length in (9, 17, 1, 5):
        server.add(ask(*[1] * length))
    plan = server.plan()
    assert plan is not None
    assert [segment.end for segment in plan.batch.segments] == [9, 17]  # 12 and 20
    assert [number for number, _ in plan.admitted] == [1, 2, 3]  # who has a slot waits for a step
    server.run()
    server.check()


def test_no_row_is_wasted_on_an_answer_of_known_length() -> None:
    assert serve([ask(1, 2), ask(2, 1, limit=1), ask(1, limit=9)]).wasted == 0
    full = serve([ask(*[2] * 30, limit=None)])  # up to the context
    assert (full.wasted, full.endings[1].finish) == (0, Finish.FULL)
    assert full.endings[1].generated_tokens == 40 + 1 - 30


def test_an_end_token_wastes_one_row() -> None:
    request = Request(prompt=(2, 1, 2))
    assert answer_to(request, 40)[1] is Finish.END
    assert serve([request]).wasted == 1


def test_steps_repeat_where_nothing_changes() -> None:
    """Not beside a prompt, while another waits, or past an answer's end."""
    server = Server(ToyStorage(100, 4, 2), limits=small_limits(), more=3)
    first = server.add(ask(1, 2, limit=9))
    assert server.plan() is not None
    assert len(server.queued) == 1  # a prompt's step is alone
    second = server.add(ask(1, limit=9))
    server.plan()
    assert len(server.queued) == 2  # beside a prompt's, too
    server.plan()
    *_, plan, one, two, three = server.queued
    assert plan.requests == one.requests == three.requests == (first, second)
    assert (plan.positions, one.positions, two.positions) == ((3, 1), (4, 2), (5, 3))
    assert server.scheduler.counts.steps == 6
    assert server.scheduler.end(plan) == 2 + 9 - 1
    server.add(ask(2, limit=2))
    server.plan()
    assert len(server.queued) == 7  # one waits for a slot
    server.run()
    server.check()
    assert server.wasted == 0

    server = Server(ToyStorage(3, 4, 2), limits=small_limits(), more=3)
    server.add(ask(1, 1, 1, limit=8))
    for queued in (1, 5, 6, 7, 8, 8):  # up to the eighth token
        server.plan()
        assert len(server.queued) == queued
    server.run()
    server.check()
    assert server.wasted == 0


def test_an_end_token_wastes_the_steps_of_its_launch() -> None:
    request = Request(prompt=(2, 1, 2))
    server = Server(ToyStorage(100, 4, 2), limits=small_limits(), more=3)
    server.add(request)
    server.run()
    server.check()
    length = server.endings[1].generated_tokens + 1  # with the end token
    assert 0 < server.wasted <= 8
    assert (1 + server.wasted + length) % 4 == 2  # a single step, and launches of four


def test_a_constrained_answer_waits_for_each_token() -> None:
    server = Server(ToyStorage(100, 4, 4), limits=small_limits())
    server.add(ask(1, 2, constraint=object()))
    free = server.add(ask(1, 2))
    server.plan()
    plan = server.plan()
    assert plan is not None
    assert plan.requests == (free,)
    server.complete()
    plan = server.plan()
    assert plan is not None
    assert plan.requests == (1, free)
    server.run()
    server.check()


def test_equal_answers_reserve_in_different_steps() -> None:
    limits = small_limits(ahead=16, prompt_rows=64)
    server = Server(ToyStorage(400, 4, 16), 100, limits)
    reserve, steps = server.storage.reserve, Counter[int]()

    def counted(sequence: int, start: int, end: int) -> int:
        steps[server.scheduler.counts.steps] += 1
        return reserve(sequence, start, end)

    server.storage.reserve = counted  # type: ignore[method-assign]
    for _ in range(16):
        server.add(ask(1, limit=80))
    server.run()
    server.check()
    for first in sorted(steps)[:2]:  # of all prompts, and of all answers
        del steps[first]
    assert len(steps) > 40
    assert max(steps.values()) <= 2


def test_a_prompt_alone_takes_two_steps_where_these_are_faster() -> None:
    """1,100 tokens: 1,024 and 76, rather than one step of 1,536 rows; not beside another one."""
    limits = Limits(chunks=chunks_of(exact=False))
    for others, ends in ((0, [1024, 1100]), (1, [1100])):
        scheduler = Scheduler(ToyStorage(400, 16, 4), slots=4, context=4000, limits=limits)
        for _ in range(1 + others):
            scheduler.add(Request(prompt=(1,) * 1100))
        plans = [plan for plan in (scheduler.plan(), scheduler.plan()) if plan is not None]
        segments = [plan.batch.segments[0] for plan in plans if 1 in plan.prompts]
        assert [segment.end for segment in segments] == ends
        assert [segment.chooses for segment in segments] == [end == 1100 for end in ends]


def test_planning_takes_far_less_than_a_step() -> None:
    """256 answers go on in a step: its plan takes less than half a millisecond of the host."""
    scheduler = Scheduler(ToyStorage(20_000, 16, 256), slots=256, context=1000)
    for _ in range(256):
        scheduler.add(Request(prompt=(1,)))
    seconds = []
    for _ in range(200):
        start = time.thread_time()
        plan = scheduler.plan()
        seconds.append(time.thread_time() - start)
        assert plan is not None
        list(scheduler.chosen(plan, [Chosen((1,))] * len(plan.choosers)))
    assert plan is not None
    assert len(plan.batch.decode) == 256
    assert sorted(seconds)[len(seconds) // 2] < 0.5e-3
