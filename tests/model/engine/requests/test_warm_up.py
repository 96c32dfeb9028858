"""Graphs that are recorded before anybody waits for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import pytest

from urdir.driver.device import Device
from urdir.driver.errors import DriverError
from urdir.model.engine.batch import Batch, Output, Segment, ShapeBuckets, StepShape
from urdir.model.engine.requests.limits import Limits
from urdir.model.engine.requests.request import Request
from urdir.model.engine.requests.scheduler import Scheduler
from urdir.model.engine.requests.step_plan import Chosen
from urdir.model.engine.requests.warm_up import WarmUp, first_shapes, likely_shapes
from urdir.model.engine.run_ahead import AT_ONCE
from urdir.model.engine.sampling_settings import GREEDY
from urdir.model.engine.session import Session
from urdir.model.memory.buckets import COMMON_ROWS, chunks_of
from urdir.model.memory.walk import Walk

SHAPES = [StepShape(rows, 64, Output.GREEDY) for rows in (1, 2, 4)]


def test_the_likeliest_shapes_come_first() -> None:
    """One user with a short conversation, who asks, and reads the answer."""
    shapes = ShapeBuckets.of(chunks_of(exact=False), 32768, 256, 16)
    likely = list(dict.fromkeys(likely_shapes(shapes)))
    first = likely[:24]
    assert shapes.decode(1, 200, Output.SAMPLE) in first
    assert shapes.decode(1, 200, Output.SAMPLE, AT_ONCE) in first
    for tokens in (5, 100, 250):
        batch = Batch((), (Segment(0, 0, tokens, chooses=True),))
        assert shapes.of_batch(batch, tokens, Output.SAMPLE) in first
    long = Batch((), (Segment(0, 0, 2048),))
    assert shapes.of_batch(long, 2048, Output.NONE) in likely[:32]
    assert shapes.of_batch(long, 30_000, Output.NONE) in likely
    both = Batch((), (Segment(0, 0, 208, chooses=True), Segment(1, 0, 200, chooses=True)))
    assert shapes.of_batch(both, 208, Output.SAMPLE) in likely[:96]
    soon = likely[:96]
    for users in (2, 4, 7, 16):
        assert shapes.decode(users, 500, Output.SAMPLE) in soon
        newcomer = Segment(users, 0, 300, chooses=True)
        assert shapes.of_batch(Batch(tuple(range(users)), (newcomer,)), 500, Output.SAMPLE) in soon
    assert shapes.decode(256, 30_000, Output.GREEDY) in likely


class Room:
    """Storage that nothing ever fills, and nothing is shared in."""

    most_tokens = 1 << 30

    def cut(self, sequence: int, start: int, end: int) -> int:
        return end

    def next_shared(self, sequence: int, length: int) -> int:
        return 0

    def match(
        self, sequence: int, tokens: Sequence[int], end: int, spare: int, scope: bytes
    ) -> int:
        return 0

    def publish(self, sequence: int, tokens: Sequence[int], scope: bytes) -> None: ...

    def reserve(self, sequence: int, start: int, end: int) -> int:
        return end

    def release(self, sequence: int, tokens: Sequence[int], reached: int, scope: bytes) -> None: ...


TOGETHER = [(64, 128), (300, 100), (100, 2048), (5, 3000)]
WALK = Walk(unit=96, step=672, room=8, most=49, rows=16)


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    ("requests", "prompt", "begin_apart", "walk"),
    [
        *((*case, begin_apart, None) for case in TOGETHER for begin_apart in (True, False)),
        *((*case, False, WALK) for case in TOGETHER[1::2]),
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
def test_whoever_comes_together_finds_graphs(
    requests: int, prompt: int, at_once: bool, begin_apart: bool, walk: Walk | None
) -> None:
    shapes = ShapeBuckets.of(chunks_of(exact=False), 32768, 256, 16, begin_apart, walk)
    limits = Limits.for_throughput(shapes, requests) if at_once else Limits.for_latency(shapes)
    likely = set(likely_shapes(shapes, [Output.GREEDY], limits.mixed_rows))
    scheduler = Scheduler(Room(), slots=256, context=32768, limits=limits)
    for _ in range(requests):
        scheduler.add(Request(prompt=(1,) * prompt, settings=GREEDY, limit=40))
    while (plan := scheduler.plan()) is not None:
        shape = shapes.of_batch(plan.batch, plan.longest, Output.GREEDY)
        if not shape.prompt:  # its graph, or a larger one until it is recorded
            shape = replace(shape, rows=next(rows for rows in COMMON_ROWS if rows >= shape.rows))
        assert shape in likely
        list(scheduler.chosen(plan, [Chosen((5,))] * len(plan.choosers)))


class Divided(Room):
    """Storage that keeps a state at the end of the last page of a prompt."""

    prompt = 0

    def cut(self, sequence: int, start: int, end: int) -> int:
        last = (self.prompt - 1) // 64 * 64
        return min(last, end) if start < last else end


@pytest.mark.parametrize("prompt", [513, 700, 1100, 2048, 2500, 4160])
def test_divided_prompts_find_graphs(prompt: int) -> None:
    shapes = ShapeBuckets.of(chunks_of(exact=False), 32768, 256, 16)
    likely = set(islice(dict.fromkeys(likely_shapes(shapes, [Output.GREEDY], divided=True)), 192))
    storage = Divided()
    storage.prompt = prompt
    limits = Limits.for_latency(shapes)
    scheduler = Scheduler(storage, slots=256, context=32768, limits=limits)
    scheduler.add(Request(prompt=(1,) * prompt, settings=GREEDY, limit=1))
    ends = []
    while (plan := scheduler.plan()) is not None:
        ends.append(plan.longest)
        assert shapes.of_batch(plan.batch, plan.longest, Output.GREEDY) in likely
        list(scheduler.chosen(plan, [Chosen((5,))] * len(plan.choosers)))
    assert (prompt - 1) // 64 * 64 in ends


@pytest.mark.parametrize("most", [(8, 8, 1), (60, 64, 5), (300, 200, 8), (4096, 131_072, 256)])
@pytest.mark.parametrize("alignment", [1, 16, 64])
def test_all_shapes_are_of_the_session(most: tuple[int, int, int], alignment: int) -> None:
    chunk, max_len, rows = most
    shapes = ShapeBuckets.of(chunks_of(False, chunk), max_len, rows, alignment)
    for shape in likely_shapes(shapes):
        assert shape.keys in shapes.lengths
        assert shape.prompt <= shapes.chunks[-1]
        assert shape.outputs <= max(shapes.rows, 1)


def finish(warm_up: WarmUp) -> None:
    """Record what is left."""
    while warm_up.left:
        warm_up.work(10)  # of a clock that may tick at each look


def test_it_takes_the_time_it_is_given(session: Session) -> None:
    warm_up, done = WarmUp(session.steps, [*SHAPES, SHAPES[0]]), list[tuple[int, int]]()
    warm_up.run(0, lambda *of: done.append(of))
    assert done == []
    assert not any(session.steps.is_recorded(shape) for shape in SHAPES)
    warm_up.run(250, lambda *of: done.append(of))
    assert all(session.steps.is_recorded(shape) for shape in SHAPES)
    assert done[-1] == (warm_up.recorded, 3) == (3, 3)
    assert warm_up.left == 0


def test_each_graph_is_told_once(session: Session) -> None:
    """However it is made: those of a warm-up, and those of steps that come by."""
    told: list[int] = []
    session.steps.on_graph = lambda: told.append(len(session.steps.graphs))
    before = len(session.steps.graphs)
    finish(WarmUp(session.steps, SHAPES[:1]))
    session.steps.make_ready(SHAPES[1])
    session.steps.make_ready(SHAPES[0])
    assert told == [before + 1, before + 2]


def test_what_a_first_request_needs_takes_the_time_it_needs(session: Session) -> None:
    needed, done = [SHAPES[2], SHAPES[1], SHAPES[2]], list[tuple[int, int]]()
    warm_up = WarmUp(session.steps, SHAPES, needed=needed)
    warm_up.run(0, lambda *of: done.append(of))
    assert done[-1] == (warm_up.recorded, 3)
    assert [session.steps.is_recorded(shape) for shape in SHAPES[1:]] == [True, True]


def test_other_graphs_are_recorded_while_one_waits(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session.steps, "waits", lambda shape: shape == SHAPES[0])
    warm_up = WarmUp(session.steps, SHAPES)
    while warm_up.work(10) or warm_up.left > 1:
        pass
    assert [session.steps.is_recorded(shape) for shape in SHAPES] == [False, True, True]
    monkeypatch.undo()
    finish(warm_up)
    assert session.steps.is_recorded(SHAPES[0])


def test_one_users_first_request_needs_nothing_more() -> None:
    """A prompt of up to 256 tokens, and an answer that stays below as many."""
    shapes = ShapeBuckets.of(chunks_of(exact=False), 4096, 64, 16)
    needed = set(first_shapes(shapes))
    for tokens in (1, 17, 128, 255):
        prompt = Batch((), (Segment(0, 0, tokens, chooses=True),))
        shape = shapes.of_batch(prompt, tokens, Output.SAMPLE)
        padded = (replace(shape, rows=n, prompt=n) for n in shapes.chunks if n >= shape.rows)
        assert needed.intersection(padded)
    assert {shapes.decode(1, 256, Output.SAMPLE, steps) for steps in (1, AT_ONCE)} <= needed
    assert len(needed) < 6


def test_it_takes_no_place_of_others(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor the last quarter of the memory. Which of two graphs comes first depends on threads."""
    monkeypatch.setattr(Device, "kernel_nbytes", 0)
    session.steps.record(SHAPES[:1])
    monkeypatch.setattr(session.steps._graphs, "most_bytes", session.steps.graph_bytes * 2)
    warm_up = WarmUp(session.steps, SHAPES)
    finish(warm_up)
    first, *others = (session.steps.is_recorded(shape) for shape in SHAPES)
    assert first
    assert sorted(others) == [False, True]


@pytest.mark.parametrize("error", [DriverError("no such luck"), IndexError("ours")])
def test_it_ends_where_something_fails(
    session: Session, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def failing(shape: StepShape) -> bool:
        raise error

    monkeypatch.setattr(session.steps, "prepare", failing)
    warm_up = WarmUp(session.steps, SHAPES)
    finish(warm_up)
    assert (warm_up.recorded, warm_up.left) == (0, 0)
