"""Logit processors applied to the rows of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Self, cast

import numpy as np

from urdir.model.engine.logit_processor import LogitProcessor, LogitRow
from urdir.model.errors import ModelError, SettingsError

if TYPE_CHECKING:
    from urdir.model.engine.requests.open_answers import OpenAnswers
    from urdir.model.engine.requests.scheduler import Scheduler
    from urdir.model.engine.requests.step_plan import StepPlan
    from urdir.model.engine.sampling import Logits
    from urdir.model.engine.session import Session


class RevisedRow(NamedTuple):
    """The row of a request among those that choose a token, with its processors."""

    number: int
    row: int
    processors: tuple[LogitProcessor, ...]
    known: LogitRow


def revised_rows(
    rows: Mapping[int, int], answers: OpenAnswers, scheduler: Scheduler
) -> list[RevisedRow]:
    """Those of open requests, by their number, that have processors."""
    found = []
    for number, row in rows.items():
        request = answers[number].request
        if request.processors:
            answer = tuple(scheduler.tokens(number)[len(request.prompt) :])
            known = LogitRow(request.prompt, answer)
            found.append(RevisedRow(number, row, request.processors, known))
    return found


def revise(rows: Sequence[RevisedRow], logits: Logits) -> dict[int, Exception]:
    """Change ``logits`` (n, n_vocab) of some rows in place; errors by request."""
    errors: dict[int, Exception] = {}
    for turn in range(max((len(of.processors) for of in rows), default=0)):
        groups: dict[int, list[RevisedRow]] = {}
        for of in rows:
            if turn < len(of.processors) and of.number not in errors:
                groups.setdefault(id(of.processors[turn]), []).append(of)
        for group in groups.values():
            places = [of.row for of in group]
            some = logits[places]
            try:
                _process(group[0].processors[turn], [of.known for of in group], some)
            except Exception as error:
                errors |= dict.fromkeys([of.number for of in group], error)
            else:
                logits[places] = some
    return errors


def _process(processor: LogitProcessor, rows: Sequence[LogitRow], logits: Logits) -> None:
    name = f"{type(processor).__name__}.process"
    returned = cast("Callable[..., object]", processor.process)(rows, logits)
    if returned is not None:
        raise SettingsError(
            f"{name} returned a {type(returned).__name__}: change logits in place "
            "(logits[:] = ...), and return nothing"
        )
    if not np.isfinite(logits.max(axis=1)).all():
        raise ModelError(f"{name} left a row with NaN or infinity, or without an allowed token")


@dataclass(frozen=True, slots=True)
class Revision:
    """What processors change between the halves of a step; ``errors`` are by request, once it is
    called."""

    session: Session
    rows: Sequence[RevisedRow]
    errors: dict[int, Exception] = field(default_factory=dict)

    @classmethod
    def of(
        cls, plan: StepPlan, session: Session, answers: OpenAnswers, scheduler: Scheduler
    ) -> Self | None:
        """That of a step; None where no row has a processor."""
        pairs = zip(plan.choosers, plan.batch.choosing, strict=True)
        wanted = [(n, sequence) for n, sequence in pairs if answers[n].request.processors]
        rows = {number: plan.batch.row_of(sequence) for number, sequence in wanted}
        return cls(session, revised_rows(rows, answers, scheduler)) if rows else None

    def __call__(self) -> None:
        """Wait for the logits, and change them on the device of every rank. Raises DriverError."""
        session = self.session
        ranks = session.steps.settled(session.stream)
        vocab = session.parts.config.vocab_size
        first, last = min(of.row for of in self.rows), max(of.row for of in self.rows)
        offset = first * vocab * 4
        logits = ranks[0].work["logits"].download(np.float32, (last - first + 1, vocab), offset)
        of_these = [of._replace(row=of.row - first) for of in self.rows]
        self.errors.update(revise(of_these, logits))
        for rank in ranks:
            for of in of_these:
                rank.work["logits"].upload(logits[of.row], offset + of.row * vocab * 4)
