"""Many requests at once: a thread that owns an engine, and is one step ahead of what it reads.

    the thread                                      the device
    ---------------------------------------------   ------------------
    takes requests and cancellations                step n
    plans step n + 1, writes its rows, queues it
    waits for step n
    reads its tokens: text, endings, pieces         step n + 1
    ...

Whoever asks is in other threads. Pieces of answers are handed over together, once a step.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Protocol

from urdir.driver.errors import CudaError, DriverError
from urdir.model.engine.answer import Answer, Item
from urdir.model.engine.batch import Output
from urdir.model.engine.request import Piece, Request, TokenChoice
from urdir.model.engine.scheduler import Limits, Scheduler
from urdir.model.engine.sequence import Finish
from urdir.model.engine.step_plan import Outcome, StepPlan
from urdir.model.errors import BusyError, ConstraintError, ModelError
from urdir.model.owner import Owner
from urdir.ptxgen.kernels.sampling import INVALID_TOKEN

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.driver.stream import Event
    from urdir.model.engine.session import Session
    from urdir.model.text.matcher import ConstraintCompiler, Mask
    from urdir.model.text.tokenizer import Tokenizer

#: What a step may be asked for, each of which serves those after it.
_OUTPUTS = (Output.LOGPROBS, Output.SAMPLE, Output.GREEDY)
#: Steps that are queued before the first of them is read.
_AHEAD = 2


@dataclass(frozen=True, slots=True)
class Metrics:
    """Where a service stands. Counts are since it began; ``queued``, ``running`` and pages are of
    now."""

    queued: int = 0
    running: int = 0
    pages_used: int = 0
    pages_total: int = 0
    prefix_queries: int = 0  # prompt tokens that were looked up
    prefix_hits: int = 0  # of these, tokens that were found
    prompt_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    preemptions: int = 0


class OpenModel(Protocol):
    """What a service needs of an `Engine`."""

    @property
    def session(self) -> Session:
        """The sequences that answer."""

    @property
    def device(self) -> Device:
        """The device that they are on."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Of the model's vocabulary."""


