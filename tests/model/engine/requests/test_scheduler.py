"""The scheduler, driven with a model that needs no device: next tokens are a hash of all before.

What the model "computes" for a token depends on what the pages hold for the one before it, and the
next token depends on that. So an answer comes out right only where every page held what it should.
Steps run when they are queued, which is the order in which a device would run them; their tokens
are told later.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from urdir.model.engine.batch import Batch, Segment
from urdir.model.engine.requests.limits import Limits
from urdir.model.engine.requests.request import Ending, Request
from urdir.model.engine.requests.scheduler import Scheduler
from urdir.model.engine.requests.step_plan import StepPlan
from urdir.model.engine.sequence import GREEDY, Finish
from urdir.model.errors import BusyError, ContextFullError, ModelError, SettingsError
from urdir.model.memory.pages import PagePool
from urdir.model.memory.recurrent_state import RecurrentShape
from urdir.model.memory.storage import SequenceStorage

END = 0
VOCABULARY = 6
UNWRITTEN = -1
LETTERS = 8  # of each sequence: as many steps may be under way


def advance(state: int, token: int) -> int:
    """What is computed for a token after one with ``state``."""
    return (state * 1_000_003 + token + 1) % 2_147_483_647


def next_token(state: int) -> int:
    return state // 7 % VOCABULARY


def answer_to(request: Request, context: int) -> tuple[list[int], Finish]:
    """The answer as it is alone, the end token excluded."""
    state, length = 1, len(request.prompt)
    for token in request.prompt:
        state = advance(state, token)
    answer: list[int] = []
    while True:
        token = next_token(state)
        if token == END and not request.ignore_end and len(answer) >= request.settings.min_tokens:
            return answer, Finish.END
        answer.append(token)
        if request.limit is not None and len(answer) >= request.limit:
            return answer, Finish.LENGTH
        if length + len(answer) > context:
            return answer, Finish.FULL
        state = advance(state, token)


@dataclass
class ToyStorage:
    """Pages as the scheduler sees them; ``states[page][place]`` is what was computed there."""

    pages: int
    page_len: int
    slots: int
    shares: bool = True
    table: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.pool = PagePool(self.pages, self.page_len)
        self.table = [[] for _ in range(self.slots)]
        self.states = [[UNWRITTEN] * self.page_len for _ in range(self.pages)]

    @property
    def most_tokens(self) -> int:
        return self.pages * self.page_len

    def cut(self, sequence: int, start: int, end: int) -> int:
        return end

    def next_shared(self, sequence: int, length: int) -> int:
        return length + self.page_len if self.shares else 0

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.page_len)

    def match(self, sequence: int, tokens: Sequence[int], end: int, spare: int) -> int:
        assert not self.table[sequence]
        known = tokens if self.shares else ()
        match = self.pool.match(known, self.blocks(end), self.blocks(spare))
        if match.source is not None:
            target = match.pages[match.tokens // self.page_len]
            self.states[target] = list(self.states[match.source])
        self.table[sequence] = match.pages
        return match.tokens

    def publish(self, sequence: int, tokens: Sequence[int]) -> None:
        if self.shares:
            self.pool.publish(tokens, self.table[sequence])

    def reserve(self, sequence: int, start: int, end: int) -> int:
        held = self.table[sequence]
        held += self.pool.take(max(0, self.blocks(end) - len(held)))
        return len(held) * self.page_len

    def release(self, sequence: int, tokens: Sequence[int], reached: int) -> None:
        assert len(tokens) <= reached
        self.publish(sequence, tokens)
        self.pool.release(self.table[sequence])
        self.table[sequence] = []

    def read(self, sequence: int, position: int) -> int:
        page = self.table[sequence][position // self.page_len]
        return self.states[page][position % self.page_len]

    def write(self, sequence: int, position: int, state: int) -> None:
        page = self.table[sequence][position // self.page_len]
        assert not self.pool.is_shared(page)
        self.states[page][position % self.page_len] = state

    def segment(self, sequence: int, end: int) -> None:
        """A step has computed a prompt up to ``end``."""

    @property
    def held(self) -> list[bool]:
        """Whether each sequence has pages."""
        return [bool(pages) for pages in self.table]

    def check(self) -> None:
        """Every page is held as often as sequences have it."""
        users = [0] * self.pages
        for held in self.table:
            for page in held:
                users[page] += 1
        assert self.pool._users == users
        assert self.pool.used == sum(map(bool, users))


class ToyCache(ToyStorage):
    """The same as a `KvCache`, for a storage of states beside it."""

    @property
    def shape(self) -> Any:
        return SimpleNamespace(sequences=self.slots)

    @property
    def share_len(self) -> int:
        return self.page_len

    @property
    def pools(self) -> tuple[PagePool, ...]:
        return (self.pool,)

    def known(self, tokens: Sequence[int]) -> int:
        return self.pool.known(tokens)

    def kept(self, sequence: int, length: int) -> int:
        return length

    def truncate(self, sequence: int, length: int) -> None:
        keep = self.blocks(length)
        self.pool.release(self.table[sequence][keep:])
        del self.table[sequence][keep:]


class ToyStates:
    """As a `RecurrentState`: a sequence has what was computed for its last token alone, and copies
    of that are kept in places."""

    def __init__(self, slots: int, places: int) -> None:
        self.shape = RecurrentShape({0: {"state": 4}}, slots, places)
        self.last = [UNWRITTEN] * slots
        self.kept_ones = [UNWRITTEN] * places

    def save(self, sequence: int, place: int) -> None:
        self.kept_ones[place] = self.last[sequence]

    def restore(self, place: int, sequence: int) -> None:
        self.last[sequence] = self.kept_ones[place]

    def kept(self, sequence: int, length: int, now: int) -> int:
        return length if length >= now else 0

    def truncate(self, sequence: int, length: int, now: int) -> None:
        assert length in (0, now)


class ToyRecurrent(SequenceStorage):
    """A model with pages and states: an answer comes out right only where both are those of its
    tokens. ``places`` states are kept."""

    def __init__(self, pages: int, page_len: int, slots: int, places: int) -> None:
        self.slots, self.page_len = slots, page_len
        self.cache, self.states = ToyCache(pages, page_len, slots), ToyStates(slots, places)
        super().__init__(self.cache, self.states)  # type: ignore[arg-type]

    @property
    def pool(self) -> PagePool:
        return self.cache.pool

    @property
    def held(self) -> list[bool]:
        return self.cache.held

    def read(self, sequence: int, position: int) -> int:
        assert self.cache.read(sequence, position) == self.states.last[sequence]
        return self.states.last[sequence]

    def write(self, sequence: int, position: int, state: int) -> None:
        self.cache.write(sequence, position, state)
        self.states.last[sequence] = state

    def segment(self, sequence: int, end: int) -> None:
        self.keep_prefix(sequence, end)

    def check(self) -> None:
        """Every place is known, given by a step under way, or unused."""
        self.cache.check()
        assert self._shared is not None
        known = self._shared.known
        given = [place for held in self._shared._given for _, place in held]
        assert sorted([*known._unused, *known._known, *given]) == [*range(known.places)]


class ToyPlaces:
    """A contiguous cache: a sequence goes on from what its own place was left with."""

    def __init__(self, slots: int, most_tokens: int) -> None:
        self.slots, self.most_tokens = slots, most_tokens
        self.states = [[UNWRITTEN] * most_tokens for _ in range(slots)]
        self.left: list[Sequence[int]] = [()] * slots
        self.held = [False] * slots

    def match(self, sequence: int, tokens: Sequence[int], end: int, spare: int) -> int:
        assert not self.held[sequence]
        self.held[sequence] = True
        pairs = zip(self.left[sequence], tokens, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def cut(self, sequence: int, start: int, end: int) -> int:
        return end

    def next_shared(self, sequence: int, length: int) -> int:
        return 0

    def segment(self, sequence: int, end: int) -> None: ...

    def publish(self, sequence: int, tokens: Sequence[int]) -> None:
        assert self.held[sequence]

    def reserve(self, sequence: int, start: int, end: int) -> int:
        assert self.held[sequence]
        assert end <= self.most_tokens
        return end

    def release(self, sequence: int, tokens: Sequence[int], reached: int) -> None:
        """What steps under way write from now on lies past ``tokens``."""
        assert self.held[sequence]
        assert len(tokens) <= reached
        self.held[sequence], self.left[sequence] = False, tokens
        self.states[sequence][reached:] = [UNWRITTEN] * (self.most_tokens - reached)

    def read(self, sequence: int, position: int) -> int:
        return self.states[sequence][position]

    def write(self, sequence: int, position: int, state: int) -> None:
        self.states[sequence][position] = state

    def check(self) -> None:
        """Nobody holds what is another's."""


