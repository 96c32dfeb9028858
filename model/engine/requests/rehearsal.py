"""What the host does for a first token, done once before: then its code and data are in the caches.

After a pause a request's first step takes the host twice as long as right after another one: 0.8 ms
in place of 0.4 (a core of a cloud Xeon whose caches have other data). Where it is known that a
request is being read, there is time to do the same for none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from urdir.model.engine.batch import StepShape
from urdir.model.engine.requests.answer import Answer
from urdir.model.engine.requests.launcher import Launcher
from urdir.model.engine.requests.limits import Limits
from urdir.model.engine.requests.open_answers import OpenAnswers
from urdir.model.engine.requests.request import Request
from urdir.model.engine.requests.scheduler import Scheduler
from urdir.model.engine.sampling_settings import SamplingSettings
from urdir.model.engine.step_clock import StepClock
from urdir.model.engine.step_queue import StepQueue
from urdir.model.owner import Owner

if TYPE_CHECKING:
    from urdir.model.engine.session import Session

#: Tokens of its prompt, at most.
_TOKENS = 128


class Rehearsal(Owner):
    """Plans the step of a prompt and writes its rows, as a `Launcher` does for ``session`` under
    ``limits``, but has a scheduler of its own, without pages, and launches nothing. To be used
    while the session is idle: rows of the next step are written again.

    Nothing is done where a sequence that begins leaves more behind than its rows: states, drafts, a
    source.
    """

    def __init__(self, session: Session, limits: Limits) -> None:
        parts, storage = session.parts, session.storage
        is_plain = session.source is None and not session.takes_sources
        self._is_used = is_plain and session.steps.observer is None and not storage.has_states
        self._session = session
        self._scheduler = Scheduler(
            _NoStorage(session.context), slots=1, context=session.context, limits=limits
        )
        self._answers = OpenAnswers(self._scheduler)
        self._queue = _NoLaunches(session.steps, parts.state, session.shapes, session.stream)
        clock = StepClock(parts.device, session.stream)
        made = session, self._scheduler, self._answers, clock
        self._launcher = Launcher(*made, queue=self._queue)

    def run(self, is_over: Callable[[], bool]) -> None:
        """Do it once, or half of it if that ``is_over`` by then. Raises DriverError."""
        if not self._is_used:
            return
        prompt = (0,) * min(_TOKENS, self._session.context - 1)
        settings = SamplingSettings(temperature=0.0)
        request = Request(prompt=prompt, settings=settings, limit=1, drafts=False)
        self._queue.is_over = is_over
        try:
            self._answers.add(Answer(request, (), None, lambda item: None))
            self._launcher.launch()
        finally:
            self._answers.cancel_all()
            self._answers.take_items()
            self._launcher.clear()
            self._queue.forget_rows()
            self._session.queue.forget_rows()

    def close(self) -> None:
        """Free what marks steps. Idempotent."""
        self._launcher.close()


class _OverError(Exception):
    """There is something to do."""


class _NoLaunches(StepQueue):
    """Writes rows, unless that ``is_over``, and no more."""

    is_over: Callable[[], bool]

    def _make_ready(self, part: StepShape) -> None:
        if self.is_over():
            raise _OverError

    def _run(self, part: StepShape) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _NoStorage:
    """A `Storage` that has room for everything."""

    most_tokens: int

    def match(
        self, sequence: int, tokens: Sequence[int], end: int, spare: int, scope: bytes
    ) -> int:
        return 0

    def cut(self, sequence: int, start: int, end: int) -> int:
        return end

    def next_shared(self, sequence: int, length: int) -> int:
        return 0

    def publish(self, sequence: int, tokens: Sequence[int], scope: bytes) -> None:
        pass

    def reserve(self, sequence: int, start: int, end: int) -> int:
        return end

    def release(self, sequence: int, tokens: Sequence[int], reached: int, scope: bytes) -> None:
        pass
