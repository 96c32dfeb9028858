"""The same work on several things, in threads."""

from __future__ import annotations

import threading

import pytest

from urdir.driver import parallel
from urdir.driver.parallel import Task, in_threads


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel.os, "cpu_count", lambda: 4)


def test_results_are_in_order_and_made_at_once() -> None:
    together = threading.Barrier(4, timeout=20)  # broken unless four threads are there at once

    def work(number: int) -> int:
        together.wait()
        return number * number

    assert in_threads(work, range(8)) == [n * n for n in range(8)]


def test_one_item_needs_no_thread() -> None:
    assert in_threads(lambda _: threading.current_thread(), [0]) == [threading.current_thread()]
    assert in_threads(lambda n: n, []) == []


def test_the_first_failure_is_raised_when_nothing_runs_any_more() -> None:
    begun: list[int] = []
    ended: list[int] = []
    late = threading.Event()

    def work(number: int) -> None:
        begun.append(number)
        if number == 1:
            raise ValueError("number 1")
        late.wait(0.05)
        ended.append(number)
        if number == 2:
            raise ValueError("number 2")

    with pytest.raises(ValueError, match="number 1"):
        in_threads(work, range(100))
    assert sorted(begun) == sorted({*ended, 1})
    assert len(begun) < 100


def test_a_task_runs_beside_the_caller() -> None:
    go = threading.Event()
    task = Task(lambda: go.wait(20) and threading.current_thread().name, "beside")
    go.set()
    assert task.result() == "beside"
    assert not task.failed()


def test_a_task_raises_where_its_result_is_asked_for() -> None:
    def work() -> None:
        raise KeyError("missing")

    task = Task(work, "beside")
    assert task.failed()
    with pytest.raises(KeyError, match="missing"):
        task.result()