Toy = ToyStorage | ToyPlaces | ToyRecurrent


class ToyDevice:
    """Runs steps: tokens of sequences are in its memory, and it chooses the next ones."""

    def __init__(self, storage: Toy) -> None:
        self.storage = storage
        self.tokens: list[dict[int, int]] = [{} for _ in range(storage.slots)]
        self.mailbox: dict[tuple[int, int], int] = {}

    def upload(self, sequence: int, tokens: Sequence[int]) -> None:
        self.tokens[sequence] = dict(enumerate(tokens))

    def run(self, plan: StepPlan) -> None:
        """Process the rows of a step, and put the tokens that it chooses into the mailbox."""
        for sequence, position in zip(plan.batch.decode, plan.positions, strict=True):
            self._process(sequence, position, position + 1)
        for segment in plan.batch.segments:
            self._process(segment.sequence, segment.start, segment.end)
            self.storage.segment(segment.sequence, segment.end)
        for sequence, position in plan.places:
            token = next_token(self.storage.read(sequence, position))
            self.tokens[sequence][position + 1] = token
            self.mailbox[sequence, position % LETTERS] = token

    def chosen(self, sequence: int, position: int) -> int:
        """The token after the one at ``position``, unless another has taken its place."""
        return self.mailbox[sequence, position % LETTERS]

    def _process(self, sequence: int, start: int, end: int) -> None:
        state = self.storage.read(sequence, start - 1) if start else 1
        assert state != UNWRITTEN
        for position in range(start, end):
            state = advance(state, self.tokens[sequence][position])
            self.storage.write(sequence, position, state)


