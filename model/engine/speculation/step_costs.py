"""What a step takes by its rows: as measured, and as on one device where it is not."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from urdir.model.memory.buckets import ROWS, row_bucket

#: ms of a step by rows: 8B Q4_K_M on an H200, at few keys (2026-11-23). The last one
#: is that before, by as many rows more.
_MEASURED: Sequence[tuple[int, float]] = (
    *((1, 1.299), (2, 1.356), (4, 1.389), (8, 1.484), (16, 2.02), (32, 2.10), (64, 2.80)),
    *((128, 5.21), (256, 8.58), (ROWS[-1], 4 * 8.58)),
)


def _seconds(rows: int) -> float:
    """The same of any number of rows, between those measured."""
    after = next(at for at, (known, _) in enumerate(_MEASURED) if known >= rows)
    (low, first), (high, last) = _MEASURED[max(0, after - 1)], _MEASURED[after]
    return 1e-3 * (last + (first - last) * (high - rows) / max(1, high - low))


_SECONDS = tuple(_seconds(rows) for rows in ROWS)
#: Weight of the latest step in a mean; no step counts as more than this many of the mean.
_WEIGHT, _MOST = 0.1, 1.5


class StepCosts:
    """Seconds of steps, of rows rounded up to those of a graph: an exponential mean of what was
    measured, with drafts and without apart. Others are as ``seconds`` has them, by as much slower
    or faster as the next smaller one that was measured. ``catch_up`` is what it takes that a draft
    model passes tokens which it missed."""

    def __init__(self, seconds: Sequence[float] = _SECONDS) -> None:
        self.catch_up = 0.0
        self._seconds = seconds
        self._measured: dict[bool, dict[int, float]] = {False: {}, True: {}}

    def of(self, rows: int, *, drafted: bool = False) -> float:
        """Of a step of ``rows`` rows, with drafts or without."""
        at, measured = _bucket(rows), self._measured[drafted] or self._measured[not drafted]
        if at in self._measured[drafted]:
            return measured[at]
        below = max((known for known in measured if known < at), default=None)
        near = min(measured, default=None) if below is None else below
        scale = 1.0 if near is None else measured[near] / self._seconds[near]
        beyond = max(1.0, rows / ROWS[-1])
        return float(scale * self._seconds[at] * beyond)

    def learn(self, rows: int, seconds: float, *, drafted: bool = False) -> None:
        """A step of ``rows`` rows took so long."""
        at, measured = _bucket(rows), self._measured[drafted]
        if at not in measured:
            measured[at] = seconds
            return
        mean = measured[at]
        measured[at] += _WEIGHT * (min(seconds, _MOST * mean) - mean)

    def learn_catch_up(self, rows: int, seconds: float) -> None:
        """A step of ``rows`` rows with drafts took so long, with a catching up before it."""
        self.catch_up = max(0.0, seconds - self.of(rows, drafted=True))


def _bucket(rows: int) -> int:
    return min(bisect_left(ROWS, row_bucket(rows)), len(ROWS) - 1)
