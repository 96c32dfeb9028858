"""Threads wait at a closed gate, and never for ever."""

from __future__ import annotations

import random
import threading
import time

import pytest

from tests.patience import PATIENCE, wait_for
from urdir.driver.gate import Gate


class Clock:
    """Seconds, which pass when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_thread_waits_until_it_is_opened() -> None:
    gate, passed = Gate(most=1e6), threading.Event()
    gate.wait()  # it is open
    gate.close(1e6)

    def go() -> None:
        with gate.minded():
            gate.wait()
        passed.set()

    threads = [threading.Thread(target=go, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    gate.wait()  # this one need not
    assert not passed.wait(0.05)
    gate.open()
    for thread in threads:
        thread.join(PATIENCE)
    assert passed.is_set()


def test_threads_take_turns_which_begin_while_it_is_open() -> None:
    """Those that wait for their turn have not passed it."""
    gate, go, begun = Gate(most=1e6), threading.Event(), list[int]()

    def work(number: int) -> None:
        with gate.minded(), gate.turn():
            begun.append(number)
            assert go.wait(PATIENCE)

    threads = [threading.Thread(target=work, args=[n], daemon=True) for n in range(3)]
    for thread in threads:
        thread.start()
    wait_for(lambda: begun)
    gate.close(1e6)
    with gate.turn():  # this thread need not wait for one
        go.set()
    time.sleep(0.05)
    assert len(begun) == 1
    gate.open()
    for thread in threads:
        thread.join(PATIENCE)
    assert sorted(begun) == [0, 1, 2]


def test_it_opens_by_itself() -> None:
    gate = Gate(most=0.02)
    gate.close(PATIENCE)
    with gate.minded():
        gate.wait()
    assert not gate.left


def test_it_is_closed_for_the_longest_time_that_is_asked() -> None:
    clock = Clock()
    gate = Gate(1.0, clock)
    gate.close(0.25)
    assert gate.left == 0.25
    gate.close(0.125)
    assert gate.left == 0.25
    clock.now += 0.125
    gate.close(0.5)
    assert gate.left == 0.5
    clock.now += 0.5
    assert not gate.left
    gate.close(0.125)
    gate.open()
    assert not gate.left


def test_whoever_asks_now_and_then_has_it_closed_as_long_as_wanted() -> None:
    """A pause of which half is not used, and one after it, each two seconds."""
    clock = Clock()
    gate = Gate(1.0, clock)
    for _ in range(1000):
        gate.close(0.5)
        assert gate.left == pytest.approx(0.5)
        clock.now += 0.25
        gate.close(0.75)
        assert gate.left == pytest.approx(0.75)
        clock.now += 0.375
        gate.open()
        clock.now += 1.375


@pytest.mark.parametrize("opens", [0.0, 0.2, 1.0])
def test_work_goes_on_however_often_it_is_closed(opens: float) -> None:
    """It is open for half of the time at least, and never closed for longer than allowed."""
    random.seed(7)
    clock, step = Clock(), 1 / 1024
    gate = Gate(0.25, clock)
    together = row = 0.0
    for _ in range(50_000):
        gate.close(random.choice([0.01, 0.3, 1e9]))
        if random.random() < opens:
            gate.open()
        left = min(step, gate.left)
        together += left
        row = row + left if left == step else 0.0
        assert row <= 0.25 + step
        clock.now += step
    assert together <= (clock.now - 100) / 2 + 0.25
    assert together > 0.4 * (clock.now - 100) or opens