class Server:
    """Requests through a scheduler, up to ``ahead`` steps of which are queued and not complete."""

    def __init__(
        self,
        storage: Toy,
        context: int = 40,
        limits: Limits | None = None,
        clock: Callable[[], float] = lambda: 0.0,
        more: int = 0,
    ) -> None:
        """Where nothing changes, ``more`` steps are launched together with the first."""
        self.storage, self.device = storage, ToyDevice(storage)
        self.scheduler = Scheduler(
            storage,
            slots=storage.slots,
            context=context,
            end_ids=frozenset({END}),
            limits=limits or small_limits(),
            clock=clock,
        )
        self.more = more
        self.requests: dict[int, Request] = {}
        self.answers: dict[int, list[int]] = {}
        self.endings: dict[int, Ending] = {}
        self.queued: deque[StepPlan] = deque()
        self.admitted: list[int] = []
        self.wasted = 0

    @property
    def begun(self) -> list[int]:
        """Requests in the order in which they were first admitted."""
        return list(dict.fromkeys(self.admitted))

    def add(self, request: Request) -> int:
        number = self.scheduler.add(request)
        self.requests[number] = request
        self.answers[number] = []
        return number

    def plan(self) -> StepPlan | None:
        """Plan a step and queue it, and some more of the same rows if that may be."""
        scheduler = self.scheduler
        oldest = next(iter(scheduler._running), None)
        plan = scheduler.plan()
        if oldest is not None:
            assert oldest in scheduler._running  # never set back
        if plan is not None:
            self.check_plan(plan)
            for number, sequence in plan.admitted:
                self.device.upload(sequence, scheduler.tokens(number))
                self.admitted.append(number)
            more = scheduler.repeat(plan, self.more)
            assert len(more) in (0, self.more)
            for step in (plan, *more):
                self.device.run(step)
                self.queued.append(step)
        return plan

    def complete(self) -> None:
        """The oldest step is complete."""
        plan = self.queued.popleft()
        tokens = [self.device.chosen(*place) for place in plan.places]
        outcomes = self.scheduler.chosen(plan, tokens)
        self.wasted += len(tokens) - len(outcomes)
        for outcome in outcomes:
            assert plan.choosers[outcome.row] == outcome.request
            assert tokens[outcome.row] == outcome.token
            if outcome.ending is None or outcome.ending.finish is not Finish.END:
                self.answers[outcome.request].append(outcome.token)
            if outcome.ending is not None:
                self.endings[outcome.request] = outcome.ending

    def run(self, ahead: int = 2) -> int:
        """Until all has ended; returns how many steps that took."""
        steps = 0
        while self.scheduler.queued or self.scheduler.running or self.queued:
            planned = len(self.queued) < ahead and self.plan() is not None
            steps += planned
            if self.queued and (not planned or len(self.queued) >= ahead):
                self.complete()
            else:
                assert planned, "nothing goes on"
        return steps

    def check_plan(self, plan: StepPlan) -> None:
        limits = self.scheduler.limits
        sequences = [*plan.batch.decode, *(segment.sequence for segment in plan.batch.segments)]
        assert len(set(sequences)) == len(sequences) <= self.storage.slots
        rows = [segment.end - segment.start for segment in plan.batch.segments]
        assert all(count > 0 for count in rows)
        aligned = sum(-(-count // limits.alignment) * limits.alignment for count in rows)
        assert aligned <= (limits.mixed_rows if plan.batch.decode else limits.prompt_rows)
        assert plan.batch.decode or plan.batch.segments

    def check_answers(self) -> None:
        """Each answer that has ended by its tokens is the one it gets alone."""
        for number, ending in self.endings.items():
            request = self.requests[number]
            answer, finish = answer_to(request, self.scheduler.context)
            assert self.answers[number] == answer
            assert ending.finish is finish
            assert ending.prompt_tokens == len(request.prompt)
            assert ending.generated_tokens == len(answer)
            assert 0 <= ending.cached_tokens < len(request.prompt)

    def check(self) -> None:
        self.storage.check()
        self.check_answers()
        scheduler = self.scheduler
        running, waiting = list(scheduler._running), [t.number for t in scheduler._waiting]
        assert running + waiting == sorted(running + waiting) == sorted(scheduler._tasks)
        slots = [task.slot for task in scheduler._running.values()]
        assert sorted(slots + scheduler._slots) == list(range(self.storage.slots))
        for slot, held in enumerate(self.storage.held):
            assert slot in slots or not held
        assert self.begun == sorted(self.begun)


def small_limits(**fields: Any) -> Limits:
    return Limits(
        **{"prompt_rows": 12, "mixed_rows": 4, "alignment": 4, "ahead": 6, "queue": 20} | fields
    )


@pytest.fixture(scope="module", autouse=True)
def short_prompts_are_worth_a_state() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("urdir.model.memory.prefix_states.LEAST_PAGES", 1)
        yield


PROMPTS = st.lists(st.integers(1, 2), min_size=1, max_size=14).map(tuple)
REQUESTS = st.builds(
    Request,
    prompt=PROMPTS,
    limit=st.none() | st.integers(4, 20),
    settings=st.integers(0, 4).map(lambda n: replace(GREEDY, min_tokens=n)),
    ignore_end=st.booleans(),
    constraint=st.sampled_from([None, None, object()]),
)


class AnyUse(RuleBasedStateMachine):
    """Requests come, go and end at any time, with too few pages for all of them, beside states or
    not, or with places of their own."""

    @initialize(
        pages=st.integers(5, 12),
        slots=st.integers(1, 4),
        shares=st.booleans(),
        more=st.sampled_from([0, 1, 3]),
        kind=st.sampled_from(["pages", "places", "states"]),
        places=st.integers(0, 4),
    )
    def start(
        self, pages: int, slots: int, shares: bool, more: int, kind: str, places: int
    ) -> None:
        self.now = 0.0
        storage: Toy = ToyStorage(pages, 4, slots, shares)
        if kind == "places":
            storage = ToyPlaces(slots, 4 * pages)
        elif kind == "states":
            storage = ToyRecurrent(pages, 4, slots, places)
        self.server = Server(storage, 32, small_limits(), lambda: self.now, more)
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
        has_ended = number not in self.server.scheduler._tasks
        ending = self.server.scheduler.cancel(number)
        assert (ending is None) == has_ended
        if ending is not None:
            assert ending.generated_tokens == len(self.server.answers[number])
            self.cancelled += 1

    @rule(seconds=st.sampled_from([1, 20, 50]))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        waiting = {task.number: task for task in self.server.scheduler._waiting}
        late = self.server.scheduler.overdue()
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


# ---- one thing at a time ----


def serve(requests: list[Request], pages: int = 200, slots: int = 8, **limits: Any) -> Server:
    """All of them at once, to the end."""
    server = Server(ToyStorage(pages, 4, slots), limits=small_limits(**limits))
    for request in requests:
        server.add(request)
    server.run()
    server.check()
    assert len(server.endings) == len(requests)
    return server


def ask(*prompt: int, limit: int | None = 6, **fields: Any) -> Request:
    return Request(prompt=prompt, limit=limit, ignore_end=True, **fields)


def test_rows_of_answers_and_chunks_of_prompts_share_steps() -> None:
    server = Server(ToyStorage(100, 4, 4), limits=small_limits())
    first = server.add(ask(1, 2, 3))
    second = server.add(ask(*[1] * 18))
    plans = [server.plan()]
    assert plans[0] == StepPlan(
        Batch((), (Segment(0, 0, 3, chooses=True), Segment(1, 0, 8))),
        (),
        (),
        (first, second),
        ((first, 0), (second, 1)),
    )
    assert (plans[0].places, plans[0].longest) == ([(0, 2)], 8)
    assert plans[0].choosers == (first,)
    plan = server.plan()  # one ahead: the first answer's token is not known yet
    batch = Batch((0,), (Segment(1, 8, 12),))
    assert plan == StepPlan(batch, (first,), (3,), (second,), ())
    assert (plan.places, plan.longest) == ([(0, 3)], 12)
    assert plan.choosers == (first,)
    server.complete()
    plan = server.plan()
    assert plan is not None
    assert (plan.positions, plan.batch.segments[0].end) == ((4,), 16)
    server.complete()
    plan = server.plan()
    assert plan is not None
    assert plan.batch.segments == (Segment(1, 16, 18, chooses=True),)
    assert plan.choosers == (first, second)


def test_no_row_is_wasted_on_an_answer_of_known_length() -> None:
    assert serve([ask(1, 2), ask(2, 1, limit=1), ask(1, limit=9)]).wasted == 0
    full = serve([ask(*[2] * 30, limit=None)])  # up to the context
    assert (full.wasted, full.endings[1].finish) == (0, Finish.FULL)
    assert full.endings[1].generated_tokens == 40 + 1 - 30


def test_an_end_token_wastes_one_row() -> None:
    request = Request(prompt=(2, 1, 2))
    assert answer_to(request, 40)[1] is Finish.END
    assert serve([request]).wasted == 1


def test_steps_repeat_where_nothing_changes() -> None:
    """Not beside a prompt, while another waits, or past an answer's end."""
    server = Server(ToyStorage(100, 4, 2), limits=small_limits(), more=3)
    first = server.add(ask(1, 2, limit=9))
    assert server.plan() is not None
    assert len(server.queued) == 1  # a prompt's step is alone
    second = server.add(ask(1, limit=9))
    server.plan()
    assert len(server.queued) == 2  # beside a prompt's, too
    server.plan()
    *_, plan, one, two, three = server.queued
    assert plan.requests == one.requests == three.requests == (first, second)
    assert (plan.positions, one.positions, two.positions) == ((3, 1), (4, 2), (5, 3))
    assert server.scheduler.counts.steps == 6
    assert server.scheduler.end(plan) == 2 + 9 - 1
    server.add(ask(2, limit=2))
    server.plan()
    assert len(server.queued) == 7  # one waits for a slot
    server.run()
    server.check()
    assert server.wasted == 0

    server = Server(ToyStorage(3, 4, 2), limits=small_limits(), more=3)
    server.add(ask(1, 1, 1, limit=8))
    for queued in (1, 5, 6, 7, 8, 8):  # up to the eighth token
        server.plan()
        assert len(server.queued) == queued
    server.run()
    server.check()
    assert server.wasted == 0


def test_an_end_token_wastes_the_steps_of_its_launch() -> None:
    request = Request(prompt=(2, 1, 2))
    server = Server(ToyStorage(100, 4, 2), limits=small_limits(), more=3)
    server.add(request)
    server.run()
    server.check()
    length = server.endings[1].generated_tokens + 1  # with the end token
    assert 0 < server.wasted <= 8
    assert (1 + server.wasted + length) % 4 == 2  # a single step, and launches of four


def test_a_constrained_answer_waits_for_each_token() -> None:
    server = Server(ToyStorage(100, 4, 4), limits=small_limits())
    server.add(ask(1, 2, constraint=object()))
    free = server.add(ask(1, 2))
    server.plan()
    plan = server.plan()
    assert plan is not None
    assert plan.requests == (free,)
    server.complete()
    plan = server.plan()
    assert plan is not None
    assert plan.requests == (1, free)
    server.run()
    server.check()


def test_answers_to_one_prompt_share_its_pages_and_the_rest_by_copies() -> None:
    prompt = (1, 2, 1, 1, 2, 2, 1, 2, 1, 2, 1)
    server = serve([ask(*prompt, limit=n) for n in (3, 4, 5, 6)])
    cached = [server.endings[n].cached_tokens for n in (1, 2, 3, 4)]
    assert cached == [0, 10, 10, 10]  # a step must process the last token to find the next
    assert server.scheduler.counts.cached_tokens == server.storage.pool.hits == 30
    assert server.storage.pool.queries == 4 * 10


def test_the_next_question_of_a_conversation_finds_its_beginning() -> None:
    server = serve([ask(1, 2, 1, 1, 2)])
    conversation = (1, 2, 1, 1, 2, *server.answers[1])
    number = server.add(ask(*conversation, 2, 2, 1))
    server.run()
    server.check()
    assert (
        server.endings[number].cached_tokens == len(conversation) - 1
    )  # the last was not computed


def recurrent(*requests: Request, places: int = 8, pages: int = 200, **limits: Any) -> Server:
    """As `serve`, one after the other has come, beside states."""
    server = Server(ToyRecurrent(pages, 4, 8, places), 200, small_limits(**limits))
    for request in requests:
        server.add(request)
        server.run()
        server.check()
    return server


def cached(server: Server) -> list[int]:
    return [ending.cached_tokens for ending in server.endings.values()]


def test_states_are_kept_at_the_last_page_and_where_prompts_part() -> None:
    """The first with the same beginning has no state to begin with; those after it have."""
    same = (1, 2, 1, 1, 2, 2, 1, 2, 1)
    server = recurrent(
        *(ask(*same, *own) for own in ([1] * 8, [2] * 8, [1, 2, 2, 2, 2, 2], [1] * 9, [1] * 8))
    )
    assert cached(server) == [0, 0, 8, 16, 16]
    server = recurrent(*(ask(*same, *own) for own in ([1] * 8, [2] * 8, [2] * 8)), places=0)
    assert cached(server) == [0, 0, 0]


def test_answers_to_one_prompt_wait_for_its_state() -> None:
    server = Server(ToyRecurrent(100, 4, 8, 2), 40, small_limits())
    for limit in (3, 4, 5):
        server.add(ask(*[1, 2, 2] * 5, limit=limit))
    server.run()
    server.check()
    assert cached(server) == [0, 12, 12]


def test_states_not_used_for_longest_go_first() -> None:
    first, second, third = (ask(*[n] * 9) for n in (1, 2, 3))
    server = recurrent(first, second, first, third, first, second, places=2)
    assert cached(server) == [0, 0, 8, 0, 8, 0]
    server = recurrent(first, second, third, first, second, third, places=2)
    assert cached(server) == [0] * 6


def test_states_are_lost_with_their_pages() -> None:
    first, second = (ask(*[n] * 17, limit=3) for n in (1, 2))
    server = recurrent(first, first, second, first, first, second, pages=5)
    assert cached(server) == [0, 16, 0, 0, 16, 0]


def test_an_answer_that_was_set_back_goes_on_from_a_state() -> None:
    server = Server(ToyRecurrent(12, 4, 4, 4), 36, small_limits(ahead=1))
    for number in (1, 2):
        server.add(ask(*[number] * 13, limit=20))
    computed = []
    while server.scheduler.queued or server.scheduler.running or server.queued:
        if (plan := server.plan()) is not None:
            computed += [s for s in plan.batch.segments if s.start == 0]
        if server.queued:
            server.complete()
    server.check()
    assert server.scheduler.counts.set_back
    assert len(computed) == 2  # nothing was computed from its first token again


def test_nothing_is_shared_where_it_is_not_wanted() -> None:
    prompt = (1, 2, 1, 1, 2, 2, 1, 2, 1, 2, 1)
    server = serve([ask(*prompt)] * 3, share_prefixes=False)
    assert server.scheduler.counts.cached_tokens == 0
    assert server.storage.pool.kept == 0


def test_a_small_pool_sets_the_youngest_back_and_all_answers_come_out_right() -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 5, rng.integers(3, 12)).tolist() for _ in range(12)]
    server = serve([ask(*p, limit=20) for p in prompts], pages=11, slots=6, ahead=2)
    assert server.scheduler.counts.set_back > 3
    assert server.begun == list(range(1, 13))
    large = serve([ask(*p, limit=20) for p in prompts])
    assert large.scheduler.counts.set_back == 0
    assert large.answers == server.answers


