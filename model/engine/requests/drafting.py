"""How many drafts each sequence has in a step: as many as pay.

A draft is accepted with a probability that earlier ones of the same answer and place in the step
tell, an exponential mean. A step of more rows takes longer. The number of drafts is chosen that
gives the most tokens in a time, 0 included: of all sequences together, as they share the step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from urdir.model.memory.buckets import ROWS, row_bucket
from urdir.model.memory.draft_settings import DraftSettings

if TYPE_CHECKING:
    from urdir.model.memory.device_state import DecodeState

#: Weight of the latest step in a mean, and what an answer begins with.
_WEIGHT, _BEGINNING = 0.15, 0.6
#: Steps without a draft after which one is tried again: of an answer whose drafts failed. Doubled
#: each time that they fail again.
_PAUSE, _LONGEST_PAUSE = 16, 256
#: Milliseconds of a step by rows: 8B Q4_K_M on an H200, at few keys.
_MILLISECONDS = (
    *(1.299, 1.356, 1.389, 1.484, 2.02, 2.06, 2.10, 2.50, 2.85, 3.40, 3.90, 5.00, 6.00),
)
assert len(_MILLISECONDS) == len(ROWS)


@dataclass(slots=True)
class Acceptance:
    """What became of an answer's drafts: how likely one at place i (from 0) is accepted, if those
    before it are."""

    likely: list[float] = field(default_factory=list)
    resting: int = 0  # steps without drafts until one is tried
    pause: int = _PAUSE

    def at(self, place: int) -> float:
        """The probability of a place; of one that was not reached yet that of the place before."""
        if place < len(self.likely):
            return self.likely[place]
        return self.likely[-1] if self.likely else _BEGINNING

    def learn(self, wanted: int, accepted: int) -> None:
        """Of ``wanted`` drafts the first ``accepted`` stood. One that was not found did not."""
        for place in range(min(wanted, accepted + 1)):
            if place == len(self.likely):
                self.likely.append(self.at(place))
            hit = 1.0 if place < accepted else 0.0
            self.likely[place] += _WEIGHT * (hit - self.likely[place])
        if accepted:
            self.pause = _PAUSE

    def rest(self) -> None:
        """Drafts do not pay: none for a while, longer each time."""
        self.resting, self.pause = self.pause, min(2 * self.pause, _LONGEST_PAUSE)


class StepCosts:
    """What a step takes by its rows, rounded up to those of a graph, in any unit."""

    def __init__(self, costs: Sequence[float] = _MILLISECONDS) -> None:
        self._costs = costs

    def of(self, rows: int) -> float:
        """Of a step of ``rows`` rows."""
        at = min(bisect_left(ROWS, row_bucket(rows)), len(ROWS) - 1)
        return self._costs[at] * max(1.0, rows / ROWS[-1])


class Drafting:
    """Chooses drafts by ``settings``, for steps of up to ``most_rows`` rows that take ``costs``."""

    def __init__(
        self, settings: DraftSettings, most_rows: int, costs: StepCosts | None = None
    ) -> None:
        self.settings = settings
        self._most_rows = most_rows
        self._costs = costs or StepCosts()

    @classmethod
    def of(cls, state: DecodeState) -> Self | None:
        """That of the steps that ``state`` is for; None where these have no drafts."""
        return None if state.drafts is None else cls(state.drafts, state.rows)

    def choose(self, answers: Sequence[Acceptance | None]) -> list[int]:
        """Drafts for the sequences of a step, by what became of their earlier ones; None where a
        sequence takes none."""
        room = max(0, self._most_rows - len(answers))
        least = min(self.settings.least, room // max(1, len(answers)))
        counts = [0 if answer is None else least for answer in answers]
        gains = sorted(self._gains(answers, least), reverse=True)[: room - sum(counts)]
        rows = len(answers) + sum(counts)
        tokens = float(rows)
        best, best_count = tokens / self._costs.of(rows), 0
        for number, (gain, _, _) in enumerate(gains, 1):
            tokens += gain
            if (rate := tokens / self._costs.of(rows + number)) > best:
                best, best_count = rate, number
        for _, _, at in gains[:best_count]:
            counts[at] += 1
        for answer, count in zip(answers, counts, strict=True):
            if answer is not None and not count and answer.resting <= 0:
                answer.rest()
        return counts

    def _gains(
        self, answers: Sequence[Acceptance | None], least: int
    ) -> list[tuple[float, int, int]]:
        """Expected tokens of each draft beyond the first ``least``, the earlier place first among
        equals, and of which answer it is. Drafts of an answer that rests are tried when it has
        rested."""
        gains = []
        for at, answer in enumerate(answers):
            if answer is None:
                continue
            if answer.resting > 0:
                answer.resting -= 1
                if answer.resting:
                    continue
                answer.likely = [_BEGINNING]
            gain = 1.0
            for place in range(self.settings.most):
                gain *= answer.at(place)
                if place >= least:
                    gains.append((gain, -place, at))
        return gains
