"""How many of the answers that could go on have a row in the next step: not always all of them.

Products take rows by eight, so a step of 97 rows is computed as one of 104, up to 5 % slower than
one of 96 for 1 % more tokens. Where steps of fewer rows give more tokens/s, answers take turns.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable
from math import inf
from statistics import median

from urdir.model.memory.buckets import ROWS, row_bucket
from urdir.model.memory.turns import ALL_GO_ON

#: Steps of a row bucket that follow each other and are timed together; steps of fewer rows that are
#: tried for that, as a step that is read before the next one is planned is not timed.
_TIMED, _TRIED = 6, 24
#: Steps until all are timed again, the first time and later. Where a device brakes, steps take up
#: to twice as long, six in a row as well: an H200 does so half a second after a load begins, for
#: some 65 ms. Eight steps of nine rows of Qwen3-30B-A3B cost 1.5 steps of eight each time.
_FIRST_AGAIN, _AGAIN = 64, 2048
#: How much more tokens/s fewer rows must give: less is noise.
_GAIN = 1.005


class PacedRows:
    """Chooses the rows of steps by the least that they take, in seconds. Where a step of all
    answers leaves rows of its bucket unused, some are timed, then some of the next smaller bucket;
    from then on the timed bucket with the most tokens/s is chosen. Fewer rows are chosen if
    ``is_ready`` says that such a step takes no preparation; ``wished`` are those that would be
    timed, 0 if none."""

    def __init__(self) -> None:
        self.is_ready: Callable[[int], bool] = _always
        self.wished = 0
        self._steps, self._again = 0, _FIRST_AGAIN
        self._seconds: dict[int, deque[float]] = {}
        self._least: dict[int, float] = {}  # medians of as many as are timed together
        self._tried = Counter[int]()

    @staticmethod
    def fewer(answers: int) -> int:
        """The rows that this many answers may take turns in, a row bucket; 0 where all have one."""
        if answers <= ALL_GO_ON or answers == row_bucket(answers):
            return 0
        return ROWS[bisect_left(ROWS, answers) - 1]

    def choose(self, answers: int) -> int:
        """Rows of the next step for ``answers``, all of which could have one."""
        self.wished = 0
        if not (fewer := self.fewer(answers)):
            return answers
        self._steps += 1
        if self._steps >= self._again:
            self._steps, self._again = 0, _AGAIN
            for each in (self._seconds, self._least, self._tried):
                each.clear()
        timed = self._least
        if (seconds := timed.get(row_bucket(answers))) is None:
            return answers
        if fewer not in timed:
            if self._tried[fewer] >= _TRIED:
                return answers
            if self.is_ready(fewer):
                self._tried[fewer] += 1
                return fewer
            self.wished = fewer
            return answers
        fewer_rows = (rows for rows in timed if answers <= 2 * rows < 2 * answers)
        best = max(fewer_rows, key=lambda rows: rows / timed[rows])
        is_faster = best * seconds > _GAIN * answers * timed[best]
        return best if is_faster and self.is_ready(best) else answers

    def learn(self, rows: int, seconds: float) -> None:
        """A step of the row bucket ``rows``, without prompts, took so long."""
        times = self._seconds.setdefault(rows, deque(maxlen=_TIMED))
        times.append(seconds)
        if len(times) == _TIMED:
            self._least[rows] = min(median(times), self._least.get(rows, inf))


def _always(rows: int) -> bool:
    """Steps of any rows are ready."""
    return True