def test_a_request_goes_first_that_was_set_back() -> None:
    server = Server(ToyStorage(6, 4, 4), context=24, limits=small_limits(ahead=1))
    old, young = server.add(ask(*[1] * 8, limit=16)), server.add(ask(*[2] * 8, limit=16))
    while not server.scheduler.counts.set_back:
        server.plan()
        server.complete()
    late = server.add(ask(1, 1, limit=1))
    server.run(1)
    server.check()
    assert server.admitted == [old, young, young, late]


def test_none_is_admitted_that_would_soon_set_another_back() -> None:
    server = Server(ToyStorage(7, 4, 4), limits=small_limits(ahead=8))
    server.add(ask(*[1] * 8, limit=16))
    server.add(ask(*[2] * 14, limit=2))  # its four pages leave one free: not room for 8 tokens
    server.run()
    server.check()
    assert (server.admitted, server.scheduler.counts.set_back) == ([1, 2], 0)


def test_equal_answers_reserve_in_different_steps() -> None:
    limits = small_limits(ahead=16, prompt_rows=64)
    server = Server(ToyStorage(400, 4, 16), 100, limits)
    reserve, steps = server.storage.reserve, Counter[int]()

    def counted(sequence: int, start: int, end: int) -> int:
        steps[server.scheduler.counts.steps] += 1
        return reserve(sequence, start, end)

    server.storage.reserve = counted  # type: ignore[method-assign]
    for _ in range(16):
        server.add(ask(1, limit=80))
    server.run()
    server.check()
    del steps[min(steps)]  # the first of all answers
    assert len(steps) > 40
    assert max(steps.values()) <= 2


