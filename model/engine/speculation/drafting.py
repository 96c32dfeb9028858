"""How many drafts each sequence has in a step: as many as pay.

A draft is accepted with a probability that earlier ones of the same answer and place in the step
tell. A step of more rows takes longer. The number of drafts is chosen that gives the most tokens in
a time, 0 included: of all sequences together, as they share the step.

An answer whose drafts do not pay has none for a while. Then a few steps have one draft again. Rests
are long enough that such a trial takes a hundredth of the time, and twice as long after each one
without an accepted draft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from typing import TYPE_CHECKING, Self

from urdir.model.engine.speculation.draft_rest import DraftRest
from urdir.model.engine.speculation.step_costs import StepCosts
from urdir.model.memory.buckets import row_bucket
from urdir.model.memory.draft_scope import DraftScope

if TYPE_CHECKING:
    from urdir.model.memory.device_state import DecodeState
    from urdir.model.memory.draft_settings import DraftSettings

#: Weight of the latest step in a mean, at least; of a step of any answer in that of all.
_WEIGHT, _SHARED_WEIGHT = 0.1, 0.1
#: How likely drafts are thought to be accepted at first, and after a rest.
_BEGINNING, _AGAIN = 0.6, 0.3
#: Steps whose drafts may all fail before the others are judged by them.
_TRIES = 3
#: Steps without drafts after some that failed, the first time and at most: doubled each time.
_REST, _LONGEST_REST = 16, 256
#: The part of the time that a first trial may take, unless the rest after one would be longer than
#: this many steps.
_TRIAL_SHARE, _LONGEST_TRIED = 0.01, 1024


class Acceptance:
    """Acceptance of an answer's drafts: how likely one at place i (from 0) is accepted, if those
    before it are. ``beginning`` is how likely that is before any is known.

    At first, and after a rest, drafts are unproven until one is accepted: a few steps have some
    then, whether it pays or not, and no later ones until the results are known.
    """

    __slots__ = (
        *("_failures", "_is_proven", "_likely", "_open", "_rest", "_resting"),
        *("_seen", "_tries"),
    )

    def __init__(self, beginning: float = _BEGINNING) -> None:
        self._rest, self._failures = _REST, 0
        self._begin(beginning)

    def _begin(self, likely: float) -> None:
        self._likely, self._seen = [likely], [0]
        self._resting = self._open = 0
        self._tries, self._is_proven = _TRIES, False

    def at(self, place: int) -> float:
        """The probability of a place; of one that was not reached yet that of the last before."""
        return self._likely[min(place, len(self._likely) - 1)]

    @property
    def is_steady(self) -> bool:
        """Whether most first drafts are accepted, so that several steps can be launched at once."""
        return self._is_proven and self._likely[0] >= 0.5

    @property
    def is_tried(self) -> bool:
        """Whether the next step is to have a draft even if it does not pay."""
        return self._tries > 0 and not self._is_proven

    def most(self, drafts: int) -> int:
        """Drafts of a step, ``drafts`` at most: one while it is unlikely that any is
        accepted."""
        return drafts if self._is_proven or self._likely[0] >= 0.5 else 1

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
        self._open = max(0, self._open - 1)
        if accepted:
            self._rest, self._failures, self._is_proven = _REST, 0, True

    def asked(self) -> None:
        """A step has drafts of the answer."""
        self._tries, self._open = max(0, self._tries - 1), self._open + 1

    def rests(self) -> bool:
        """Whether a step has no drafts of the answer: in a rest, which becomes shorter by the step,
        or because the results of unproven drafts are not known."""
        if not self._resting:
            return not (self._is_proven or self._tries) and self._open > 0
        self._resting -= 1
        if not self._resting:
            self._begin(_AGAIN)
        return self._resting > 0

    def rested(self, steps: int) -> None:
        """Note further steps without drafts."""
        self._resting = max(min(1, self._resting), self._resting - steps)

    def did_not_pay(self, least: int) -> None:
        """A step has no drafts: where they mostly failed, the next ones have none either, ``least``
        of them or more if none was accepted: twice as many each time."""
        if self._resting or self._likely[0] >= 0.5:
            return
        self._resting = self._rest
        if not self._is_proven:
            longer = min(_LONGEST_TRIED, least << self._failures)
            self._resting, self._failures = max(self._rest, longer), self._failures + 1
        self._rest = min(2 * self._rest, _LONGEST_REST)


class Drafting:
    """Chooses drafts by ``settings``, for steps of up to ``most_rows`` rows that take ``costs``.

    Steps for whose rows ``is_ready`` are chosen alone, unless the settings ask for more drafts;
    ``wished`` are the rows that would be chosen if all were. ``rest`` is that of a draft model that
    steps without drafts leave out, ``scope`` the tokens that it drafts. ``likely``: how often first
    drafts of all answers were accepted.
    """

    def __init__(
        self,
        settings: DraftSettings,
        most_rows: int,
        costs: StepCosts | None = None,
        rest: DraftRest | None = None,
        scope: DraftScope | None = None,
    ) -> None:
        self.costs = costs or StepCosts()
        self.is_ready: Callable[[int], bool] = _always
        self.wished = 0
        self.rest = rest
        self.scope = scope or DraftScope()
        self.likely = _BEGINNING
        self._settings = settings
        self._most_rows = most_rows

    @classmethod
    def of(
        cls, state: DecodeState, rest: DraftRest | None = None, scope: DraftScope | None = None
    ) -> Self | None:
        """That of the steps that ``state`` is for; None where these have no drafts."""
        return (
            None if state.drafts is None else cls(state.drafts, state.rows, rest=rest, scope=scope)
        )

    def begin(self, prompt: Sequence[int] = ()) -> Acceptance:
        """What is known of the drafts of a new answer to ``prompt``: how often those of others were
        accepted."""
        self.scope.learn(prompt)
        return Acceptance(self.likely)

    def learn(self, answer: Acceptance, wanted: int, tokens: Sequence[int]) -> None:
        """Learn from the ``tokens`` that a step chose for an answer with ``wanted`` drafts: all but
        the last were drafted."""
        accepted = len(tokens) - 1
        self.scope.learn(tokens)
        answer.learn(wanted, accepted)
        self.likely += _SHARED_WEIGHT * (bool(accepted) - self.likely)

    def is_settled(self, answers: Sequence[Acceptance]) -> bool:
        """Whether several steps may have the same drafts, before the results of the first are
        known."""
        return self._settings.least > 0 or all(answer.is_steady for answer in answers)

    def choose(self, answers: Sequence[Acceptance | None]) -> list[int]:
        """Drafts for the sequences of a step, by what became of their earlier ones; None where a
        sequence takes none."""
        room = self._most_rows - len(answers)
        if room <= 0:
            self.wished = len(answers)
            return [0] * len(answers)
        least = min(self._settings.least, room // max(1, len(answers)))
        counts = [0 if answer is None else least for answer in answers]
        active = [(at, a) for at, a in enumerate(answers) if a is not None and not a.rests()]
        gains = sorted(_gains(active, least, self._settings.most), reverse=True)
        rows = len(answers)
        for at in self._paying(rows, sum(counts), gains[: room - sum(counts)]):
            counts[at] += 1
        tried = [at for at, answer in active if answer.is_tried and not counts[at]]
        drafts = sum(counts) + len(tried)
        if tried and drafts <= room and self._can_have(rows, drafts):
            for at in tried:
                counts[at] = 1
        for at, answer in active:
            if not counts[at] and not answer.is_tried:
                answer.did_not_pay(self._least_rest(rows))
        return counts

    def _paying(
        self, answers: int, drafts: int, gains: Sequence[tuple[float, int, int]]
    ) -> list[int]:
        """Whose drafts are added to a step of this many answers and ``drafts``: the first ones of
        ``gains``."""
        rows = answers + drafts
        tokens = float(rows)
        best = wished = tokens / self.costs.of(rows, drafted=drafts > 0)
        count, self.wished = 0, rows
        ready: dict[int, bool] = {}
        for number, (gain, _, _) in enumerate(gains, 1):
            tokens += gain
            bucket = row_bucket(rows + number)
            rate = tokens / self.costs.of(bucket, drafted=True)
            if rate > wished:
                wished, self.wished = rate, bucket
            if rate > best:
                if bucket not in ready:
                    ready[bucket] = self.is_ready(bucket)
                if ready[bucket]:
                    best, count = rate, number
        return [at for _, _, at in gains[:count]]

    def _can_have(self, answers: int, drafts: int) -> bool:
        """Whether a step of this many answers with ``drafts`` is ready; if not, it is wished."""
        bucket = row_bucket(answers + drafts)
        if self.is_ready(bucket):
            return True
        self.wished = max(self.wished, bucket)
        return False

    def _least_rest(self, answers: int) -> int:
        """Steps after which a trial of each of ``answers``, one by one, takes little of the
        time."""
        step = self.costs.of(answers)
        drafts = self.costs.of(row_bucket(answers + 1), drafted=True) - step
        trial = self.costs.catch_up + _TRIES * max(0.0, drafts)
        return min(_LONGEST_TRIED, ceil(answers * trial / (_TRIAL_SHARE * step)))


def _gains(
    answers: Sequence[tuple[int, Acceptance]], least: int, most: int
) -> list[tuple[float, int, int]]:
    """Expected tokens of each draft beyond the first ``least``, up to ``most``, its place (the
    earlier one first among equals) and the number of its answer."""
    gains = []
    for at, answer in answers:
        gain = 1.0
        for place in range(answer.most(most)):
            gain *= answer.at(place)
            if place >= least:
                gains.append((gain, -place, at))
    return gains


def _always(rows: int) -> bool:
    """Steps of any rows are ready."""
    return True
