"""How many of the answers that could go on have a row in the next step: not always all of them.

Products take rows by eight, so a step of 97 rows is computed as one of 104, up to 5 % slower than
one of 96 for 1 % more tokens; and where products of more rows are cut in another way, a full step
may be slower, too. Where steps of fewer rows give more tokens/s, answers take turns.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Sequence
from statistics import median

from urdir.model.memory.buckets import ROWS, row_bucket

#: Steps of a row bucket that are timed, the latest; steps of fewer rows that are tried for that, as
#: a step that is read before the next one is planned is not timed; steps until all are timed again.
_TIMED, _TRIED, _AGAIN = 6, 24, 2048
#: How much more tokens/s fewer rows must give: less is noise.
_GAIN = 1.005
#: All of so many answers always have a row: memory bounds their steps.
_FEW = 8
#: So many that fill their bucket do, too: full steps of up to 64 rows, which products take in one
#: tile, gave more tokens/s than those of fewer wherever they were measured.
_FULL = 64
#: The bucket after the next smaller one is timed as well where that gives this share of the
#: tokens/s of all answers.
_NEAR = 0.95


class PacedRows:
    """Chooses the rows of steps by what they take, in seconds. Where a step of all answers leaves
    rows of its bucket unused, or has more than 64, some are timed, then some of the next smaller
    `buckets`; from then on the timed bucket with the most tokens/s is chosen. Fewer rows are chosen
    if ``is_ready`` says that such a step takes no preparation; ``wished`` are those that would be
    timed, 0 if none."""

    def __init__(self) -> None:
        self.is_ready: Callable[[int], bool] = _always
        self.wished = 0
        self._steps = 0
        self._seconds: dict[int, deque[float]] = {}
        self._tried = Counter[int]()

    @staticmethod
    def buckets(answers: int) -> Sequence[int]:
        """The row buckets that steps of so many answers may be better in than in theirs, the
        largest first; none where all have a row anyway."""
        if answers <= _FEW or (answers <= _FULL and answers == row_bucket(answers)):
            return ()
        at = bisect_left(ROWS, answers)
        return [rows for rows in ROWS[at - 1 : at - 3 : -1] if rows >= _FEW]

    def choose(self, answers: int) -> int:
        """Rows of the next step for ``answers``, all of which could have one."""
        self.wished = 0
        if not (buckets := self.buckets(answers)):
            return answers
        self._steps += 1
        if self._steps >= _AGAIN:
            self._steps, self._seconds = 0, {}
            self._tried.clear()
        timed = {rows: median(of) for rows, of in self._seconds.items() if len(of) == _TIMED}
        if (seconds := timed.get(row_bucket(answers))) is None:
            return answers
        for fewer in buckets:
            if fewer not in timed and self._tried[fewer] < _TRIED:
                if self.is_ready(fewer):
                    self._tried[fewer] += 1
                    return fewer
                self.wished = fewer
                break
            if fewer not in timed or fewer * seconds < _NEAR * answers * timed[fewer]:
                break
        if not any(rows < answers for rows in timed):
            return answers
        best = max((rows for rows in timed if rows < answers), key=lambda rows: rows / timed[rows])
        is_faster = best * seconds > _GAIN * answers * timed[best]
        return best if is_faster and self.is_ready(best) else answers

    def learn(self, rows: int, seconds: float) -> None:
        """A step of the row bucket ``rows``, without prompts, took so long."""
        self._seconds.setdefault(rows, deque(maxlen=_TIMED)).append(seconds)


def _always(rows: int) -> bool:
    """Steps of any rows are ready."""
    return True