def test_what_was_set_back_waits_for_its_tokens_under_way() -> None:
    server = Server(ToyStorage(6, 4, 4), context=24, limits=small_limits(ahead=1))
    old, young = server.add(ask(*[1] * 8, limit=16)), server.add(ask(*[2] * 8, limit=16))
    while not server.scheduler.counts.set_back:
        server.plan()
    server.scheduler.cancel(old)  # there is room for the other again
    assert server.plan() is None
    while server.queued:
        server.complete()
    server.run()
    server.check()
    assert server.admitted == [old, young, young]


def test_cancelled_wherever_it_is() -> None:
    server = Server(ToyStorage(100, 4, 1), limits=small_limits())
    numbers = [server.add(ask(*[n] * 20)) for n in (1, 2, 3)]
    server.plan()
    waiting, running = server.scheduler.cancel(numbers[1]), server.scheduler.cancel(numbers[0])
    assert waiting == running == Ending(Finish.INTERRUPTED, 20, 0, 0)
    assert server.scheduler.cancel(numbers[0]) is None
    plan = server.plan()  # the slot is free, while the step that used it runs
    assert plan is not None
    assert plan.admitted == ((numbers[2], 0),)
    server.run()
    server.check()
    assert list(server.endings) == [numbers[2]]


def test_a_stop_string_is_the_callers_to_see() -> None:
    server = Server(ToyStorage(100, 4, 1), limits=small_limits())
    number = server.add(ask(1, 2, limit=None))
    for _ in range(4):
        server.plan()
        server.complete()
    ending = server.scheduler.cancel(number, Finish.STOP, "so")
    assert ending == Ending(Finish.STOP, 2, 0, 4, "so")
    assert server.plan() is None


