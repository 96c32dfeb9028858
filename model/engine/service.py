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
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from urdir.driver.errors import CudaError, DriverError
from urdir.model.engine.batch import Output
from urdir.model.engine.request import Ending, Piece, Request, TokenChoice
from urdir.model.engine.scheduler import Limits, Scheduler
from urdir.model.engine.sequence import Finish
from urdir.model.engine.step_plan import Outcome, StepPlan
from urdir.model.errors import BusyError, ModelError
from urdir.model.owner import Owner
from urdir.model.text.text_stream import TextStream

if TYPE_CHECKING:
    from urdir.driver.stream import Event
    from urdir.model.engine.engine import Engine
    from urdir.model.text.tokenizer import Tokenizer

#: What comes out of a request: pieces, and last an ending or what went wrong.
Item = Piece | Ending | Exception
#: Steps that are queued before the first of them is read.
_AHEAD = 2


class Answer:
    """A request under way. ``deliver`` gets its items, in the service's thread."""

    def __init__(
        self, request: Request, text: TextStream | None, deliver: Callable[[Item], None]
    ) -> None:
        self.request = request
        self.text = text
        self.deliver = deliver
        self.number = 0  # of the scheduler


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


class Service(Owner):
    """Answers requests by the sequences of ``engine``, which nobody else may use meanwhile.

    ``post`` hands work to the thread that takes items (by default it is done at once). Without a
    ``tokenizer`` there are tokens but no text, and no token ends an answer.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer | None,
        limits: Limits | None = None,
        post: Callable[[Callable[[], None]], None] = lambda work: work(),
    ) -> None:
        self.engine = engine
        self._tokenizer = tokenizer
        self._session = session = engine.session
        self._scheduler = Scheduler(
            session.parts.cache,
            slots=len(session.sequences),
            context=session.context,
            end_ids=frozenset(() if tokenizer is None else tokenizer.end_ids),
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
        the request is not taken or fails, which then ends it. Raises SettingsError."""
        text = (
            TextStream(self._tokenizer, request.stops, request.shown) if self._tokenizer else None
        )
        answer = Answer(request, text, deliver)
        self._inbox.put(lambda: self._add(answer))
        return answer

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
            settings = self._answers[number].request.settings
            state.write_tokens(slot, 0, self._scheduler.tokens(number))
            state.write_sampling(slot, settings.words, settings.seed)
        greedy = all(self._answers[n].request.settings.is_greedy for n in plan.choosers)
        output = Output.GREEDY if greedy else Output.SAMPLE
        shape = session.shapes.of_batch(plan.batch, plan.longest, output)
        event = self._events[self._scheduler.counts.steps % _AHEAD]
        session.queue.launch(shape, plan.batch, plan.positions)
        session.record(event)
        self._steps.append((plan, event))

    def _read(self) -> None:
        """Wait for the oldest step, and take its tokens."""
        plan, event = self._steps[0]
        event.synchronize()
        self._steps.popleft()
        chosen = self._session.parts.state.chosen
        tokens = [chosen(sequence, position) for sequence, position in plan.places]
        for outcome in self._scheduler.chosen(plan, tokens):
            self._tell(outcome)

    def _tell(self, outcome: Outcome) -> None:
        """Turn a token into text, and the end of an answer into its ending."""
        answer, ending = self._answers[outcome.request], outcome.ending
        choices: tuple[TokenChoice, ...] = ()
        text, stream = "", answer.text
        if ending is None or ending.finish is not Finish.END:
            choices = (TokenChoice(outcome.token),)
            text = stream.push(outcome.token) if stream else ""
            if stream and stream.stopped_by is not None:
                ending = self._stopped(answer, ending, stream.stopped_by)
        if ending is not None:
            text += stream.finish() if stream else ""
            del self._answers[outcome.request]
        if text or choices:
            self._items.append((answer, Piece(text, choices)))
        if ending is not None:
            self._items.append((answer, ending))

    def _stopped(self, answer: Answer, ending: Ending | None, stop: str) -> Ending:
        """The ending by a stop string, which comes before any other that the same token brings."""
        if ending is None:
            ending = self._scheduler.cancel(answer.number)
            assert ending is not None
        return Ending(
            Finish.STOP,
            ending.prompt_tokens,
            ending.cached_tokens,
            ending.generated_tokens,
            stop,
        )

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

    def _fail(self, error: Exception) -> None:
        """A step failed: its requests end, or all of them where the device is lost."""
        failed = set(self._answers)
        is_lost = isinstance(error, CudaError) and error.sticky
        if is_lost:
            self._lost = DeviceLostError(f"the device is lost, open the model again: {error}")
            self._steps.clear()
        for number in failed:
            self._scheduler.cancel(number)
            self._items.append((self._answers.pop(number), self._lost or error))
        self._session.queue.forget_rows()

    def _hand_over(self) -> None:
        """Give the items of a step to those who wait for them, together."""
        if items := self._items:
            self._items = []
            self._post(lambda: _deliver(items))


class DeviceLostError(DriverError):
    """A kernel faulted or the GPU failed: nothing can run on it until the model is opened again."""


def limits_of(engine: Engine) -> Limits:
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
