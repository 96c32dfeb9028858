"""Where the tokens of a complete step come from: the device, or the host in its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Protocol

import numpy as np

from urdir.model.engine.requests.answer import Answer
from urdir.model.engine.requests.open_answers import OpenAnswers
from urdir.model.engine.requests.revision import revise, revised_rows
from urdir.model.engine.requests.scheduler import Scheduler
from urdir.model.engine.requests.step_plan import Chosen, StepPlan
from urdir.model.engine.sampling import Logits, sample
from urdir.model.errors import SettingsError

if TYPE_CHECKING:
    from urdir.model.engine.session import Session


#: The next token of an answer, from all its tokens so far, the prompt's too, and the logits
#: (n_vocab,) f32 after them.
Choose = Callable[[Answer, Sequence[int], Logits], int]


class Choices(Protocol):
    """What steps have chosen."""

    def tokens(self, plan: StepPlan) -> list[Chosen]:
        """For each of the choosers of a complete step; nothing where one has ended meanwhile.
        Raises ModelError, DriverError."""


class DeviceChoices:
    """The tokens that the device has chosen and gone on with."""

    def __init__(self, session: Session, scheduler: Scheduler) -> None:
        self._state = session.parts.state
        self._scheduler = scheduler

    def tokens(self, plan: StepPlan) -> list[Chosen]:
        """See `Choices`."""
        sequences, choosers = plan.batch.choosing, plan.choosers
        drafts = plan.batch.drafts or (0,) * len(choosers)
        return [self._of(*each) for each in zip(choosers, sequences, drafts, strict=True)]

    def _of(self, number: int, sequence: int, wanted: int) -> Chosen:
        """What was chosen for a request: where its tokens stood is known from the steps before."""
        if (position := self._scheduler.last(number)) is None:
            return Chosen(())
        count, drafts = self._state.accepted(sequence, position) if wanted else (1, 0)
        places = range(position, position + count)
        return Chosen(tuple(self._state.chosen(sequence, at) for at in places), drafts)


class HostChoices:
    """Logits are downloaded and the host takes tokens by ``choose``. It is slow, and every step
    waits for the token of the one before."""

    def __init__(
        self, session: Session, scheduler: Scheduler, answers: OpenAnswers, choose: Choose
    ) -> None:
        self._parts = session.parts
        self._scheduler = scheduler
        self._answers = answers
        self._choose = choose

    def tokens(self, plan: StepPlan) -> list[Chosen]:
        """See `Choices`."""
        places, parts = plan.places, self._parts
        if not places:
            return []
        logits = parts.work["logits"].download(np.float32, (len(places), parts.config.vocab_size))
        chosen = []
        numbers = plan.choosers
        known = {of: row for row, of in enumerate(numbers) if self._answers.get(of) is not None}
        errors = revise(revised_rows(known, self._answers, self._scheduler), logits)
        for number, error in errors.items():
            self._answers.fail_alone(number, error)
        for number, (sequence, position), row in zip(plan.choosers, places, logits, strict=True):
            if (answer := self._answers.get(number)) is None:
                chosen.append(Chosen(()))
                continue
            token = self._choose(answer, self._scheduler.tokens(number), row)
            if not (isinstance(token, Integral) and 0 <= token < row.size):
                raise SettingsError(
                    f"the choice of a token is {token!r}: expected a token id below {row.size}"
                )
            if position + 1 < parts.state.max_len:
                parts.state.write_tokens(sequence, position + 1, [token])
            chosen.append(Chosen((token,)))
        return chosen


def draw(answer: Answer, tokens: Sequence[int], logits: Logits) -> int:
    """Choose by the request's settings in numpy: what the device must match."""
    request = answer.request
    return sample(
        logits,
        request.settings,
        len(tokens),
        tokens,
        answer_at=len(request.prompt),
        end_ids=answer.end_ids,
        mask=answer.mask(len(logits)),
    )