# ---- refusals ----


def test_what_never_fits_is_refused() -> None:
    for pages, context, room in ((4, 40, 16), (40, 9, 9)):
        server = Server(ToyStorage(pages, 4, 2), context)
        with pytest.raises(ContextFullError, match=f"17 tokens exceed the context of {room} by"):
            server.add(ask(*[1] * 17))
        server.add(ask(*[1] * room, limit=None))
        server.run()
        assert server.endings[1].finish is Finish.FULL


def test_a_full_queue_says_when_to_come_back() -> None:
    now = 0.0
    server = Server(ToyStorage(10, 4, 1), limits=small_limits(queue=2), clock=lambda: now)
    for _ in range(2):
        server.add(ask(1))
    now = 7.5
    with pytest.raises(BusyError, match="2 requests are waiting already: try again in 8 s") as info:
        server.add(ask(1))
    assert info.value.retry_after == 8
    server.plan()
    server.add(ask(1))  # one has begun


def test_who_waits_too_long_is_told_but_not_who_has_begun() -> None:
    now = 0.0
    server = Server(ToyStorage(10, 4, 1), limits=small_limits(wait_seconds=30), clock=lambda: now)
    begun, late = server.add(ask(1, limit=20)), server.add(ask(1))
    server.plan()
    now = 20.0
    later = server.add(ask(1))
    now = 31.0
    errors = server.scheduler.overdue()
    assert list(errors) == [late]
    assert "waited 30 s without being begun: try again in 30 s" in str(errors[late])
    assert server.scheduler.overdue() == {}
    server.run()
    assert list(server.endings) == [begun, later]


