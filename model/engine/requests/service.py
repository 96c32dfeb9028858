"""Many requests at once: a thread that owns an engine, and is one step ahead of what it reads.

    the thread                                      the device
    ---------------------------------------------   ------------------
    takes requests and cancellations                step n
    plans step n + 1, writes its rows, queues it
    waits for step n
    reads its tokens: text, endings, pieces         step n + 1
    ...

Where a few answers go on alone, a step here is a launch of several. Whoever asks is in other
threads. Pieces of answers are handed over together, once a launch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Protocol

from urdir.driver.errors import CudaError, DriverError
from urdir.model.engine.requests.answer import Answer, Item
from urdir.model.engine.requests.launcher import Launcher
from urdir.model.engine.requests.limits import Limits
from urdir.model.engine.requests.open_answers import OpenAnswers
from urdir.model.engine.requests.reader import Reader
from urdir.model.engine.requests.request import Request
from urdir.model.engine.requests.scheduler import Scheduler
from urdir.model.engine.requests.warm_up import WarmUp
from urdir.model.errors import ModelError
from urdir.model.owner import Owner

if TYPE_CHECKING:
    from urdir.model.engine.session import Session
    from urdir.model.text.matcher import ConstraintCompiler
    from urdir.model.text.tokenizer import Tokenizer


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
    busy_seconds: float = 0.0  # in which the device ran steps
    idle_seconds: float = 0.0  # between steps, while there was work to do


class OpenModel(Protocol):
    """What a service needs of an `Engine`."""

    @property
    def session(self) -> Session:
        """The sequences that answer."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Of the model's vocabulary."""

    def close(self) -> None:
        """Free the device."""


class Service(Owner):
    """Answers requests by the sequences of ``engine``, which nobody else may use meanwhile.

    ``post`` hands work to the thread that takes items (by default it is done at once). Without a
    ``tokenizer`` there are tokens but no text, and no token ends an answer. While nobody asks,
    there is time for a ``warm_up``.
    """

    def __init__(
        self,
        engine: OpenModel,
        tokenizer: Tokenizer | None,
        limits: Limits | None = None,
        post: Callable[[Callable[[], None]], None] = lambda work: work(),
        warm_up: WarmUp | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._session = session = engine.session
        for sequence in range(len(session.sequences)):
            session.truncate(0, sequence)  # the scheduler keeps the books now
        end_ids = frozenset(() if tokenizer is None else tokenizer.end_ids)
        self._scheduler = Scheduler(
            session.storage,
            slots=len(session.sequences),
            context=session.context,
            end_ids=end_ids,
            limits=limits or Limits.for_latency(session.shapes),
        )
        self._answers = OpenAnswers(self._scheduler)
        self._launcher = Launcher(session, self._scheduler, self._answers, end_ids)
        self._reader = Reader(session, self._scheduler, self._answers)
        self._post = post
        self._warm_up = warm_up or WarmUp(session.steps, ())
        self._lost: Exception | None = None
        self._failure: DriverError | None = None  # of the end
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
        self._inbox.put(lambda: self._answers.cancel(answer))

    @property
    def lost(self) -> Exception | None:
        """Why no request is answered any more: the device is lost. None while they are."""
        return self._lost

    def metrics(self) -> Metrics:
        """Where it stands, about now."""
        scheduler, pools = self._scheduler, self._session.parts.cache.pools
        clock = self._launcher.clock
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
            busy_seconds=clock.busy_seconds,
            idle_seconds=clock.idle_seconds,
        )

    def close(self) -> None:
        """End what runs and the thread; closing twice does nothing. The engine stays open. Raises
        DriverError where waiting for the last steps fails."""
        if not self._is_closing:
            self._is_closing = True
            self._inbox.put(None)
            self._thread.join()
            if self._failure is not None:
                raise self._failure

    # ---- the thread ----

    def _run(self) -> None:
        try:
            with self._launcher:
                while self._take():
                    try:
                        self._step()
                    except Exception as error:  # ends requests, not the thread
                        self._fail(error)
                    self._hand_over()
        except DriverError as error:
            self._failure = error

    def _take(self) -> bool:
        """Do what was asked for; wait for something where there is nothing else to do. False once
        the service is closed."""
        is_idle = not self._answers and not self._launcher
        if is_idle:
            self._launcher.clock.rest()
        while is_idle and self._inbox.empty() and self._warm_up.do_piece():
            pass
        try:
            while (work := self._inbox.get(block=is_idle)) is not None:
                is_idle = False
                work()
        except Empty:
            return True
        return False

    def _step(self) -> None:
        """Queue the next step, or read the oldest ones that are queued."""
        launcher = self._launcher
        self._answers.fail_overdue()
        is_queued = not launcher.is_full and launcher.launch()
        if launcher and (launcher.is_full or not is_queued):
            for plan in launcher.wait():
                self._reader.read(plan)

    def _add(self, answer: Answer) -> None:
        if self._lost is None:
            self._answers.add(answer)
        else:
            self._answers.tell(answer, self._lost)

    def _fail(self, error: Exception) -> None:
        """A step failed: the requests that have begun end, or all where the device is lost. What is
        queued is theirs alone, so that nobody reads it."""
        self._launcher.clear()
        if isinstance(error, CudaError) and error.sticky:
            self._lost = DeviceLostError(f"the device is lost, open the model again: {error}")
            self._answers.fail_all(self._lost)
        else:
            self._answers.fail_begun(error)
        self._session.queue.forget_rows()
        self._launcher.clock.rest()

    def _hand_over(self) -> None:
        """Give the items of a step to those who wait for them, together."""
        if items := self._answers.take_items():
            self._post(lambda: _deliver(items))


class DeviceLostError(DriverError):
    """A kernel faulted or the GPU failed: nothing can run on it until the model is opened again."""


def _deliver(items: Mapping[Answer, Iterable[Item]]) -> None:
    for answer, told in items.items():
        for item in told:
            answer.deliver(item)
