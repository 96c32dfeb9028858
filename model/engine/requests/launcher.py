"""The half of a service that launches: a plan's rows go to the device, and its step is queued."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from urdir.driver.context import close_all
from urdir.driver.errors import DriverError
from urdir.model.engine.batch import Output, StepShape
from urdir.model.engine.decode_graphs import LOOK_AHEAD
from urdir.model.engine.requests.answer import Answer
from urdir.model.engine.requests.open_answers import OpenAnswers
from urdir.model.engine.requests.scheduler import Scheduler
from urdir.model.engine.requests.step_plan import StepPlan
from urdir.model.engine.run_ahead import AT_ONCE, FEW, RunAhead
from urdir.model.engine.step_clock import Span, StepClock
from urdir.model.errors import ConstraintError
from urdir.model.owner import Owner

if TYPE_CHECKING:
    from urdir.model.engine.session import Session
    from urdir.model.text.matcher import Mask

#: What a step may be asked for, each of which serves those after it.
_OUTPUTS = (Output.LOGITS, Output.LOGPROBS, Output.SAMPLE, Output.GREEDY)
#: Tokens after which an answer's graphs are looked for anew: fewer than they are prepared before.
_STRIDE = LOOK_AHEAD // 4


@dataclass(frozen=True, slots=True)
class _Launch:
    """The steps of one launch, and its time where that is wanted."""

    plans: Sequence[StepPlan]
    span: Span | None


class Launcher(Owner):
    """Queues the steps that ``scheduler`` plans for ``answers``, on the device of ``session``.

    A ``clock``, which the launcher closes, times what is read; without one a launch takes the host
    less time.
    """

    def __init__(
        self,
        session: Session,
        scheduler: Scheduler,
        answers: OpenAnswers,
        clock: StepClock | None = None,
    ) -> None:
        self._session = session
        self._scheduler = scheduler
        self._answers = answers
        self._ahead: RunAhead[_Launch] = RunAhead(session.parts.device, session.stream)
        self.clock = clock
        self._look_ahead: Callable[[], bool] = _done
        self._expected: tuple[int, Output, int, int] | None = None
        self._next: StepShape | None = None  # the step after the first token of an answer alone

    def __len__(self) -> int:
        """Launches that are not read."""
        return len(self._ahead)

    @property
    def is_full(self) -> bool:
        """Whether enough is queued."""
        return self._ahead.is_full

    @property
    def waited_seconds(self) -> float:
        """How long the host had nothing to do but wait for the device."""
        return self._ahead.waited_seconds

    def launch(self) -> bool:
        """Plan a step and queue it; False where there is none to queue now, or where a first token
        would wait for its graph to be recorded."""
        session = self._session
        if self._ahead and self._next and not session.steps.is_recorded(self._next):
            return False  # the first token is read before the host takes its time with a graph
        plan = self._scheduler.plan()
        if plan is None:
            return False
        for number, slot in plan.admitted:
            self._begin(number, slot)
        answers = self._answers.named(plan.choosers)
        wanted = {answer.output for answer in answers}
        output = next((kind for kind in _OUTPUTS if kind in wanted), Output.NONE)
        shape = session.shapes.of_batch(plan.batch, plan.longest, output)
        masks = self._masks(plan, answers)
        plans, shape = self._several(plan, shape)
        span = self._launch(plan, shape, masks)
        for segment in plan.batch.segments:
            session.storage.keep_prefix(segment.sequence, segment.end)
        self._ahead.queued(_Launch(plans, span))
        self._expect(plans[-1], shape)
        return True

    def wait(self) -> Sequence[StepPlan]:
        """Wait for the oldest launch; the steps that are complete then. Meanwhile graphs are
        prepared for the answers that go on."""
        launch = self._ahead.wait(self._use_wait)
        if self.clock is not None and launch.span is not None:
            self.clock.read(launch.span)
        return launch.plans

    def clear(self) -> None:
        """Forget what is queued: nobody reads it."""
        self._ahead.clear()
        self.rest()

    def rest(self) -> None:
        """There is nothing to do for a while, which counts as no time of the device's."""
        if self.clock is not None:
            self.clock.rest()

    def close(self) -> None:
        """Wait for what is queued; closing twice does nothing."""
        try:
            while self._ahead:
                self._ahead.wait()
        finally:
            close_all([self._ahead, *([self.clock] if self.clock else [])])

    def _launch(self, plan: StepPlan, shape: StepShape, masks: Mapping[int, Mask]) -> Span | None:
        """Queue the steps of a plan; when they begin and end, if that is wanted."""
        launch = partial(self._session.queue.launch, shape, plan.batch, plan.positions, masks)
        if self.clock is None:
            launch()
            return None
        span = self.clock.span()
        launch(partial(self.clock.mark, span.begin))
        self.clock.mark(span.end)
        return span

    def _begin(self, number: int, slot: int) -> None:
        """Write what is known of a request that has been given a sequence."""
        answer, state = self._answers[number], self._session.parts.state
        request, answer.cached = answer.request, self._scheduler.cached(number)
        state.write_tokens(slot, 0, self._scheduler.tokens(number))
        words = request.settings.words(len(request.prompt), answer.end_ids)
        state.write_sampling(slot, words)

    def _several(self, plan: StepPlan, shape: StepShape) -> tuple[list[StepPlan], StepShape]:
        """A few answers go on by several steps at once, where nothing can change meanwhile: the
        steps of one launch, and its shape."""
        if shape.rows > FEW:
            return [plan], shape
        if (several := self._session.graphs.several(shape, plan.longest)) is None:
            return [plan], shape
        more = self._scheduler.repeat(plan, several.steps - 1)
        return [plan, *more], several if more else shape

    def _expect(self, last: StepPlan, shape: StepShape) -> None:
        """Note which steps will follow, if what chooses a token in the last one goes on."""
        rows, output = len(last.choosers), shape.output
        self._next = None
        if not rows:
            return
        end, longest = self._scheduler.end(last), last.longest
        if longest < end and not last.requests and not self._scheduler.queued:
            self._next = self._session.shapes.decode(rows, longest + 1, output)
        expected = (rows, output, longest // _STRIDE, end)
        if expected != self._expected:
            self._expected = expected
            steps = AT_ONCE if rows <= FEW and output.is_token else 1
            prepare = self._session.graphs.prepare
            self._look_ahead = partial(prepare, rows, output, longest, end, steps)

    def _use_wait(self) -> bool:
        """Do a small piece of preparing for what is expected; False where all is done."""
        try:
            if self._look_ahead():
                return True
        except DriverError:  # the step that needs the graph tries again, and says so
            pass
        self._look_ahead = _done
        return False

    def _masks(self, plan: StepPlan, answers: Sequence[Answer]) -> dict[int, Mask]:
        """The tokens that may come, by sequence, of answers with a constraint."""
        vocab = self._session.parts.config.vocab_size
        masks: dict[int, Mask] = {}
        for sequence, answer in zip(plan.batch.choosing, answers, strict=True):
            try:
                mask = answer.mask(vocab)
            except ConstraintError as error:
                self._answers.fail(answer, error)
            else:
                masks |= {} if mask is None else {sequence: mask}
        return masks


def _done() -> bool:
    """There is nothing to prepare."""
    return False