class Service(Owner):
    """Answers requests by the sequences of ``engine``, which nobody else may use meanwhile.

    ``post`` hands work to the thread that takes items (by default it is done at once). Without a
    ``tokenizer`` there are tokens but no text, and no token ends an answer.
    """

    def __init__(
        self,
        engine: OpenModel,
        tokenizer: Tokenizer | None,
        limits: Limits | None = None,
        post: Callable[[Callable[[], None]], None] = lambda work: work(),
    ) -> None:
        self._tokenizer = tokenizer
        self._session = session = engine.session
        for sequence in range(len(session.sequences)):
            session.truncate(0, sequence)  # the scheduler keeps the books now
        self._end_ids = frozenset(() if tokenizer is None else tokenizer.end_ids)
        self._scheduler = Scheduler(
            session.parts.cache,
            slots=len(session.sequences),
            context=session.context,
            end_ids=self._end_ids,
            limits=limits or limits_of(engine),
        )
        self._post = post
        self._answers: dict[int, Answer] = {}
        self._items: list[tuple[Answer, Item]] = []
        self._steps: deque[tuple[StepPlan, Event]] = deque()
        self._events = [engine.device.create_event("step") for _ in range(_AHEAD)]
        self._lost: Exception | None = None
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="service", daemon=True)
        self._thread.start()

    # ---- from other threads ----

    def submit(self, request: Request, deliver: Callable[[Item], None]) -> Answer:
        """Ask. Items come through ``deliver``: a BusyError, ContextFullError or another error where
        the request is not taken or fails, which then ends it. Raises SettingsError, and
        ConstraintError for a constraint that cannot be compiled, which may take a second."""
        matcher = None
        if request.constraint is not None:
            matcher = self.compiler.matcher(request.constraint)
            # nothing but an end may come once the text is whole
            request = replace(request, settings=replace(request.settings, min_tokens=0))
        answer = Answer(request, self._tokenizer, matcher, deliver)
        self._inbox.put(lambda: self._add(answer))
        return answer

    @cached_property
    def compiler(self) -> ConstraintCompiler:
        """Of constraints; made when first asked for, in a second or two. Raises ModelError where
        the extra is missing."""
        from urdir.model.text.matcher import ConstraintCompiler

        if self._tokenizer is None:
            raise ModelError("constrained output needs a vocabulary: the file has none")
        return ConstraintCompiler(self._tokenizer)

    def cancel(self, answer: Answer) -> None:
        """End a request, if it has not ended: nothing more of it is delivered."""
        self._inbox.put(lambda: self._cancel(answer))

    def metrics(self) -> Metrics:
        """Where it stands, about now."""
        scheduler, pools = self._scheduler, self._session.parts.cache.pools
        counts = scheduler.counts
        return Metrics(
            queued=scheduler.queued,
            running=scheduler.running,
            pages_used=sum(pool.used for pool in pools),
            pages_total=sum(pool.pages for pool in pools),
            prefix_queries=counts.prompt_tokens,
            prefix_hits=counts.cached_tokens,
            prompt_tokens=counts.prompt_tokens,
            generated_tokens=counts.generated_tokens,
            steps=counts.steps,
            preemptions=counts.set_back,
        )

    def close(self) -> None:
        """End what runs and the thread; closing twice does nothing. The engine stays open."""
        if not self._is_closing:
            self._is_closing = True
            self._inbox.put(None)
            self._thread.join()
            for event in self._events:
                event.close()

    # ---- the thread ----

    def _run(self) -> None:
        while self._take():
            try:
                self._step()
            except Exception as error:  # whatever a step raises ends its requests, not the thread
                self._fail(error)
            self._hand_over()
        while self._steps:
            self._steps.popleft()[1].synchronize()

    def _take(self) -> bool:
        """Do what was asked for; wait for something where there is nothing else to do. False once
        the service is closed."""
        is_idle = not self._answers and not self._steps
        try:
            while (work := self._inbox.get(block=is_idle)) is not None:
                is_idle = False
                work()
        except Empty:
            return True
        return False

    def _step(self) -> None:
        """Queue the next step, or read the oldest one that is queued."""
        for number, error in self._scheduler.overdue().items():
            self._items.append((self._answers.pop(number), error))
        plan = self._scheduler.plan() if len(self._steps) < _AHEAD else None
        if plan is not None:
            self._launch(plan)
        if self._steps and (plan is None or len(self._steps) == _AHEAD):
            self._read()

    def _launch(self, plan: StepPlan) -> None:
        """Write what is new on the device and queue the step."""
        session, state = self._session, self._session.parts.state
        for number, slot in plan.admitted:
            request = self._answers[number].request
            ends = () if request.ignore_end else self._end_ids
            state.write_tokens(slot, 0, self._scheduler.tokens(number))
            state.write_sampling(slot, request.settings.words(len(request.prompt), ends))
        answers = [self._answers[number] for number in plan.choosers]
        wanted = {answer.output for answer in answers}
        output = next((kind for kind in _OUTPUTS if kind in wanted), Output.NONE)
        shape = session.shapes.of_batch(plan.batch, plan.longest, output)
        event = self._events[self._scheduler.counts.steps % _AHEAD]
        session.queue.launch(shape, plan.batch, plan.positions, self._masks(plan, answers))
        session.record(event)
        self._steps.append((plan, event))

    def _masks(self, plan: StepPlan, answers: Sequence[Answer]) -> dict[int, Mask]:
        """The tokens that may come, by sequence, of answers with a constraint."""
        vocab = self._session.parts.config.vocab_size
        masks: dict[int, Mask] = {}
        for sequence, answer in zip(plan.batch.choosing, answers, strict=True):
            try:
                mask = answer.mask(vocab)
            except ConstraintError as error:
                self._end(answer, error)
            else:
                masks |= {} if mask is None else {sequence: mask}
        return masks

    def _read(self) -> None:
        """Wait for the oldest step, and take its tokens."""
        plan, event = self._steps[0]
        event.synchronize()
        self._steps.popleft()
        chosen, places = self._session.parts.state.chosen, plan.places
        tokens = [chosen(sequence, position) for sequence, position in places]
        for number, (sequence, _), token in zip(plan.choosers, places, tokens, strict=True):
            if token == INVALID_TOKEN and number in self._answers:
                self._end(self._answers[number], self._session.no_choice(sequence))
        for outcome in self._scheduler.chosen(plan, tokens):
            choice = self._choice(outcome, *places[outcome.row])
            try:
                self._tell(outcome, choice)
            except ConstraintError as error:
                self._end(self._answers[outcome.request], error)

    def _choice(self, outcome: Outcome, sequence: int, position: int) -> TokenChoice:
        """What is known of a token that was chosen after the one at ``position``."""
        likely = self._answers[outcome.request].request.settings.logprobs
        if likely is None:
            return TokenChoice(outcome.token)
        state = self._session.parts.state
        return TokenChoice(outcome.token, *state.log_probabilities(sequence, position, likely))

    def _tell(self, outcome: Outcome, choice: TokenChoice) -> None:
        """Turn a token into text, and the end of an answer into its ending."""
        answer, ending = self._answers[outcome.request], outcome.ending
        choices: tuple[TokenChoice, ...] = ()
        text = ""
        if ending is None or ending.finish is not Finish.END:
            choices, text = (choice,), answer.push(choice)
            if (stop := answer.stopped_by) is not None:  # before any other end by the same token
                ended = self._scheduler.cancel(answer.number) if ending is None else ending
                assert ended is not None
                ending = replace(ended, finish=Finish.STOP, stopped_by=stop)
        if ending is not None:
            text += answer.finish()
            del self._answers[outcome.request]
        if text or choices:
            self._items.append((answer, Piece(text, choices)))
        if ending is not None:
            self._items.append((answer, ending))

    def _add(self, answer: Answer) -> None:
        if self._lost is not None:
            self._items.append((answer, self._lost))
            return
        try:
            answer.number = self._scheduler.add(answer.request)
        except (ModelError, BusyError) as error:
            self._items.append((answer, error))
            return
        self._answers[answer.number] = answer

    def _cancel(self, answer: Answer) -> None:
        if self._answers.get(answer.number) is answer:
            del self._answers[answer.number]
            self._scheduler.cancel(answer.number)
        self._items = [item for item in self._items if item[0] is not answer]

    def _end(self, answer: Answer, error: Exception) -> None:
        """A request fails by itself."""
        del self._answers[answer.number]
        self._scheduler.cancel(answer.number)
        self._items.append((answer, error))

    def _fail(self, error: Exception) -> None:
        """A step failed: its requests end, or all of them where the device is lost."""
        failed = set(self._answers)
        is_lost = isinstance(error, CudaError) and error.sticky
        if is_lost:
            self._lost = DeviceLostError(f"the device is lost, open the model again: {error}")
            self._steps.clear()
        for number in failed:
            self._end(self._answers[number], self._lost or error)
        self._session.queue.forget_rows()

    def _hand_over(self) -> None:
        """Give the items of a step to those who wait for them, together."""
        if items := self._items:
            self._items = []
            self._post(lambda: _deliver(items))


class DeviceLostError(DriverError):
    """A kernel faulted or the GPU failed: nothing can run on it until the model is opened again."""


def limits_of(engine: OpenModel) -> Limits:
    """Limits of the scheduler that fit the engine's steps."""
    shapes = engine.session.shapes
    alignment, most = shapes.alignment, shapes.chunks[-1]
    whole = max(alignment, most // alignment * alignment)
    return Limits(
        prompt_rows=whole,
        mixed_rows=min(whole, max(alignment, 512 // alignment * alignment)),
        alignment=alignment,
    )


def _deliver(items: list[tuple[Answer, Item]]) -> None:
    for answer, item in items:
        answer.deliver(item)
