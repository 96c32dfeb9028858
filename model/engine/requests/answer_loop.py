"""The loop that answers requests, one round at a time, and is one step ahead of what it reads.

    the host                                        the device
    ---------------------------------------------   ------------------
    plans step n + 1, writes its rows, queues it    step n
    waits for step n
    reads its tokens: pieces, endings               step n + 1
    ...

If only a few answers continue, a step here is a launch of several steps. The consumer turns the
loop: a thread for many users (`Service`), the caller itself for one (`Generation`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from urdir.driver.errors import HostWorkError, loses_device
from urdir.model.engine.adapters import AdapterScale, Choice
from urdir.model.engine.requests.answer import Answer
from urdir.model.engine.requests.choices import Choose, DeviceChoices, HostChoices
from urdir.model.engine.requests.device_lost import DeviceLostError
from urdir.model.engine.requests.launcher import Launcher
from urdir.model.engine.requests.limits import Limits
from urdir.model.engine.requests.metrics import Metrics
from urdir.model.engine.requests.open_answers import OpenAnswers
from urdir.model.engine.requests.reader import Reader
from urdir.model.engine.requests.request import Item, Request
from urdir.model.engine.requests.scheduler import Scheduler
from urdir.model.engine.requests.sources import with_source
from urdir.model.errors import ModelError, SettingsError
from urdir.model.owner import Owner
from urdir.model.text.thought_limit import ThoughtClock

if TYPE_CHECKING:
    from urdir.model.engine.session import Session
    from urdir.model.engine.step_clock import StepClock
    from urdir.model.text.matcher import ConstraintCompiler
    from urdir.model.text.tokenizer import Tokenizer


class AnswerLoop(Owner):
    """Answers requests with the sequences of ``session``, used exclusively.

    Answers have tokens; `AnswerText` makes text of them. Without a ``tokenizer`` no token ends one,
    and there are no constraints. If ``choose`` is given, the host samples tokens from logits with
    it. The loop owns ``clock``, which times the steps for `metrics`. ``use_wait`` is work in short
    pieces for when a turn would wait for the device; it returns False if nothing is left to do
    now. Raises ModelError if the sequences are in use.
    """

    def __init__(
        self,
        session: Session,
        tokenizer: Tokenizer | None,
        limits: Limits,
        *,
        choose: Choose | None = None,
        clock: StepClock | None = None,
        use_wait: Callable[[], bool] = lambda: False,
    ) -> None:
        self._tokenizer = tokenizer
        self._session = session
        self._on_host = choose is not None
        self._lost: Exception | None = None
        if session.takes_sources:  # keys depend on the source, too
            limits = replace(limits, share_prefixes=False)
        self._end_ids = end_ids = frozenset(() if tokenizer is None else tokenizer.end_ids)
        with ExitStack() as owners:
            owners.enter_context(session.in_use())
            self._scheduler = scheduler = Scheduler(
                session.storage,
                slots=session.sequences,
                context=session.context,
                end_ids=end_ids,
                limits=limits,
                waits=choose is not None,
                drafting=session.drafting,
            )
            scheduler.paced = session.paced
            self._answers = answers = OpenAnswers(scheduler, session.adapters)
            launcher = Launcher(session, scheduler, answers, clock, use_wait)
            self._launcher = owners.enter_context(launcher)
            choices = (
                DeviceChoices(session, scheduler)
                if choose is None
                else HostChoices(session, scheduler, answers, choose)
            )
            self._reader = Reader(session, scheduler, answers, choices)
            owners.callback(answers.cancel_all)  # before the steps that are queued are waited for
            self._owners = owners.pop_all()

    # ---- what is asked ----

    def answer_to(
        self, request: Request, deliver: Callable[[Item], None] = lambda item: None
    ) -> Answer:
        """Make an answer for `add`; ``deliver`` receives its items. Callable from any thread.

        Compiling a constraint may take a second or two. Raises ModelError for a token outside the
        vocabulary, SettingsError, and what `ConstraintCompiler.matcher` raises."""
        request = with_source(self._session, self._tokenizer, request)
        self._session.check_tokens(request.prompt)
        self._session.check_settings(request.settings)
        if request.prompt_logprobs is not None:
            self._session.check_predicts_texts()
        if request.processors and not self._on_host:
            self._session.check_processors()
        matcher = None
        if request.constraint is not None:
            matcher = self.compiler.matcher(request.constraint)
            # nothing but an end may come once the text is whole
            request = replace(request, settings=replace(request.settings, min_tokens=0))
        chosen: Choice = ()
        if (adapters := self._session.adapters) is not None:
            chosen = adapters.chosen(request.adapters)
            request = replace(request, scope=adapters.scope(request.scope, chosen))
        elif request.adapters:
            raise SettingsError(f"no adapter {request.adapters[0][0]!r}: none is loaded")
        thoughts = None
        if request.thoughts is not None and self._tokenizer is not None:
            thoughts = ThoughtClock(request.thoughts, self._tokenizer)
        made = request, self._end_ids, matcher, deliver
        return Answer(*made, thoughts=thoughts, on_host=self._on_host, adapters=chosen)

    @property
    def compiler(self) -> ConstraintCompiler:
        """Of constraints; see `Session.compiler`."""
        if self._tokenizer is None:
            raise ModelError("constrained output needs a vocabulary: the file has none")
        return self._session.compiler(self._tokenizer)

    def add(self, answer: Answer) -> None:
        """Queue its request; on rejection only the error is delivered."""
        if self._lost is None:
            self._answers.add(answer)
        else:
            self._answers.tell(answer, self._lost)

    def cancel(self, answer: Answer) -> None:
        """End a request that has not ended; nothing more is delivered for it."""
        self._answers.cancel(answer)

    def stop(self, answer: Answer) -> None:
        """End a request that has not ended because its text has a stop string; its ending is
        delivered."""
        self._answers.stop(answer)

    def adapters(self, scales: Mapping[int, float] | None) -> tuple[AdapterScale, ...]:
        """The LoRA adapters, after their ``scales`` in requests that name none are set, if given.
        Callable from any thread. Raises SettingsError."""
        if (adapters := self._session.adapters) is None:
            if scales:
                raise SettingsError("no adapters are loaded")
            return ()
        if scales is not None:
            adapters.set_scales(scales)
        return adapters.scales()

    # ---- rounds ----

    @property
    def is_idle(self) -> bool:
        """True if no request is open and no step is queued."""
        return not self._answers and not self._launcher

    @property
    def awaits(self) -> bool:
        """Whether a request waits for its first token."""
        return bool(self._answers.awaited)

    def turn(self) -> None:
        """Queue the next step, or read the oldest ones that are queued. Raises DriverError and
        ModelError: see `fail`."""
        launcher = self._launcher
        self._answers.fail_dropped()
        # the next step would replace logits that the host has not read
        is_full = launcher.is_full or (self._on_host and bool(launcher))
        is_queued = not is_full and launcher.launch()
        if launcher and (launcher.is_full or not is_queued):
            for plan in launcher.wait():
                self._reader.read(plan)

    def take_items(self) -> Mapping[Answer, Sequence[Item]]:
        """The items to deliver since the last call."""
        return self._answers.take_items()

    def rest(self) -> None:
        """Pause the clock: the time until the next step is not device time."""
        self._launcher.rest()

    def fail(self, error: Exception) -> None:
        """Handle the failure of a round that no single request or step caused.

        Requests that have begun fail, or all of them if the device is lost. Queued steps serve only
        these requests, so their results are dropped."""
        self._launcher.clear()
        if loses_device(error):
            what = (
                "a step is half done" if isinstance(error, HostWorkError) else "the device is lost"
            )
            self._lost = DeviceLostError(f"{what}, open the model again: {error}")
            self._lost.__cause__ = error
            self._answers.fail_all(self._lost)
        else:
            self._answers.fail_begun(error)
        self._session.queue.forget_rows()

    # ---- how it goes ----

    @property
    def waited_seconds(self) -> float:
        """How long turns only waited for the device."""
        return self._launcher.waited_seconds

    @property
    def lost(self) -> Exception | None:
        """Why no request is answered any more: the device is lost. None while they are."""
        return self._lost

    def metrics(self) -> Metrics:
        """Counts and gauges of about now."""
        session, clock = self._session, self._launcher.clock
        pools, states = session.cache.pools, session.storage.shared_states
        return Metrics.of(self._scheduler, pools, states, clock, session.steps.graph_bytes)

    def close(self) -> None:
        """End what is open and wait for the steps that are queued. Idempotent.
        Raises DriverError where that fails."""
        self._owners.close()
