"""The same work on several things, in threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.patience import PATIENCE
from urdir.driver import parallel
from urdir.driver.parallel import Job, Task, Work, completed, elsewhere, in_threads


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "cores", lambda: 4)


def test_results_are_in_order_and_made_at_once() -> None:
    together = threading.Barrier(4, timeout=PATIENCE)  # broken unless four are there at once

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
        in_threads(work, range(10_000))
    assert sorted(begun) == sorted({*ended, 1})
    assert len(begun) < 10_000


def test_a_task_runs_beside_the_caller() -> None:
    go = threading.Event()
    task = Task(lambda: go.wait(PATIENCE) and threading.current_thread().name, "beside")
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


def test_a_job_is_done_once_by_whoever_comes_first() -> None:
    begun, goes_on, done = threading.Event(), threading.Event(), list[str]()

    def work() -> int:
        done.append(threading.current_thread().name)
        begun.set()
        assert goes_on.wait(PATIENCE)
        return 7

    job = Job(work)
    other = Task(job.run, "other")
    assert begun.wait(PATIENCE)
    assert not job.is_done
    goes_on.set()
    assert job.result() == 7  # waited for
    assert not other.failed()
    job.run()
    assert (job.is_done, job.result(), done) == (True, 7, ["other"])


def test_a_job_that_fails_says_so_where_its_result_is_wanted() -> None:
    def work() -> int:
        raise ValueError("no such luck")

    job = Job(work)
    job.run()
    assert job.is_done
    with pytest.raises(ValueError, match="no such luck"):
        job.result()
    job.abandon(lambda _: pytest.fail("there is nothing to free"))


@pytest.mark.parametrize("runs", [True, False])
def test_a_job_that_nobody_wants(runs: bool) -> None:
    """Its result is freed, or never made."""
    made, freed = list[int](), list[int]()
    job = Job(lambda: made.append(1) or 5)
    if runs:
        job.run()
    job.abandon(freed.append)
    job.run()
    assert (made, freed) == (([1], [5]) if runs else ([], []))


def test_pieces_for_other_threads() -> None:
    """Whoever does not run them gets them done all the same; what fails is raised, and what is not
    done is not begun after the end."""
    seen: list[str] = []

    def pieces(fails: bool = False) -> Work[str]:
        for number in range(3):
            seen.append(f"{number} {threading.current_thread().name}")
            if fails and number == 2:
                raise ValueError("no such luck")
            yield None
        return "all"

    assert completed(elsewhere(pieces())) == "all"
    assert seen == [f"{n} {threading.current_thread().name}" for n in range(3)]
    seen.clear()
    assert len([*elsewhere(pieces(), lambda: seen.append("may go on"))]) == 1
    here = [f"{n} {threading.current_thread().name}" for n in range(3)]
    assert seen == ["may go on", here[0], "may go on", here[1], "may go on", here[2], "may go on"]
    seen.clear()
    with pytest.raises(ValueError, match="no such luck"):
        all(
            job is not None and not Task(job.run, "other").failed()
            for job in elsewhere(pieces(True))
        )
    assert seen == ["0 other", "1 other", "2 other"]
    seen.clear()
    work = elsewhere(pieces())
    job = next(work)
    assert job is not None
    work.close()
    job.run()
    assert not seen


def test_items_are_made_here_while_others_are_worked_on() -> None:
    """With their count, before which nothing is known of them."""
    makers, started = set[threading.Thread](), threading.Event()

    def made() -> Iterator[int]:
        for number in range(6):
            makers.add(threading.current_thread())
            if number == 5:  # the first is worked on before the last is made
                assert started.wait(PATIENCE)
            yield number

    def work(number: int) -> int:
        started.set()
        return number * number

    assert in_threads(work, made(), 6) == [n * n for n in range(6)]
    assert makers == {threading.current_thread()}
