"""Answers take turns where steps of fewer rows give more tokens/s."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest

from tests.model.engine.requests.toy_server import Server, ask, small_limits
from tests.model.engine.requests.toy_storage import ToyStorage
from urdir.model.engine.paced_rows import PacedRows
from urdir.model.memory.buckets import row_bucket


def run(paced: PacedRows, answers: int, ms: Mapping[int, float], steps: int = 40) -> list[int]:
    """The rows of steps of which those of a bucket take as long; each is learned two later."""
    chosen: list[int] = []
    for step in range(steps):
        chosen.append(paced.choose(answers))
        if step > 1:
            rows = row_bucket(chosen[step - 2])
            paced.learn(rows, ms[rows])
    return chosen


@pytest.mark.parametrize(
    ("answers", "ms", "rows"),
    [
        (9, {8: 1.49, 16: 1.76}, 8),
        (10, {8: 1.49, 16: 1.76}, 10),  # 5,682 tokens/s against 5,369
        (97, {96: 3.66, 104: 3.80}, 96),
        (103, {96: 3.66, 104: 3.80}, 103),
        (96, {88: 3.0, 96: 3.66}, 96),  # no row is unused
        (95, {88: 3.0, 96: 3.66}, 88),
        (257, {256: 7.3, 272: 8.2}, 256),
        (8, {4: 0.1, 8: 9.0}, 8),  # all have a row of their own
        (5, {4: 1.36, 8: 1.75}, 4),
        (5, {4: 1.97, 8: 1.72}, 5),
        (4, {1: 0.1, 2: 0.1, 4: 9.0}, 4),  # all of few answers have a row
        (1, {1: 1.0}, 1),
    ],
)
def test_the_rows_with_the_most_tokens_a_second(
    answers: int, ms: Mapping[int, float], rows: int
) -> None:
    chosen = run(PacedRows(), answers, ms)
    assert chosen[0] == answers  # steps of all rows are timed first
    assert set(chosen[-20:]) == {rows}


def test_one_slow_step_decides_nothing() -> None:
    paced = PacedRows()
    for step in range(40):
        rows = row_bucket(paced.choose(97))
        paced.learn(rows, {96: 3.66, 104: 3.80}[rows] * (5 if step == 10 else 1))
    assert paced.choose(97) == 96


def test_steps_that_are_not_ready_are_wished_for_and_not_chosen() -> None:
    paced, ready = PacedRows(), set[int]()
    paced.is_ready = ready.__contains__
    assert set(run(paced, 97, {104: 3.8})) == {97}
    assert paced.wished == 96
    ready.add(96)
    assert run(paced, 97, {96: 3.66, 104: 3.8})[-1] == 96
    assert paced.wished == 0


def test_fewer_rows_that_are_never_timed_are_given_up() -> None:
    """Steps that are read before the next one is planned are not timed: of logit processors."""
    paced = PacedRows()
    assert run(paced, 12, {8: 1.49, 16: 1.76}, steps=9)[-1] == 8
    chosen = [paced.choose(12) for _ in range(100)]
    assert set(chosen[-60:]) == {12}


def test_numbers_of_answers_share_times() -> None:
    paced = PacedRows()
    assert run(paced, 97, {96: 3.66, 104: 3.80})[-1] == 96
    assert paced.choose(98) == 96
    assert paced.choose(103) == 103
    assert run(paced, 96, {88: 3.60, 96: 3.66})[-1] == 96
    assert paced.choose(97) == 96


def test_the_best_of_all_timed_rows() -> None:
    """104 rows of 119 answers, until they are timed again; never fewer than half of them."""
    paced = PacedRows()
    assert run(paced, 103, {96: 3.60, 104: 3.55})[-1] == 103
    assert run(paced, 119, {104: 3.55, 112: 4.10, 120: 4.14}, steps=20)[-1] == 104
    longer = {104: 3.90, 112: 4.10, 120: 4.14}
    assert run(paced, 119, longer, steps=3)[-1] == 104
    assert run(paced, 119, longer)[-1] == 119
    for _ in range(6):
        paced.learn(48, 0.1)
    assert run(paced, 97, {96: 9.0, 104: 3.0})[-1] == 97
    assert run(paced, 95, {48: 0.1, 88: 9.0, 96: 3.0})[-1] == 48


def test_a_device_that_brakes_changes_nothing() -> None:
    """Steps of all rows take half as long again for a while: those of others did not then."""
    paced, ms = PacedRows(), {80: 3.05, 96: 3.36, 104: 3.41}
    for _ in range(6):
        paced.learn(80, 3.05)
    assert run(paced, 97, ms)[-1] == 97
    braked = {rows: 1.5 * each for rows, each in ms.items()}
    assert set(run(paced, 97, braked, steps=20)) == {97}
    assert run(paced, 97, ms)[-1] == 97


def test_what_is_timed_while_a_device_brakes_is_timed_again_soon() -> None:
    paced, ms = PacedRows(), {80: 3.05, 96: 3.36, 104: 3.41}
    for _ in range(6):
        paced.learn(80, 3.05)
    assert run(paced, 97, {80: 3.05, 96: 5.0, 104: 6.5})[-1] == 80
    assert run(paced, 97, ms, steps=140)[-1] == 97


def test_times_are_forgotten_after_a_while() -> None:
    paced = PacedRows()
    assert run(paced, 97, {96: 3.66, 104: 3.80})[-1] == 96
    assert run(paced, 97, {96: 3.79, 104: 3.80}, steps=2100)[-1] == 97


class _Eight(PacedRows):
    """Eight rows at most."""

    def choose(self, answers: int) -> int:
        return min(answers, 8)


@pytest.mark.parametrize("count", [9, 11, 15, 16])
def test_answers_take_turns(count: int) -> None:
    """After any number of steps they have had as many rows, or one less; rows are as the device
    leaves them."""
    limits = small_limits(prompt_rows=80, mixed_rows=80)
    server = Server(ToyStorage(2000, 4, 20), limits=limits, paced=_Eight())
    for number in range(count):
        server.add(ask(1 + number % 5, limit=24))
    rows, steps = Counter[int](), 0
    while not server.endings:
        plan = server.plan() if len(server.queued) < 2 else None
        if plan is None:
            server.complete()
        elif not plan.prompts and len(server.scheduler.tasks.running) == count:
            rows.update(plan.requests)
            steps += len(plan.requests) == 8
            had = [rows[number] for number in server.requests]
            assert max(had) - min(had) <= 1
    assert steps > 12
    server.run()
    server.check()
    assert len(server.endings) == count


def test_all_have_a_row_while_a_request_waits() -> None:
    server = Server(ToyStorage(2000, 4, 12), limits=small_limits(), paced=_Eight())
    for number in range(13):
        server.add(ask(1 + number % 5, limit=12))
    most = 0
    while server.scheduler.queued:
        plan = server.plan() if len(server.queued) < 2 else None
        most = max(most, 0 if plan is None else len(plan.requests))
        if plan is None:
            server.complete()
    assert most > 8
    server.run()
    server.check()
