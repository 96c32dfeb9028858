"""Which answers have a row, where not all of them have one in a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

#: Steps for which the same answers have one. Rows that change are written between two steps, which
#: takes the device some us: 9 answers by eight gave 5,330 tokens/s with others in each step, 8
#: answers 5,380 (8B Q4_K_M, H200). An answer without a row pauses for so many steps.
STEPS = 4

T = TypeVar("T")


class Turns:
    """Answers have rows in turns: after any number of steps one has had `STEPS` more than another
    at most, where the same go on."""

    def __init__(self) -> None:
        self._first = 0  # of the answers that have no row, the first one's place
        self._steps = 0  # that they have had none
        self._last = 0, 0

    def of(self, answers: Sequence[T], rows: int) -> Sequence[T]:
        """The ``rows`` answers that have a row in the next step, of all that could."""
        count, left_out = len(answers), len(answers) - rows
        if (count, rows) != self._last or self._steps == STEPS:
            self._first = (self._first + self._last[0] - self._last[1]) % max(1, count)
            self._last, self._steps = (count, rows), 0
        self._steps += 1
        if not left_out:
            return answers
        return [each for at, each in enumerate(answers) if (at - self._first) % count >= left_out]
