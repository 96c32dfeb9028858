"""Requests through a scheduler, with a model that needs no device (`toy_storage`).

Steps run when they are queued, which is the order in which a device would run them; their tokens
are told later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from tests.model.engine.requests.toy_storage import UNWRITTEN, Toy, ToyStorage
from urdir.model.engine.paced_rows import PacedRows
from urdir.model.engine.requests.limits import Limits
from urdir.model.engine.requests.request import Ending, Finish, Request
from urdir.model.engine.requests.scheduler import Scheduler
from urdir.model.engine.requests.step_plan import Chosen, StepPlan
from urdir.model.engine.speculation.drafting import Acceptance, Drafting
from urdir.model.memory.draft_settings import DraftSettings
from urdir.model.memory.prefix_tree import common_length
from urdir.model.memory.scored_rows import MOST_SCORED

END = 0
VOCABULARY = 6
MOST_DRAFTS = 3
LETTERS = 8 * (1 + MOST_DRAFTS)  # of each sequence: as many tokens may be in flight


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
    if request.limit == 0:
        return answer, Finish.LENGTH
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


class AnyDrafts(Drafting):
    """Any number of drafts for each answer that takes some."""

    def __init__(self, random: Random) -> None:
        super().__init__(DraftSettings(most=MOST_DRAFTS), 1000)
        self._random = random

    def choose(self, answers: Sequence[Acceptance | None]) -> list[int]:
        return [0 if of is None else self._random.randint(0, MOST_DRAFTS) for of in answers]


class ToyDevice:
    """Runs steps: tokens of sequences are in its memory, and it chooses the next ones.

    ``last`` is the place of each sequence's pending token. Drafts are right or wrong by ``random``.
    """

    def __init__(self, storage: Toy, random: Random) -> None:
        self.storage = storage
        self.tokens: list[dict[int, int]] = [{} for _ in range(storage.slots)]
        self.last = [0] * storage.slots
        self.mailbox: dict[tuple[int, int], int] = {}
        self.counts: dict[tuple[int, int], Chosen] = {}
        self._random = random

    def upload(self, sequence: int, tokens: Sequence[int]) -> None:
        self.tokens[sequence] = dict(enumerate(tokens))
        self.last[sequence] = len(tokens) - 1

    def run(self, plan: StepPlan) -> None:
        """Process the rows of a step, and put the tokens that it chooses into the mailbox."""
        drafts = plan.batch.drafts or (0,) * len(plan.positions)
        rows = zip(plan.batch.decode, plan.positions, drafts, strict=True)
        for segment in plan.batch.segments:
            self._process(segment.sequence, segment.start, segment.end)
            self.storage.segment(segment.sequence, segment.end)
            if segment.chooses:
                assert self.last[segment.sequence] == segment.end - 1
                self._choose(segment.sequence, 0)
        for sequence, latest, count in rows:
            position = self.last[sequence]
            assert position <= latest
            self._draft(sequence, position, count)
            self._process(sequence, position, position + 1 + count)
            self._choose(sequence, count)

    def _draft(self, sequence: int, position: int, count: int) -> None:
        """Put drafts after the pending token: tokens that will be chosen, or others."""
        state = self.storage.read(sequence, position - 1) if position else 1
        for at in range(position, position + count):
            state = advance(state, self.tokens[sequence][at])
            wrong = self._random.random() < 0.3
            self.tokens[sequence][at + 1] = (next_token(state) + wrong) % VOCABULARY

    def _choose(self, sequence: int, count: int) -> None:
        """Choose tokens after the pending one and after each draft that stands."""
        position, chosen = self.last[sequence], []
        for at in range(position, position + count + 1):
            token = next_token(self.storage.read(sequence, at))
            chosen.append(token)
            self.mailbox[sequence, at % LETTERS] = token
            stands = at < position + count and self.tokens[sequence][at + 1] == token
            self.tokens[sequence][at + 1] = token
            if not stands:
                break
        self.counts[sequence, position % LETTERS] = Chosen(tuple(chosen), count)
        self.last[sequence] += len(chosen)

    def chosen(self, sequence: int, position: int) -> Chosen:
        """The tokens after the one at ``position``, unless others have taken their places."""
        chosen = self.counts[sequence, position % LETTERS]
        places = range(position, position + len(chosen.tokens))
        assert chosen.tokens == tuple(self.mailbox[sequence, at % LETTERS] for at in places)
        return chosen

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
        drafts: Random | None = None,
        paced: PacedRows | None = None,
    ) -> None:
        """Where nothing changes, ``more`` steps are launched together with the first. ``drafts``
        says how many steps have, and which are right; ``paced`` how many rows they have."""
        self.storage, self.device = storage, ToyDevice(storage, drafts or Random(0))
        self.scheduler = Scheduler(
            storage,
            slots=storage.slots,
            context=context,
            end_ids=frozenset({END}),
            limits=limits or small_limits(),
            drafting=None if drafts is None else AnyDrafts(drafts),
            clock=clock,
        )
        self.scheduler.paced = paced
        self.more = more
        self.requests: dict[int, Request] = {}
        self.answers: dict[int, list[int]] = {}
        self.endings: dict[int, Ending] = {}
        self.scored: dict[int, list[int]] = {}
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
        self.scored[number] = []
        return number

    def plan(self) -> StepPlan | None:
        """Plan a step and queue it, and some more of the same rows if that may be."""
        scheduler = self.scheduler
        oldest = next(iter(scheduler.tasks.running), None)
        plan = scheduler.plan()
        if oldest is not None:
            assert oldest in scheduler.tasks.running  # never preempted
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
        lasts = [self.scheduler.last(number) for number in plan.choosers]
        chosen = [
            Chosen(()) if last is None else self.device.chosen(sequence, last)
            for sequence, last in zip(plan.batch.choosing, lasts, strict=True)
        ]
        self.wasted += sum(last is None for last in lasts)
        rows = [at for s in plan.batch.segments for at in range(s.start, s.start + s.scored)]
        for number, first, end in self.scheduler.tasks.scored(plan):
            self.scored[number] += rows[first:end]
        for outcome in self.scheduler.chosen(plan, chosen):
            assert plan.choosers[outcome.row] == outcome.request
            last = lasts[outcome.row]
            assert last is not None
            if outcome.token is None:
                assert outcome.ending is not None
            else:
                assert chosen[outcome.row].tokens[outcome.position - last] == outcome.token
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
        assert plan.batch.scored <= MOST_SCORED
        ends = [segment.end for segment in plan.batch.segments]
        assert len(ends) < 2 or limits.fit(ends)

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
            assert ending.cached_tokens <= self.most_shared(number)
            is_scored = request.prompt_logprobs is not None
            wanted = range(len(request.prompt) - 1 if is_scored else 0)
            assert self.scored[number] == [*wanted]  # each token once, in order
            assert not is_scored or len(request.prompt) == 1 or not ending.cached_tokens

    def most_shared(self, number: int) -> int:
        """The longest beginning of a prompt that one before it, of the same scope, has had."""
        asked = self.requests[number]
        return max(
            (
                common_length(asked.prompt, (*other.prompt, *self.answers[earlier]))
                for earlier, other in self.requests.items()
                if earlier < number and other.scope == asked.scope
            ),
            default=0,
        )

    def check(self) -> None:
        self.storage.check()
        self.check_answers()
        scheduler = self.scheduler
        running = list(scheduler.tasks.running)
        waiting = [t.number for t in scheduler.tasks.waiting]
        assert running + waiting == sorted(running + waiting) == sorted(scheduler.tasks.by_number)
        slots = [task.slot for task in scheduler.tasks.running.values()]
        assert sorted(slots + scheduler.tasks.free_slots) == list(range(self.storage.slots))
        for slot, held in enumerate(self.storage.held):
            assert slot in slots or not held
        assert self.begun == sorted(self.begun)


def small_limits(**fields: Any) -> Limits:
    return Limits(
        **{"prompt_rows": 12, "mixed_rows": 4, "alignment": 4, "ahead": 6, "queue": 20} | fields
    )


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
