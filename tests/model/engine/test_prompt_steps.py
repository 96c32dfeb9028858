"""Into which steps prompts alone are divided, by what a toy device's steps take."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from urdir.model.engine.prompt_steps import Graph, PromptSteps
from urdir.model.memory.buckets import CHUNKS, WHOLE_CHUNK, fine_chunk

OTHERS = (520, 780, 1000, 1100, 1500, 2000, 3000)
FIRSTS = (512, 768, 1024, 1536, 2048)
Seconds = Callable[[int, int], float]


def fine_rows(rows: int) -> int:
    return padded(rows) if rows <= WHOLE_CHUNK else min(padded(rows), fine_chunk(rows))


def padded(rows: int) -> int:
    return CHUNKS[bisect_left(CHUNKS, rows)]


def even(rows: int, keys: int) -> float:
    """What a step takes besides is what 128 rows take."""
    return 2e-5 * (rows + 128)


def uneven(rows: int, keys: int) -> float:
    """From 1,025 rows on products take another round."""
    return even(rows, keys) + (5e-3 if rows > 1024 else 0)


def mixture(rows: int, keys: int) -> float:
    """A step reads many experts, however many rows it has."""
    return 1.5e-5 * (rows + 400) + 2e-9 * rows * (keys - rows / 2)


class Toy:
    """Graphs of few numbers of rows, and those that prompts wish for four times, as they do for
    that of a step with 3 % of padding."""

    def __init__(self, steps: PromptSteps, seconds: Seconds, all_recorded: bool = False) -> None:
        self.steps, self.seconds = steps, seconds
        self.recorded = set(CHUNKS)
        self.all_recorded = all_recorded
        self.wishes: list[int] = []

    def graph(self, start: int, stop: int) -> Graph:
        rows, least = padded(stop - start), fine_rows(stop - start)
        if self.all_recorded or least in self.recorded:
            rows = least
        return Graph(rows, least, is_recorded=rows in self.recorded or self.all_recorded)

    def run(self, tokens: int) -> tuple[list[int], float]:
        """The rows of the steps of a prompt, and what it takes."""
        start, rows, took = 0, list[int](), 0.0
        while start < tokens:
            way = self.steps.choose(start, tokens, self.graph)
            self.wishes += [fine_rows(stop - first) for first, stop in way.wished]
            graph = self.graph(start, way.stop)
            self.wishes += [graph.least] * (graph.rows > 1.03 * graph.least)
            self.recorded |= {of for of in self.wishes if self.wishes.count(of) >= 4}
            assert start < way.stop <= min(tokens, start + 2048)
            rows.append(graph.rows)
            seconds = self.seconds(rows[-1], way.stop)
            self.steps.learn(rows[-1], way.stop, seconds)
            took += seconds
            start = way.stop
        return rows, took


@pytest.mark.parametrize(
    ("seconds", "tokens", "rows"),
    [
        (even, 513, [528]),
        (even, 769, [784]),
        (even, 1100, [1120]),
        (uneven, 1000, [1024]),  # 1,008 rows take 1.4 % less
        (uneven, 1025, [1024, 8]),
        (uneven, 1100, [1024, 96]),
        (mixture, 1100, [1120]),
        (mixture, 2100, [2048, 64]),
    ],
)
def test_the_steps_that_take_the_least(seconds: Seconds, tokens: int, rows: list[int]) -> None:
    """After some prompts, with the graphs that they wished for."""
    toy = Toy(PromptSteps(FIRSTS), seconds)
    for other in (*OTHERS * 3, *(tokens,) * 16):
        toy.run(other)
    assert toy.run(tokens)[0] == rows


@pytest.mark.parametrize("seconds", [even, uneven, mixture])
@given(tokens=st.integers(1, 4096))
def test_no_way_takes_much_less(seconds: Seconds, tokens: int) -> None:
    """Once others have come, and this one some times, it takes 3 % more than by the fastest one at
    most."""
    steps = PromptSteps(FIRSTS)
    toy = Toy(steps, seconds)
    for other in (*OTHERS * 3, *(tokens,) * 16):
        toy.run(other)
    ways = [pairwise((0, *way)) for way in steps.ways(0, tokens)]
    least = min(sum(seconds(fine_rows(b - a), b) for a, b in way) for way in ways)
    assert toy.run(tokens)[1] <= 1.03 * least


def test_before_steps_are_timed_those_with_padding_give_way() -> None:
    toy = Toy(PromptSteps(FIRSTS, is_timed=False), even)
    assert toy.run(1100)[0] == [1024, 96]
    assert toy.wishes == [1120]
    assert toy.run(520)[0] == [512, 8]
    assert toy.run(700)[0] == [768]
    assert toy.run(130)[0] == [192]
    assert toy.run(4097)[0] == [2048, 2048, 8]
    assert toy.run(9)[0] == [16]


def test_a_way_that_no_graph_is_recorded_for_waits() -> None:
    """1,024 rows first are not recorded: one step by what is."""
    toy = Toy(PromptSteps(FIRSTS), even)
    toy.recorded = {*CHUNKS} - {*FIRSTS} | {1536}
    assert toy.run(1100)[0] == [1536]


def test_what_no_step_was_timed_of_is_on_the_line_of_the_others() -> None:
    """Two steps of a mixture are never tried: the second one reads all experts again."""
    toy = Toy(PromptSteps(FIRSTS), mixture, all_recorded=True)
    assert [toy.run(tokens)[0] for tokens in (200, 900, 1000, 1100)] == [
        [208],
        [912],
        [1008],
        [1120],
    ]
    toy = Toy(PromptSteps(FIRSTS), mixture)
    assert [toy.run(tokens)[0] for tokens in (200, 900, 1000, 1250)][-1] == [1536]


def test_one_slow_step_decides_nothing() -> None:
    toy = Toy(PromptSteps(FIRSTS), even, all_recorded=True)
    steps = [toy.run(1100)[0] for _ in range(8)]
    toy.steps.learn(1120, 1100, 2 * even(1120, 1100))
    assert [toy.run(1100)[0] for _ in range(4)] == steps[-4:] == [[1120]] * 4


def test_steps_without_a_clock_are_not_learned() -> None:
    toy = Toy(PromptSteps(FIRSTS, is_timed=False), uneven, all_recorded=True)
    assert [toy.run(1100)[0] for _ in range(9)] == [[1120]] * 9
    assert toy.steps.trials == 0


@pytest.mark.parametrize("most", [8, 128, 256, 512])
def test_small_steps(most: int) -> None:
    """Where steps have few rows all but the last are whole."""
    steps = PromptSteps((most,))
    toy = Toy(steps, even)
    for tokens in (1, most, most + 1, 2 * most, 5 * most + 3):
        start, sizes = 0, []
        while start < tokens:
            stop = steps.choose(start, tokens, toy.graph).stop
            sizes.append(stop - start)
            start = stop
        assert sizes[:-1] == [most] * ((tokens - 1) // most)


def test_choosing_takes_far_less_than_a_step() -> None:
    toy = Toy(PromptSteps(FIRSTS), even)
    for tokens in range(129, 4000, 40):
        toy.run(tokens)
    seconds = []
    for tokens in range(140, 4000, 40):
        start = time.thread_time()
        toy.steps.choose(0, tokens, toy.graph)
        seconds.append(time.thread_time() - start)
    assert sorted(seconds)[len(seconds) // 2] < 0.5e-3
