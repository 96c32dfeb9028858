"""The half of a service that launches: a plan's rows go to the device, and its step is queued."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from urdir.driver.context import close_all
from urdir.driver.errors import LifetimeError, loses_device
from urdir.model.engine.batch import Batch, Output, Segment, StepShape
from urdir.model.engine.requests.expected_steps import ExpectedSteps, in_advance
from urdir.model.engine.requests.open_answers import OpenAnswers
from urdir.model.engine.requests.recorded_shapes import RecordedShapes
from urdir.model.engine.requests.revision import Revision
from urdir.model.engine.requests.scheduler import Scheduler
from urdir.model.engine.requests.step_plan import StepPlan
from urdir.model.engine.run_ahead import FEW, RunAhead
from urdir.model.engine.step_clock import Span, StepClock
from urdir.model.engine.step_queue import GivenDrafts
from urdir.model.memory.scored_rows import TURNS, ScoredRows
from urdir.model.owner import Owner

if TYPE_CHECKING:
    from urdir.model.engine.session import Session
    from urdir.model.text.matcher import Mask

T = TypeVar("T")

#: Seconds that the host takes from the end of a step until it waits again, about.
_TURN = 0.002

#: Outputs of a step; each includes those after it.
_OUTPUTS = (Output.LOGITS, Output.LOGPROBS, Output.SAMPLE, Output.GREEDY)


@dataclass(frozen=True, slots=True)
class _Step:
    """What will be launched: the rows of ``plan`` by ``shape``, or by ``several``, several steps
    after one another, if that is given and the rows can go on so. The rows want ``output``, which
    that of the shape may include; ``revision`` changes their logits."""

    plan: StepPlan
    shape: StepShape
    several: StepShape | None
    output: Output
    revision: Revision | None


@dataclass(frozen=True, slots=True)
class _Launch:
    """The steps of one launch, their shape, and its time where that is wanted."""

    plans: Sequence[StepPlan]
    shape: StepShape
    span: Span | None


class Launcher(Owner):
    """Queues the steps that ``scheduler`` plans for ``answers`` on the device of ``session``.

    A ``clock``, which the launcher closes, times what is read; without one a launch takes the host
    less time. ``use_wait`` is work in pieces for when it would wait for the device.
    """

    def __init__(
        self,
        session: Session,
        scheduler: Scheduler,
        answers: OpenAnswers,
        clock: StepClock | None = None,
        use_wait: Callable[[], bool] = lambda: False,
    ) -> None:
        self._session = session
        self._use_wait = use_wait
        self._scheduler = scheduler
        self._answers = answers
        self._ahead: RunAhead[_Launch] = RunAhead(session.parts.device, session.stream)
        self.clock = clock
        self._shapes = RecordedShapes(session)
        self._expected = ExpectedSteps(session, scheduler, self._shapes)
        self._is_revised = False  # the last step
        self._turn = 0  # of the last step with scored rows
        self._begun_at: float | None = None  # when the oldest launch has begun, where that is known
        scheduler.takes_whole = self._takes_whole
        if scheduler.drafting is not None:
            scheduler.drafting.is_ready = partial(self._expected.is_ready, drafted=True)
        if scheduler.paced is not None:
            scheduler.paced.is_ready = self._expected.is_ready

    def __len__(self) -> int:
        """Launches that are not read."""
        return len(self._ahead)

    @property
    def is_full(self) -> bool:
        """Whether enough is queued. A step whose logits were changed is read before the next one is
        planned: so answers with processors go on together."""
        return self._ahead.is_full or (self._is_revised and bool(self._ahead))

    @property
    def waited_seconds(self) -> float:
        """How long the host only waited for the device."""
        return self._ahead.waited_seconds

    def launch(self) -> bool:
        """Plan a step and queue it. False if none can be queued now, or if a first token would wait
        for the recording of its graph.

        An error in planning ends the requests it concerns, an error in queueing those of the step.
        Raises an error that no single request causes.
        """
        session = self._session
        if self._ahead and self._expected.takes_time:
            return False  # the first token is read before the host takes its time with a graph
        plan = self._scheduler.plan()
        if plan is None:
            return False
        for number, slot in plan.admitted:
            with self._answers.alone(number):
                self._begin(number, slot)
        masks = self._masks(plan)
        given = self._given(plan, masks)
        admitted = plan.admitted
        step = self._shaped(self._with_turn(plan.of(self._answers)))
        if step is None:
            return False
        plan = step.plan
        plans, shape = self._repeated(step)
        try:
            self._begin_sources(admitted)
            for _, missed in plan.missed:
                self._catch_up(missed)
            rows = _of_sequences(plan, masks), _of_sequences(plan, given)
            span = self._launch(plan, shape, *rows, step.revision)
        except Exception as error:
            if loses_device(error):
                raise
            for number in plan.members:
                self._answers.fail(self._answers[number], error)
            session.queue.forget_rows()
            return False
        for number, segment in zip(plan.prompts, plan.batch.segments, strict=True):
            with self._answers.alone(number):
                session.storage.keep_prefix(segment.sequence, segment.end)
        self._ahead.queued(_Launch(plans, shape, span))
        self._look_ahead(step, plans[-1], shape)
        return True

    def _look_ahead(self, step: _Step, last: StepPlan, shape: StepShape) -> None:
        """A step is queued: note what will follow, and end the answers that its revision failed."""
        self._is_revised = step.revision is not None
        if step.revision is None:
            with in_advance():
                self._expected.expect(last, shape, step.output)
            return
        self._expected.forget()
        for number, error in step.revision.errors.items():
            self._answers.fail_alone(number, error)

    def wait(self) -> Sequence[StepPlan]:
        """Wait for the oldest launch; its steps. Meanwhile graphs are prepared for answers that
        continue, by other threads too unless a first token is awaited."""
        gate = self._session.steps.gate
        if not self._answers.awaited:
            gate.open()
        launch = self._ahead.wait(self._expected.prepare, self._use_wait)
        gate.close(_TURN)
        self._note_time(launch)
        if self.clock is not None and launch.span is not None:
            self.clock.read(launch.span)
        return launch.plans

    def clear(self) -> None:
        """Drop the queued launches unread."""
        self._ahead.clear()
        self._begun_at = None
        self.rest()

    def rest(self) -> None:
        """Pause the clock: the time until the next step is not device time."""
        if self.clock is not None:
            self.clock.rest()

    def close(self) -> None:
        """Wait for the queued launches, if the device is open still. Idempotent."""
        try:
            with suppress(LifetimeError):
                while self._ahead:
                    self._ahead.wait()
        finally:
            close_all([self._ahead, *([self.clock] if self.clock else [])])

    def _launch(
        self,
        plan: StepPlan,
        shape: StepShape,
        masks: Mapping[int, Mask],
        given: Mapping[int, GivenDrafts],
        revision: Revision | None,
    ) -> Span | None:
        """Queue the steps of a plan; when they begin and end, if that is wanted."""
        rows = shape, plan.batch, plan.positions, masks
        scored = self._scored(plan, shape) if shape.scored else None
        queue = self._session.queue
        launch = partial(queue.launch, *rows, given=given, revise=revision, scored=scored)
        span = None
        if self.clock is None:
            launch()
        else:
            span = self.clock.span()
            launch(partial(self.clock.mark, span.begin))
            self.clock.mark(span.end)
        if scored is not None:
            self._turn = scored.turn
        return span

    def _with_turn(self, plan: StepPlan) -> StepPlan:
        """The plan; with scored rows, their results lie where those of the last such one do not."""
        return replace(plan, turn=(self._turn + 1) % TURNS) if plan.batch.scored else plan

    def _scored(self, plan: StepPlan, shape: StepShape) -> ScoredRows:
        """The scored rows of a plan."""
        segments, tokens, likely = plan.batch.segments, list[int](), 0
        for number, segment in zip(plan.prompts, segments, strict=True):
            start = segment.start + 1
            tokens += self._scheduler.tokens(number)[start : start + segment.scored]
            likely = max(likely, self._answers[number].request.prompt_logprobs or 0)
        counts = [segment.scored for segment in segments]
        sequences = np.repeat(np.array([s.sequence for s in segments], np.uint32), counts)
        rows = self._session.shapes.scored_rows(plan.batch, shape)
        return ScoredRows(rows, sequences, np.array(tokens, np.uint32), likely, plan.turn)

    def _catch_up(self, missed: Segment) -> None:
        """Queue steps that pass tokens through the draft model, which it missed in a rest."""
        start, session = missed.start, self._session
        while start < missed.end:
            shape, end = session.shapes.catch_up(start, missed.end)
            session.queue.launch(shape, Batch((), (replace(missed, start=start, end=end),)), ())
            start = end

    def _begin(self, number: int, slot: int) -> None:
        """Write what is known of a request that has been given a sequence."""
        answer, state = self._answers[number], self._session.parts.state
        request, answer.cached = answer.request, self._scheduler.cached(number)
        state.write_tokens(slot, 0, self._scheduler.tokens(number))
        words = request.settings.words(len(request.prompt), answer.end_ids)
        state.write_sampling(slot, words)
        state.write_adapter(slot, *answer.place)
        complete = self._scheduler.complete(number)
        self._session.begin_drafts(slot, complete, request.draft_p_min)

    def _begin_sources(self, admitted: Sequence[tuple[int, int]]) -> None:
        """Queue the encoding of the sources of requests that have been given a sequence."""
        answers = [(slot, self._answers.get(number)) for number, slot in admitted]
        sources = {slot: of.request.source for slot, of in answers if of and of.request.source}
        self._session.begin_sources(sources)

    def _shaped(self, plan: StepPlan) -> _Step | None:
        """The shape of a step. Requests without a shape even alone fail; None if none is left."""
        try:
            return self._shape(plan)
        except Exception:
            for number in plan.members:
                with self._answers.alone(number):
                    self._shape(plan.of({number}))
            others = plan.of(self._answers)
            if others is plan:
                raise
            return self._shape(others)

    def _shape(self, plan: StepPlan) -> _Step | None:
        """The shape of a step; None where it has no rows."""
        if not plan.members:
            return None
        wanted = {self._answers[number].output for number in plan.choosers}
        output = next((kind for kind in _OUTPUTS if kind in wanted), Output.NONE)
        shape = self._session.shapes.of_batch(plan.batch, plan.longest, output)
        revision = None
        if output is not Output.LOGITS:  # the host changes those that it chooses by itself
            revision = Revision.of(plan, self._session, self._answers, self._scheduler)
        if revision is not None:
            layers, _ = shape.halves
            ready = self._ready(plan, layers)
            return _Step(
                plan, replace(ready, part=shape.part, output=output), None, output, revision
            )
        shape = self._ready(plan, shape)
        several = None
        if len(plan.choosers) <= FEW:
            several = self._session.graphs.several(shape, plan.longest)
        return _Step(plan, shape, several, output, None)

    def _takes_whole(self, number: int, start: int, end: int) -> bool:
        """Whether a step with the end of a prompt alone has a graph with little padding."""
        if self._session.steps.observer is not None:
            return False
        return self._shapes.takes_whole(start, end, self._answers[number].output)

    def _ready(self, plan: StepPlan, shape: StepShape) -> StepShape:
        """The shape, or a recorded one that serves as well."""
        if self._session.steps.observer is not None:
            return shape
        return self._shapes.ready(plan, shape)

    def _repeated(self, step: _Step) -> tuple[list[StepPlan], StepShape]:
        """A few answers go on by several steps at once, where nothing can change meanwhile: the
        steps of one launch, and its shape."""
        if step.several is None:
            return [step.plan], step.shape
        more = self._scheduler.repeat(step.plan, step.several.steps - 1)
        return [step.plan, *more], step.several if more else step.shape

    def _note_time(self, launch: _Launch) -> None:
        """A launch is complete: learn what a step of its rows takes, where it followed another one
        without a break."""
        now, begun = time.perf_counter(), self._begun_at
        self._begun_at = now if self._ahead else None
        drafting = self._scheduler.drafting
        if begun is not None and launch.shape.prompt and not launch.shape.decode:
            segments = launch.plans[0].batch.segments
            tokens = sum(segment.end - segment.start for segment in segments)
            self._session.storage.learn(tokens, now - begun)
        if begun is None or launch.shape.prompt:
            return
        seconds, rows = (now - begun) / len(launch.plans), launch.shape.rows
        if self._scheduler.paced is not None:
            self._scheduler.paced.learn(rows, seconds)
        if drafting is None:
            return
        if launch.plans[0].missed:
            drafting.costs.learn_catch_up(rows, seconds)
        else:
            drafting.costs.learn(rows, seconds, drafted=launch.shape.drafts > 0)

    def _masks(self, plan: StepPlan) -> dict[int, Mask]:
        """The tokens that may come, by request, of answers with a constraint."""
        vocab = self._session.parts.config.vocab_size
        masks: dict[int, Mask] = {}
        for number in plan.choosers:
            if (answer := self._answers.get(number)) is None:
                continue
            with self._answers.alone(number):
                if (mask := answer.mask(vocab)) is not None:
                    masks[number] = mask
        return masks

    def _given(self, plan: StepPlan, masks: Container[int]) -> dict[int, GivenDrafts]:
        """Drafts of the host, by request, of answers with a constraint in a step with drafts."""
        given: dict[int, GivenDrafts] = {}
        parts = self._session.parts
        if parts.state.drafts is None or not plan.batch.drafts:
            return given
        for number, most in zip(plan.requests, plan.batch.drafts, strict=True):
            if number not in masks or (answer := self._answers.get(number)) is None:
                continue
            with self._answers.alone(number):
                tokens, vocab = self._scheduler.tokens(number), parts.config.vocab_size
                given[number] = answer.drafts(vocab, tokens, parts.state.drafts, most)
        return given


def _of_sequences(plan: StepPlan, by_request: Mapping[int, T]) -> dict[int, T]:
    """What belongs to requests by the sequences that a step has for them."""
    pairs = zip(plan.batch.choosing, plan.choosers, strict=True) if by_request else ()
    return {sequence: by_request[number] for sequence, number in pairs if number in by_request}
