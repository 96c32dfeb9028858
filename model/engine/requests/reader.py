"""The half of a service that reads: the tokens of a step, and the endings of answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from urdir.model.engine.requests.answer import Answer
from urdir.model.engine.requests.choices import Choices
from urdir.model.engine.requests.open_answers import OpenAnswers
from urdir.model.engine.requests.request import Finish, Piece, TokenChoice
from urdir.model.engine.requests.scheduler import Scheduler
from urdir.model.engine.requests.step_plan import Outcome, StepPlan
from urdir.ptxgen.kernels.sampling_limits import INVALID_TOKEN

if TYPE_CHECKING:
    from urdir.model.engine.session import Session


class Reader:
    """Reads the ``choices`` of steps of ``session``, tells ``scheduler``, and the consumers of
    ``answers``."""

    def __init__(
        self, session: Session, scheduler: Scheduler, answers: OpenAnswers, choices: Choices
    ) -> None:
        self._session = session
        self._scheduler = scheduler
        self._answers = answers
        self._choices = choices

    def read(self, plan: StepPlan) -> None:
        """Take the tokens of a step that is complete."""
        self._tell_scores(plan)
        chosen, sequences = self._choices.tokens(plan), plan.batch.choosing
        for number, sequence, of in zip(plan.choosers, sequences, chosen, strict=True):
            if of.tokens[:1] == (INVALID_TOKEN,):
                self._fail(number, sequence)
        for outcome in self._scheduler.chosen(plan, chosen):
            if outcome.token == INVALID_TOKEN:
                self._fail(outcome.request, sequences[outcome.row])
                continue
            try:  # `alone` would take longer than the rest
                self._tell(outcome, sequences[outcome.row])
            except Exception as error:
                self._answers.fail_alone(outcome.request, error)

    def _fail(self, number: int, sequence: int) -> None:
        """No token could be chosen for an answer."""
        if (answer := self._answers.get(number)) is not None:
            self._answers.fail(answer, self._session.queue.no_choice(sequence))

    def _tell(self, outcome: Outcome, sequence: int) -> None:
        """Collect a token, and the ending of an answer."""
        answer, token, ending = self._answers[outcome.request], outcome.token, outcome.ending
        if token is not None and (ending is None or ending.finish is not Finish.END):
            choice = self._choice(answer, token, sequence, outcome.position)
            answer.accept(token)
            if (free := answer.free) is not None:
                self._scheduler.hold(answer.number, free)
            self._answers.tell(answer, Piece("", (choice,)))
        if ending is not None:
            self._answers.ended(answer)
            self._answers.tell(answer, ending)

    def _tell_scores(self, plan: StepPlan) -> None:
        """Collect the log-probabilities of prompts' tokens."""
        for number, first, end in self._scheduler.tasks.scored(plan):
            answer, results = self._answers[number], self._session.parts.state.scores
            scores = results.read(plan.turn, first, end, answer.request.prompt_logprobs or 0)
            self._answers.tell(answer, Piece("", (), (scores,)))

    def _choice(self, answer: Answer, token: int, sequence: int, position: int) -> TokenChoice:
        """What is known of a token that was chosen after the one at ``position``."""
        likely = answer.request.settings.logprobs
        if likely is None:
            return TokenChoice(token)
        return TokenChoice(
            token, *self._session.parts.state.log_probabilities(sequence, position, likely)
        )
