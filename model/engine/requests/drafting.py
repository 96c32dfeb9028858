"""How many drafts each sequence has in a step: as many as pay.

A draft is accepted with a probability that earlier ones of the same answer and place in the step
tell. A step of more rows takes longer. The number of drafts is chosen that gives the most tokens in
a time, 0 included: of all sequences together, as they share the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Self

from urdir.model.engine.requests.step_costs import StepCosts
from urdir.model.engine.speculation.draft_rest import DraftRest
from urdir.model.memory.buckets import row_bucket

if TYPE_CHECKING:
    from urdir.model.memory.device_state import DecodeState
    from urdir.model.memory.draft_settings import DraftSettings

#: Weight of the latest step in a mean, at least.
_WEIGHT = 0.15
#: How likely drafts are thought to be accepted at first, and after a rest.
_BEGINNING, _AGAIN = 0.6, 0.3
#: Steps without drafts after some that failed, the first time and at most: doubled each time.
_REST, _LONGEST_REST = 16, 256


class Acceptance:
    """Acceptance of an answer's drafts: how likely one at place i (from 0) is accepted, if those
    before it are."""

    __slots__ = ("_likely", "_rest", "_resting", "_seen")

    def __init__(self) -> None:
        self._likely = [_BEGINNING]
        self._seen = [0]
        self._resting, self._rest = 0, _REST

    def at(self, place: int) -> float:
        """The probability of a place; of one that was not reached yet that of the last before."""
        return self._likely[min(place, len(self._likely) - 1)]

    def learn(self, wanted: int, accepted: int) -> None:
        """Learn from ``wanted`` drafts, the first ``accepted`` of them accepted, the others not."""
        for place in range(min(wanted, accepted + 1)):
            if place == len(self._likely):
                self._likely.append(self.at(place))
                self._seen.append(0)
            weight = max(_WEIGHT, 1 / (self._seen[place] + 2))
            hit = 1.0 if place < accepted else 0.0
            self._likely[place] += weight * (hit - self._likely[place])
            self._seen[place] += 1
        if accepted:
            self._rest = _REST

    def rests(self) -> bool:
        """Whether a step has no drafts of the answer because earlier ones failed."""
        if not self._resting:
            return False
        self._resting -= 1
        if not self._resting and self._likely[0] < _AGAIN:
            self._likely, self._seen = [_AGAIN], [0]
        return self._resting > 0

    def did_not_pay(self) -> None:
        """A step has no drafts: if earlier ones mostly failed, the next steps have none either."""
        if not self._resting and self._likely[0] < 0.5:
            self._resting, self._rest = self._rest, min(2 * self._rest, _LONGEST_REST)


class Drafting:
    """Chooses drafts by ``settings``, for steps of up to ``most_rows`` rows that take ``costs``.

    Steps for whose rows ``is_ready`` are chosen alone, unless the settings ask for more drafts;
    ``wished`` are the rows that would be chosen if all were. ``rest`` is that of a draft model that
    steps without drafts leave out.
    """

    def __init__(
        self,
        settings: DraftSettings,
        most_rows: int,
        costs: StepCosts | None = None,
        rest: DraftRest | None = None,
    ) -> None:
        self.costs = costs or StepCosts()
        self.is_ready: Callable[[int], bool] = _always
        self.wished = 0
        self.rest = rest
        self._settings = settings
        self._most_rows = most_rows

    @classmethod
    def of(cls, state: DecodeState, rest: DraftRest | None = None) -> Self | None:
        """That of the steps that ``state`` is for; None where these have no drafts."""
        return None if state.drafts is None else cls(state.drafts, state.rows, rest=rest)

    def choose(self, answers: Sequence[Acceptance | None]) -> list[int]:
        """Drafts for the sequences of a step, by what became of their earlier ones; None where a
        sequence takes none."""
        room = self._most_rows - len(answers)
        if room <= 0:
            self.wished = len(answers)
            return [0] * len(answers)
        least = min(self._settings.least, room // max(1, len(answers)))
        counts = [0 if answer is None else least for answer in answers]
        gains = sorted(self._gains(answers, least), reverse=True)[: room - sum(counts)]
        for at in self._paying(len(answers) + sum(counts), gains):
            counts[at] += 1
        for answer, count in zip(answers, counts, strict=True):
            if answer is not None and not count:
                answer.did_not_pay()
        return counts

    def _gains(
        self, answers: Sequence[Acceptance | None], least: int
    ) -> list[tuple[float, int, int]]:
        """Expected tokens of each draft beyond the first ``least``, its place (the earlier one
        first among equals) and the number of its answer."""
        gains = []
        for at, answer in enumerate(answers):
            if answer is None or answer.rests():
                continue
            gain = 1.0
            for place in range(self._settings.most):
                gain *= answer.at(place)
                if place >= least:
                    gains.append((gain, -place, at))
        return gains

    def _paying(self, rows: int, gains: Sequence[tuple[float, int, int]]) -> list[int]:
        """Whose drafts are added to a step of ``rows`` rows: the first ones of ``gains``."""
        tokens = float(rows)
        best = wished = tokens / self.costs.of(rows)
        count, self.wished = 0, rows
        ready: dict[int, bool] = {}
        for number, (gain, _, _) in enumerate(gains, 1):
            tokens += gain
            bucket = row_bucket(rows + number)
            rate = tokens / self.costs.of(bucket)
            if rate > wished:
                wished, self.wished = rate, bucket
            if rate > best:
                if bucket not in ready:
                    ready[bucket] = self.is_ready(bucket)
                if ready[bucket]:
                    best, count = rate, number
        return [at for _, _, at in gains[:count]]


def _always(rows: int) -> bool:
    """Steps of any rows are ready."""
    return True
