"""Into which steps a prompt alone is divided: by what its steps take, in seconds.

One step of a few rows more than a product's tiles have may take longer than two: 1,056 rows of an
8B model take as long as 1,024 and 128 rows on an H200, those of a mixture do not. And a step runs
by the graph that is recorded, which may have half as many rows more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, pairwise
from statistics import median
from typing import NamedTuple

from urdir.model.memory.buckets import STEP_ROWS, WHOLE_CHUNK

#: Times of a step that are kept, and that tell what it takes: a device that brakes takes up to
#: twice as long.
_KEPT, _KNOWN = 5, 3
#: Two steps take the place of one where they take this share less.
_LESS = 0.02
#: How many ways of two steps are looked at.
_WAYS = 3
#: Times tell what a row takes where the variance of rows is this share of their mean square.
_SPREAD = 0.05


class Graph(NamedTuple):
    """What a step of a prompt alone would run by: ``rows`` of a graph, which may be recorded. One
    with little padding would have ``least``."""

    rows: int
    least: int
    is_recorded: bool


#: The graph of a step from a token to another.
GraphOf = Callable[[int, int], Graph]


class Way(NamedTuple):
    """A prompt's next step ends at ``stop``. The ``wished`` steps, each from a token to another,
    would run faster by graphs with little padding."""

    stop: int
    wished: tuple[tuple[int, int], ...] = ()


class _Line:
    """What steps take by their rows: the line with the least relative errors, each squared. At
    first, and until times of very different numbers of rows are known, a step takes as long as
    `STEP_ROWS` rows besides."""

    def __init__(self) -> None:
        self._sums = [0.0] * 5

    def add(self, rows: int, seconds: float, count: int = 1) -> None:
        """A step of ``rows`` takes this; ``count`` -1: take that back."""
        weight = count / seconds**2
        terms = (1.0, rows, rows * rows, seconds, rows * seconds)
        self._sums = [total + weight * of for total, of in zip(self._sums, terms, strict=True)]

    def seconds(self, rows: int) -> float:
        """What a step of ``rows`` takes; in rows, where no time is known."""
        count, sum_rows, squares, sum_seconds, products = self._sums
        if count <= 0:
            return rows + STEP_ROWS
        spread = count * squares - sum_rows * sum_rows
        per_row = besides = 0.0
        if spread > _SPREAD * count * squares:
            per_row = (count * products - sum_rows * sum_seconds) / spread
            besides = (sum_seconds - per_row * sum_rows) / count
        if per_row <= 0 or besides < 0:
            per_row = sum_seconds / (sum_rows + count * STEP_ROWS)
            besides = per_row * STEP_ROWS
        return besides + per_row * rows


class PromptSteps:
    """Chooses the steps of prompts alone. Those that do not end a prompt have one of the numbers of
    rows in ``firsts``, smallest first; no step has more. No step is timed unless ``is_timed``.
    ``trials`` ways were chosen that had steps to be timed."""

    def __init__(self, firsts: Sequence[int], is_timed: bool = True) -> None:
        self._firsts, self._takes_time = firsts, is_timed
        self._times: dict[tuple[int, int], deque[float]] = {}
        self._medians: dict[tuple[int, int], float] = {}
        self._line = _Line()
        self.trials = 0

    def ways(self, start: int, end: int) -> Iterator[tuple[int, ...]]:
        """Ways from token ``start`` to ``end``, or as far as two steps go: where steps end."""
        most, rows = self._firsts[-1], end - start
        if rows > 2 * most:
            yield (start + most,)
            return
        if rows <= most:
            yield (end,)
        if rows > min(WHOLE_CHUNK, most):
            firsts = (of for of in reversed(self._firsts) if of < rows <= of + most)
            yield from ((start + of, end) for of in islice(firsts, _WAYS))

    def choose(self, start: int, end: int, graph_of: GraphOf) -> Way:
        """The next step of a prompt that is left from token ``start`` to ``end``."""
        ways = [(start, *way) for way in self.ways(start, end)]
        if len(ways) == 1:
            return Way(ways[0][1])
        graphs = {step: graph_of(*step) for way in ways for step in pairwise(way)}

        def seconds(way: tuple[int, ...]) -> tuple[int, float]:
            of = [(graphs[step], step[1]) for step in pairwise(way)]
            least = sum(self._seconds(graph.rows, stop) for graph, stop in of)
            return sum(not graph.is_recorded for graph, _ in of), least

        def fine(way: tuple[int, ...]) -> float:
            return sum(self._seconds(graphs[step].least, step[1]) for step in pairwise(way))

        first, *others = ways
        times = {way: seconds(way) for way in ways}
        best = min(others, key=times.__getitem__)
        if times[best] >= (times[first][0], times[first][1] * (1 - _LESS)):
            best = first
        is_timed = all(self._is_timed(graphs[step].rows, step[1]) for step in pairwise(best))
        self.trials += self._takes_time and not is_timed
        finest = min(ways, key=fine)
        if finest == best or fine(finest) >= (1 - _LESS) * times[best][1]:
            return Way(best[1])
        wished = (step for step in pairwise(finest) if graphs[step].rows > graphs[step].least)
        return Way(best[1], tuple(wished))

    def learn(self, rows: int, end: int, seconds: float) -> None:
        """A step by a graph of this many ``rows``, of a prompt alone up to token ``end``, took so
        long."""
        step = rows, _bucket(end)
        if not self._takes_time:
            return
        if step in self._times:
            self._line.add(rows, self._medians[step], -1)
        times = self._times.setdefault(step, deque(maxlen=_KEPT))
        times.append(seconds)
        self._medians[step] = median(times)
        self._line.add(rows, self._medians[step])

    def _is_timed(self, rows: int, end: int) -> bool:
        return len(self._times.get((rows, _bucket(end)), ())) >= _KNOWN

    def _seconds(self, rows: int, end: int) -> float:
        """What a step takes: by its own times, or those of all others."""
        known = self._medians.get((rows, _bucket(end)))
        if known is not None and self._is_timed(rows, end):
            return known
        line = self._line.seconds(rows)
        return line if known is None else min(known, line)


def _bucket(end: int) -> int:
    """Rows up to ends of the same bucket attend to about as many keys."""
    return (end - 1).bit_length()
