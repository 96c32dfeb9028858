"""Many requests at once: a thread that turns an `AnswerLoop` for callers in other threads.

Pieces of answers are handed over together, once a round.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Protocol, TypeVar

from urdir.driver.errors import DriverError
from urdir.model.engine.adapters import AdapterScale
from urdir.model.engine.requests.answer import Answer
from urdir.model.engine.requests.answer_loop import AnswerLoop
from urdir.model.engine.requests.answer_text import AnswerText
from urdir.model.engine.requests.limits import Limits
from urdir.model.engine.requests.metrics import Metrics
from urdir.model.engine.requests.request import Item, Request
from urdir.model.engine.requests.slots import SlotAction, SlotDone, act_on_slot
from urdir.model.engine.requests.warm_up import WarmUp
from urdir.model.engine.step_clock import StepClock
from urdir.model.errors import ModelError
from urdir.model.owner import Owner
from urdir.model.progress import Progress

if TYPE_CHECKING:
    from urdir.model.engine.session import Session
    from urdir.model.text.matcher import ConstraintCompiler
    from urdir.model.text.tokenizer import Tokenizer


_Result = TypeVar("_Result")

#: An idle service records graphs for this time, then looks for requests for this time; a busy one
#: between looks at the device.
_WORK_SECONDS, _PAUSE_SECONDS, _BUSY_SECONDS = 0.001, 0.0001, 0.0002
#: The same where all that is left waits for other threads, which need the interpreter.
_LOOK_SECONDS = 0.001
#: Seconds for which other threads leave off when a request comes, until its first token, at most;
#: and when the last answer has ended: its reader may ask on.
_FIRST_SECONDS, _NEXT_SECONDS = 0.025, 0.01
#: Seconds for which a service looks for a request that is being read.
_EXPECT_SECONDS = 0.002


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
    """Answers requests with the sequences of ``engine``, used exclusively.

    ``post`` hands work to the thread that takes items (by default it is done at once). Without a
    ``tokenizer`` answers have no text, and no token ends one. An idle service works on its
    ``warm_up``, then sleeps. Raises ModelError if the sequences are in use.
    """

    def __init__(
        self,
        engine: OpenModel,
        tokenizer: Tokenizer | None,
        limits: Limits | None = None,
        post: Callable[[Callable[[], None]], None] = lambda work: work(),
        warm_up: WarmUp | None = None,
    ) -> None:
        self._session = session = engine.session
        limits = limits or Limits.for_latency(session.shapes)
        clock = StepClock(session.parts.device, session.stream)
        self._warm_up = warm_up = warm_up or WarmUp(session.steps, ())
        use_wait = partial(warm_up.work, _BUSY_SECONDS)
        self._loop = AnswerLoop(session, tokenizer, limits, clock=clock, use_wait=use_wait)
        self._gate = session.steps.gate
        self._tokenizer = tokenizer
        self._post = post
        self._failure: DriverError | None = None  # of the end
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="service", daemon=True)
        self._thread.start()

    # ---- from other threads ----

    def submit(self, request: Request, deliver: Callable[[Item], None]) -> Answer:
        """Queue a request whose items, with text, go to ``deliver``. An item that is an error
        (BusyError, ContextFullError, ...) rejects or ends it. Compiling a constraint may take a
        second or two. Raises what `AnswerLoop.answer_to` raises."""
        if self._tokenizer is not None:
            deliver = AnswerText(self._tokenizer, request, deliver, lambda: self.stop(answer))
        answer = self.answer_to(request, deliver)
        self.add(answer)
        return answer

    def answer_to(self, request: Request, deliver: Callable[[Item], None]) -> Answer:
        """The first half of `submit`, for items without text; it may compile a constraint."""
        return self._loop.answer_to(request, deliver)

    def expect(self, look: Callable[[], bool]) -> bool:
        """A request is being read. Where nothing is open, other threads leave off now, and the
        thread of this service, which is awake when the request comes, calls ``look`` until that
        has found something. Whether that is so."""
        if not self._loop.is_idle:
            return False
        self._gate.close(_FIRST_SECONDS)
        self._inbox.put(partial(self._look, look))
        return True

    def add(self, answer: Answer) -> None:
        """The second half of `submit`, which never waits."""
        if not self._loop.awaits:  # of more, the later ones wait for the first anyway
            self._gate.close(_FIRST_SECONDS)
        self._inbox.put(lambda: self._loop.add(answer))

    @property
    def compiler(self) -> ConstraintCompiler:
        """Of constraints; see `AnswerLoop.compiler`."""
        return self._loop.compiler

    def cancel(self, answer: Answer) -> None:
        """End a request that has not ended; nothing more is delivered for it."""
        self._inbox.put(lambda: self._loop.cancel(answer))

    def stop(self, answer: Answer) -> None:
        """End a request because its text has a stop string; its ending is delivered."""
        self._inbox.put(lambda: self._loop.stop(answer))

    def act_on_slot(self, action: SlotAction) -> SlotDone:
        """Save, restore or erase the prefix of a slot, and wait for that. Raises what
        `slots.act_on_slot` does, what `lost` has, and ModelError once the service is closed."""
        if self.lost is not None:
            raise self.lost
        return act_on_slot(self._session, action, self._between)

    def _between(self, work: Callable[[], _Result]) -> _Result:
        """The result of work that the thread does between two steps."""
        done: Future[_Result] = Future()

        def do() -> None:
            try:
                done.set_result(work())
            except Exception as error:
                done.set_exception(error)

        if self._is_closing:
            raise ModelError("the service is closed")
        self._inbox.put(do)
        while True:
            with suppress(TimeoutError):
                return done.result(timeout=1.0)
            if not self._thread.is_alive():
                raise ModelError("the service is closed")

    def adapters(self, scales: Mapping[int, float] | None = None) -> tuple[AdapterScale, ...]:
        """See `AnswerLoop.adapters`."""
        return self._loop.adapters(scales)

    @property
    def lost(self) -> Exception | None:
        """Why no request is answered any more: the device is lost. None while they are."""
        return self._loop.lost

    def metrics(self) -> Metrics:
        """Counts and gauges of about now."""
        warm_up = self._warm_up
        wanted = warm_up.recorded + warm_up.left
        return replace(self._loop.metrics(), graphs_recorded=warm_up.recorded, graphs_wanted=wanted)

    def close(self) -> None:
        """End what runs and the thread. The engine stays open. Idempotent. Raises DriverError
        if waiting for the last steps fails."""
        if not self._is_closing:
            self._is_closing = True
            self._inbox.put(None)
            self._thread.join()
            if self._failure is not None:
                raise self._failure

    # ---- the thread ----

    def _run(self) -> None:
        try:
            with self._loop as loop:
                is_open = True
                while is_open:
                    try:
                        if is_open := self._take():
                            loop.turn()
                    except Exception as error:  # ends requests, not the thread
                        loop.fail(error)
                    self._hand_over()
        except DriverError as error:
            self._failure = error

    def _take(self) -> bool:
        """Do the work in the inbox; wait for some if the loop is idle. False once the service is
        closed."""
        is_idle = self._loop.is_idle
        if is_idle:
            self._loop.rest()
            self._gate.close(_NEXT_SECONDS)
        try:
            work = self._wait() if is_idle else self._inbox.get_nowait()
            while work is not None:
                work()
                work = self._inbox.get_nowait()
        except Empty:
            return True
        return False

    def _look(self, look: Callable[[], bool]) -> None:
        """Look for a request that is being read, until another thread has it or it takes long; not
        if others have come."""
        loop, end = self._loop, time.perf_counter() + _EXPECT_SECONDS
        while loop.is_idle and self._inbox.empty() and not look() and time.perf_counter() < end:
            pass

    def _wait(self) -> Callable[[], None] | None:
        """Wait for the next work. Meanwhile graphs are recorded, with pauses in which other threads
        run."""
        warm_up = self._warm_up
        if warm_up.left:
            pause = max(_PAUSE_SECONDS, self._gate.left)
            with Progress("recording graphs") as progress:
                while warm_up.left:
                    with suppress(Empty):
                        return self._inbox.get(timeout=pause)
                    pause = _PAUSE_SECONDS if warm_up.work(_WORK_SECONDS) else _LOOK_SECONDS
                    pause = max(pause, self._gate.left)
                    progress.reach(warm_up.recorded, warm_up.recorded + warm_up.left)
        return self._inbox.get()

    def _hand_over(self) -> None:
        """Deliver all items of a round together."""
        if items := self._loop.take_items():
            self._post(lambda: _deliver(items))


def _deliver(items: Mapping[Answer, Iterable[Item]]) -> None:
    for answer, new in items.items():
        for item in new:
            answer.deliver(item)
