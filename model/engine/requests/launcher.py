"""The half of a service that launches: a plan's rows go to the device, and its step is queued."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from urdir.driver.context import close_all
from urdir.driver.errors import DriverError, loses_device
from urdir.model.engine.batch import Batch, Grain, Output, Segment, StepShape
from urdir.model.engine.decode_graphs import LOOK_AHEAD
from urdir.model.engine.requests.open_answers import OpenAnswers
from urdir.model.engine.requests.scheduler import Scheduler
from urdir.model.engine.requests.step_plan import StepPlan
from urdir.model.engine.run_ahead import AT_ONCE, FEW, RunAhead
from urdir.model.engine.step_clock import Span, StepClock
from urdir.model.engine.step_queue import GivenDrafts
from urdir.model.memory.buckets import COMMON_ROWS, ROWS
from urdir.model.owner import Owner

if TYPE_CHECKING:
    from urdir.model.engine.session import Session
    from urdir.model.text.matcher import Mask

T = TypeVar("T")
log = logging.getLogger("urdir.engine")

#: Outputs of a step; each includes those after it.
_OUTPUTS = (Output.LOGITS, Output.LOGPROBS, Output.SAMPLE, Output.GREEDY)
#: Tokens between two searches for the graphs that an answer needs: fewer than the look-ahead.
_STRIDE = LOOK_AHEAD // 4
#: A shape is recorded after so many steps that took a slower one, if as much of the memory for
#: graphs is left; a step with prompts is slower if more than this share of its rows is padding.
_OFTEN, _SPARE, _PADDING = 4, 0.25, 0.03


@dataclass(frozen=True, slots=True)
class _Step:
    """What will be launched: the rows of ``plan`` by ``shape``, or by ``several``, several steps
    after one another, if that is given and the rows can go on so. The rows want ``output``, which
    that of the shape may include."""

    plan: StepPlan
    shape: StepShape
    several: StepShape | None
    output: Output


@dataclass(frozen=True, slots=True)
class _Launch:
    """The steps of one launch, their shape, and its time where that is wanted."""

    plans: Sequence[StepPlan]
    shape: StepShape
    span: Span | None


class Launcher(Owner):
    """Queues the steps that ``scheduler`` plans for ``answers`` on the device of ``session``.

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
        self._expected: tuple[object, ...] | None = None
        self._next: StepShape | None = None  # the step after the first token of an answer alone
        self._last: tuple[int, Output] | None = None  # length and output of the last step
        self._wishes: Counter[StepShape] = Counter()  # steps that took another shape than these
        self._wished: StepShape | None = None  # which of them is to be recorded
        self._begun_at: float | None = None  # when the oldest launch has begun, where that is known
        if scheduler.drafting is not None:
            scheduler.drafting.is_ready = self._is_drafted_ready

    def __len__(self) -> int:
        """Launches that are not read."""
        return len(self._ahead)

    @property
    def is_full(self) -> bool:
        """Whether enough is queued."""
        return self._ahead.is_full

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
        if self._ahead and self._next and not session.steps.is_recorded(self._next):
            return False  # the first token is read before the host takes its time with a graph
        plan = self._scheduler.plan()
        if plan is None:
            return False
        for number, slot in plan.admitted:
            with self._answers.alone(number):
                self._begin(number, slot)
        masks = self._masks(plan)
        given = self._given(plan, masks)
        step = self._shaped(plan.of(self._answers))
        if step is None:
            return False
        plan = step.plan
        plans, shape = self._repeated(step)
        try:
            for _, missed in plan.missed:
                self._catch_up(missed)
            span = self._launch(plan, shape, _of_sequences(plan, masks), _of_sequences(plan, given))
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
        with _in_advance():
            self._expect(plans[-1], shape, step.output)
        return True

    def wait(self) -> Sequence[StepPlan]:
        """Wait for the oldest launch; its steps. Meanwhile graphs are prepared for answers that
        continue."""
        launch = self._ahead.wait(self._use_wait)
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
        """Wait for the queued launches. Idempotent."""
        try:
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
    ) -> Span | None:
        """Queue the steps of a plan; when they begin and end, if that is wanted."""
        rows = shape, plan.batch, plan.positions, masks
        launch = partial(self._session.queue.launch, *rows, given=given)
        if self.clock is None:
            launch()
            return None
        span = self.clock.span()
        launch(partial(self.clock.mark, span.begin))
        self.clock.mark(span.end)
        return span

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
        if self._session.steps.observer is None:
            shape = self._ready(plan, shape)
        several = None
        if len(plan.choosers) <= FEW:
            several = self._session.graphs.several(shape, plan.longest)
        return _Step(plan, shape, several, output)

    def _repeated(self, step: _Step) -> tuple[list[StepPlan], StepShape]:
        """A few answers go on by several steps at once, where nothing can change meanwhile: the
        steps of one launch, and its shape."""
        if step.several is None:
            return [step.plan], step.shape
        more = self._scheduler.repeat(step.plan, step.several.steps - 1)
        return [step.plan, *more], step.several if more else step.shape

    def _expect(self, last: StepPlan, shape: StepShape, output: Output) -> None:
        """Note which steps will follow, if what chooses a token in the last one goes on: by
        ``output``, with drafts, or as by ``shape``."""
        choosers = len(last.choosers)
        self._next = None
        if not choosers:
            return
        rows, drafted = choosers + sum(last.batch.drafts), shape.drafts > 0
        wished = 0 if self._scheduler.drafting is None else self._scheduler.drafting.wished
        end, longest = self._scheduler.end(last), last.longest
        if longest < end and not last.requests and not self._scheduler.queued:
            self._next = self._following(rows, longest + 1, output)
        self._last = longest, output
        outputs = shape.output, output
        expected = (rows, outputs, longest // _STRIDE, end, drafted, wished, self._wished)
        if expected != self._expected:
            self._expected = expected
            steps = AT_ONCE if choosers <= FEW and output.is_token else 1
            prepare = self._session.graphs.prepare
            pieces: list[Callable[[], bool]] = [
                partial(prepare, rows, shape.output, longest, end, steps, drafted),
                *self._catching_up(longest, end),
            ]
            if wished > rows:
                pieces.append(partial(prepare, wished, output, longest, end, steps, True))
            if drafted:
                pieces.append(partial(prepare, choosers, shape.output, longest, end, steps))
            if self._wished is not None:
                pieces.append(partial(self._session.steps.prepare, self._wished))
            self._look_ahead = partial(_first, pieces)

    def _following(self, rows: int, length: int, output: Output) -> StepShape:
        """What a decode step of so many rows will be launched by."""
        shape = self._session.shapes.decode(rows, length, output)
        found = [self._recorded(of) if _is_fine(of) else of for of in _including(shape)]
        return next((of for of in found if self._session.steps.is_recorded(of)), found[0])

    def _catching_up(self, longest: int, end: int) -> list[Callable[[], bool]]:
        """What prepares the steps that pass missed tokens through a draft model that rests."""
        drafting = self._scheduler.drafting
        if drafting is None or drafting.rest is None:
            return []
        lengths = (longest, min(longest + LOOK_AHEAD, end))
        shapes = dict.fromkeys(self._session.shapes.catch_up(at - 1, at)[0] for at in lengths)
        return [partial(self._session.steps.prepare, shape) for shape in shapes]

    def _recorded(self, shape: StepShape) -> StepShape:
        """The smallest shape with room for the rows of ``shape``, a decode step, that is recorded:
        numbers of drafts change from step to step, and not all numbers of sequences are recorded
        ahead. ``shape`` itself if none is."""
        steps, most = self._session.steps, self._session.parts.state.rows
        if steps.observer is None:
            rows = (rows for rows in ROWS if shape.rows <= rows <= most)
            shapes = (replace(shape, rows=count) for count in rows)
            return next((each for each in shapes if steps.is_recorded(each)), shape)
        return shape

    def _ready(self, plan: StepPlan, shape: StepShape) -> StepShape:
        """The shape, or a recorded one that serves as well: with other numbers of rows; or of steps
        that draw tokens, which include greedy ones, until ``shape`` is recorded."""
        for each in _including(shape):
            found = each
            if shape.drafts or _is_fine(shape):
                found = self._recorded(each)
            elif plan.batch.segments and len(plan.members) > 1:
                found = self._with_less_padding(plan, each)
            if self._session.steps.is_recorded(found):
                if each is not shape:
                    self._wish(shape)
                return found
        return shape

    def _with_less_padding(self, plan: StepPlan, coarse: StepShape) -> StepShape:
        """The shape with the least padding that is recorded, of a step with prompts beside others;
        else the ``coarse`` one. Where such steps come often, one with less will be."""
        shapes, steps = self._session.shapes, self._session.steps
        batch = plan.batch, plan.longest, coarse.output
        found = [shapes.of_batch(*batch, grain) for grain in (Grain.FINE, Grain.MIDDLE)]
        finer = [shape for shape in found if shape.rows < coarse.rows]
        shape = next((shape for shape in finer if steps.is_recorded(shape)), coarse)
        for other in finer:  # the one that serves more steps last, to be recorded first
            if shape.rows > other.rows * (1 + _PADDING):
                self._wish(other)
        return shape

    def _wish(self, shape: StepShape) -> None:
        """Steps by another shape would be faster: one that comes often is recorded."""
        self._wishes[shape] += 1
        if self._wishes[shape] >= _OFTEN and self._session.steps.free_share > _SPARE:
            self._wished = shape

    def _is_drafted_ready(self, rows: int) -> bool:
        """Whether a step of so many rows, with drafts, takes no preparation now."""
        steps = self._session.steps
        if steps.observer is not None:
            return True
        if self._last is None:
            return False
        longest, output = self._last
        length = min(longest + 1 + self._session.shapes.drafts, self._session.shapes.lengths[-1])
        return steps.is_recorded(self._session.shapes.decode(rows, length, output, drafted=True))

    def _note_time(self, launch: _Launch) -> None:
        """A launch is complete: learn what a step of its rows takes, where it followed another one
        without a break."""
        now, begun = time.perf_counter(), self._begun_at
        self._begun_at = now if self._ahead else None
        drafting = self._scheduler.drafting
        if drafting is None or begun is None or launch.shape.prompt:
            return
        seconds, rows = (now - begun) / len(launch.plans), launch.shape.rows
        if launch.plans[0].missed:
            drafting.costs.learn_catch_up(rows, seconds)
        else:
            drafting.costs.learn(rows, seconds, drafted=launch.shape.drafts > 0)

    def _use_wait(self) -> bool:
        """Do a small piece of preparing for what is expected; False where all is done, or where
        another thread does some of it."""
        with _in_advance():
            if self._look_ahead():
                return not self._session.steps.is_waiting
        self._look_ahead = _done
        return False

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


@contextmanager
def _in_advance() -> Iterator[None]:
    """Do something before it is needed, which may fail: the step that needs it tries again, and its
    requests end by the error."""
    try:
        yield
    except DriverError:
        pass
    except Exception:
        log.exception("a step could not be prepared in advance")


def _is_fine(shape: StepShape) -> bool:
    """Whether a decode step has a number of rows whose graphs are not recorded ahead."""
    return not shape.prompt and shape.rows not in COMMON_ROWS


def _including(shape: StepShape) -> tuple[StepShape, ...]:
    """The shape, and that of steps whose output includes its own."""
    if shape.output is not Output.GREEDY or shape.drafts:
        return (shape,)
    return shape, replace(shape, output=Output.SAMPLE)


def _first(pieces: Sequence[Callable[[], bool]]) -> bool:
    """Do the first piece of work that is left; False when all is done."""
    return any(piece() for piece in pieces)


def _done() -> bool:
    """There is nothing to prepare."""
    return False
