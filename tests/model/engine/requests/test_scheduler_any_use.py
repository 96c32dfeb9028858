"""The scheduler in any use: every answer is the one that a request gets alone."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.model.engine.requests.toy_server import Server, small_limits
from tests.model.engine.requests.toy_storage import Toy, ToyPlaces, ToyRecurrent, ToyStorage
from urdir.model.engine.requests.request import Request
from urdir.model.engine.sampling_settings import GREEDY
from urdir.model.errors import BusyError, ContextFullError
from urdir.model.memory.walk import Walk

pytestmark = pytest.mark.usefixtures("short_prompts_are_worth_a_state")

PROMPTS = st.lists(st.integers(1, 2), min_size=1, max_size=14).map(tuple)
SCOPES = st.sampled_from([b"", b"", b"a", b"b"])
SCORES = st.sampled_from([None, None, 0])
REQUESTS = st.builds(
    Request,
    prompt=PROMPTS,
    limit=st.none() | st.integers(4, 20),
    settings=st.integers(0, 4).map(lambda n: replace(GREEDY, min_tokens=n)),
    ignore_end=st.booleans(),
    constraint=st.sampled_from([None, None, object()]),
    scope=SCOPES,
    drafts=st.sampled_from([True, True, False]),
    prompt_logprobs=SCORES,
) | st.builds(Request, prompt=PROMPTS, limit=st.just(0), scope=SCOPES, prompt_logprobs=SCORES)


class AnyUse(RuleBasedStateMachine):
    """Requests come, go and end at any time, with too few pages for all of them, beside states or
    not, or with places of their own; prompts may walk, and steps have drafts."""

    @initialize(
        pages=st.integers(5, 12),
        slots=st.integers(1, 4),
        shares=st.booleans(),
        more=st.sampled_from([0, 1, 3]),
        kind=st.sampled_from(["pages", "places", "states"]),
        places=st.integers(0, 4),
        drafts=st.none() | st.randoms(use_true_random=False),
        walk=st.sampled_from([None, Walk(unit=4, step=8, room=2, most=4, rows=4)]),
    )
    def start(
        self,
        pages: int,
        slots: int,
        shares: bool,
        more: int,
        kind: str,
        places: int,
        drafts: Random | None,
        walk: Walk | None,
    ) -> None:
        self.now = 0.0
        storage: Toy = ToyStorage(pages, 4, slots, shares)
        if kind == "places":
            storage = ToyPlaces(slots, 4 * pages)
        elif kind == "states":
            storage = ToyRecurrent(pages, 4, slots, places)
            drafts = None
        limits = small_limits(walk=walk)
        self.server = Server(storage, 32, limits, lambda: self.now, more, drafts)
        self.cancelled = 0

    @rule(request=REQUESTS, answers=st.integers(1, 3))
    def add(self, request: Request, answers: int) -> None:
        server = self.server
        for _ in range(answers):
            if len(request.prompt) > server.scheduler.context:
                with pytest.raises(ContextFullError):
                    server.add(request)
            elif server.scheduler.queued >= server.scheduler.limits.queue:
                with pytest.raises(BusyError):
                    server.add(request)
            else:
                server.add(request)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if not self.server.requests:
            return
        number = data.draw(st.sampled_from(sorted(self.server.requests)))
        has_ended = number not in self.server.scheduler.tasks.by_number
        ending = self.server.scheduler.cancel(number)
        assert (ending is None) == has_ended
        if ending is not None:
            assert ending.generated_tokens == len(self.server.answers[number])
            self.cancelled += 1

    @rule(seconds=st.sampled_from([1, 20, 50]))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        waiting = {task.number: task for task in self.server.scheduler.tasks.waiting}
        late = self.server.scheduler.dropped()
        for number, task in waiting.items():
            waited = self.now - task.arrived
            assert (number in late) == (waited > 60 and number not in self.server.begun)
        self.cancelled += len(late)

    @precondition(lambda self: len(self.server.queued) < 3)
    @rule()
    def plan(self) -> None:
        self.server.plan()

    @precondition(lambda self: self.server.queued)
    @rule()
    def complete(self) -> None:
        self.server.complete()

    @rule(steps=st.integers(1, 8))
    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            if len(self.server.queued) < 2:
                self.server.plan()
            while len(self.server.queued) >= 2:
                self.server.complete()

    @invariant()
    def all_is_well(self) -> None:
        self.server.check()

    def teardown(self) -> None:
        """All that is left ends: each request in at most a few steps for each of its tokens, as the
        oldest is never held up."""
        if not hasattr(self, "server"):
            return
        server = self.server
        work = sum(len(r.prompt) + server.scheduler.context for r in server.requests.values())
        assert server.run() <= 4 * work
        server.check()
        assert len(server.endings) + self.cancelled == len(server.requests)
        assert not any(server.storage.held)


AnyUse.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
test_any_use = AnyUse.TestCase