def test_bad_requests_and_limits() -> None:
    with pytest.raises(ModelError, match="the prompt is empty"):
        Request(prompt=())
    with pytest.raises(SettingsError, match="a limit of 0 tokens: expected 1 or more"):
        Request(prompt=(1,), limit=0)
    with pytest.raises(SettingsError, match="at least 5 tokens of 4 that are wanted"):
        Request(prompt=(1,), limit=4, settings=replace(GREEDY, min_tokens=5))
    with pytest.raises(SettingsError, match="prompt_rows 100: expected a multiple of 16"):
        Limits(prompt_rows=100)
    with pytest.raises(SettingsError, match="ahead 0: expected 1 or more"):
        Limits(ahead=0)
    server = Server(ToyStorage(10, 4, 1))
    server.add(ask(1))
    plan = server.plan()
    assert plan is not None
    with pytest.raises(ModelError, match="2 tokens of a step that chooses 1"):
        server.scheduler.chosen(plan, [1, 2])


# ---- time ----


def test_planning_takes_far_less_than_a_step() -> None:
    """256 answers go on in a step: its plan takes less than half a millisecond of the host."""
    scheduler = Scheduler(ToyStorage(20_000, 16, 256), slots=256, context=1000)
    for _ in range(256):
        scheduler.add(Request(prompt=(1,)))
    seconds = []
    for _ in range(200):
        start = time.perf_counter()
        plan = scheduler.plan()
        seconds.append(time.perf_counter() - start)
        assert plan is not None
        scheduler.chosen(plan, [1] * len(plan.choosers))
    assert plan is not None
    assert len(plan.batch.decode) == 256
    assert sorted(seconds)[len(seconds) // 2] < 0.5e-3
