"""Which rows the next step processes: requests are admitted, continued, preempted and ended here.

Requests are served in order of arrival. An admitted one has a slot, and pages for its whole prompt.
A step continues the answers by a row each, all of them or, in turns, as many as give the most
tokens/s; beside them it has a budget of rows for prompts, the oldest first. When pages run out, the
youngest request is *preempted*: it gives up its pages and waits, before all younger ones, to be
computed again from its prompt and the answer so far. So the oldest request always goes on, and
everything ends.

Where steps verify drafts, one may take several tokens of an answer. How many is known when it is
complete. Until then ``stored`` of its `Task` counts all drafts as accepted: room is reserved for
them, and no step goes past the answer's end.

Steps are planned one ahead: a plan assumes that no answer ends by the tokens of steps in flight,
which are still unknown. If one does, its next row is not used.

No device is needed here. `Storage` is the interface of the KV cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from urdir.model.engine.batch import Batch, Segment
from urdir.model.engine.paced_rows import PacedRows
from urdir.model.engine.requests.admission import Admission
from urdir.model.engine.requests.limits import Limits
from urdir.model.engine.requests.request import Ending, Finish, Request
from urdir.model.engine.requests.room import Room
from urdir.model.engine.requests.step_plan import Chosen, Outcome, StepPlan
from urdir.model.engine.requests.storage import Storage
from urdir.model.engine.requests.task import Task
from urdir.model.engine.requests.tasks import Counts, Tasks
from urdir.model.engine.speculation.drafting import Drafting
from urdir.model.errors import ModelError
from urdir.model.memory.scored_rows import MOST_SCORED
from urdir.model.memory.turns import Turns


class Scheduler:
    """Serves requests of up to ``context`` tokens by ``slots`` sequences of ``storage``, which no
    one else uses. A step has a row for each slot at most, and those of drafts. ``end_ids`` end
    answers. An answer that ``waits`` goes on once its last token is known. ``drafting`` chooses how
    many drafts steps verify. ``clock`` is in seconds. ``paced``, if given, chooses how many answers
    have a row, in turns, in steps of answers alone.

    `plan` makes a step, and `chosen` takes its tokens; the next step is planned in between. Steps
    complete in the order of their plans.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        slots: int,
        context: int,
        end_ids: frozenset[int] = frozenset(),
        limits: Limits | None = None,
        waits: bool = False,
        drafting: Drafting | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits = limits or Limits()
        self.context = min(context, storage.most_tokens)
        self.drafting = drafting
        self.paced: PacedRows | None = None
        #: Whether a step takes all rows of a request's prompt from one token to another, where two
        #: take less time than one with padding.
        self.takes_whole: Callable[[int, int, int], bool] = lambda request, start, end: False
        self._in_turn: tuple[list[int], Turns[int]] = ([], Turns(()))  # of the last such step
        self._rest = None if drafting is None else drafting.rest
        shares = limits.share_prefixes
        self.tasks = Tasks(storage, slots, share_prefixes=shares, rest=self._rest)
        self._storage = storage
        self._end_ids = end_ids
        self._waits = waits
        self._admission = Admission(self.tasks, storage, limits, self.context, clock)
        self._room = Room(self.tasks, storage, limits.ahead)
        self._computed: list[Task] = []  # by complete steps, and not yet shared with others

    @property
    def counts(self) -> Counts:
        """What was done so far."""
        return self.tasks.counts

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return len(self.tasks.waiting)

    @property
    def running(self) -> int:
        """Requests that have a slot."""
        return len(self.tasks.running)

    @property
    def begun(self) -> tuple[int, ...]:
        """The requests that a step which fails may be of; see `Tasks.begun`."""
        return self.tasks.begun

    def tokens(self, request: int) -> Sequence[int]:
        """Prompt and answer of a request so far."""
        return self.tasks.by_number[request].tokens

    def last(self, request: int) -> int | None:
        """The position of the last known token of a request; None if it has ended."""
        task = self.tasks.by_number.get(request)
        return None if task is None else len(task.tokens) - 1

    def cached(self, request: int) -> int:
        """How many tokens of a request's prompt were found when it began."""
        return self.tasks.by_number[request].cached

    def complete(self, request: int) -> int:
        """How many tokens of a request complete steps have stored, or others before it."""
        return self.tasks.by_number[request].complete

    def hold(self, request: int, free: int) -> None:
        """Let tokens of a request from place ``free`` on wait for those before."""
        if (task := self.tasks.by_number.get(request)) is not None:
            task.free = free

    # ---- requests come and go ----

    def add(self, request: Request) -> int:
        """Queue a request; its number. Raises ContextFullError for a prompt that never fits, and
        BusyError."""
        task = self._admission.add(request)
        task.waits |= self._waits
        drafts = request.drafts and not request.processors
        if self.drafting is not None and drafts and not self._waits:
            task.acceptance = self.drafting.begin(request.prompt)
        return task.number

    def cancel(self, request: int, finish: Finish = Finish.INTERRUPTED) -> Ending | None:
        """End a request now: its user left, or its text has a stop string (``finish`` STOP). None
        for one that has ended."""
        task = self.tasks.by_number.get(request)
        if task is None:
            return None
        return self.tasks.end(task, finish)

    def dropped(self) -> dict[int, Exception]:
        """The requests that were ended here since this was last called, and why: they waited too
        long to begin, or storage failed for them."""
        self._admission.drop_late()
        dropped, self.tasks.dropped = self.tasks.dropped, {}
        return dropped

    # ---- steps ----

    def plan(self) -> StepPlan | None:
        """The next step; None if there is nothing to do, or every request waits for tokens. A
        request for which storage fails is `dropped`.

        256 answers take 0.04 ms, some of them reserving room in every step, and `chosen` takes
        0.12 ms (medians on one core of a cloud Xeon, CPython 3.11).
        """
        self._publish()
        rows, turns = self._decode_rows()
        budget = self.limits.mixed_rows if rows else self.limits.prompt_rows
        segments: dict[int, Segment] = {}
        planned = {task.number for task in rows}
        for task in list(self.tasks.running.values()):
            if task.slot >= 0 and task.stored < task.prefill and budget:
                with self.tasks.alone(task):
                    budget = self._segment(task, budget, segments, planned)
        admitted = []
        while budget and (new := self._admission.admit()) is not None:
            with self.tasks.alone(new):
                budget = self._segment(new, budget, segments, planned)
                admitted.append((new.number, new.slot))
        if not rows and not segments:
            return None
        self.counts.steps += 1
        positions = tuple([task.stored - 1 for task in rows])
        drafts = () if segments else self._drafts(rows)
        turns = None if segments else turns
        return StepPlan(
            Batch(tuple([task.slot for task in rows]), tuple(segments.values()), drafts, turns),
            tuple([task.number for task in rows]),
            positions,
            tuple(segments),
            tuple(admitted),
            () if segments else self._missed(rows, positions, drafts),
        )

    def repeat(self, plan: StepPlan, steps: int) -> list[StepPlan]:
        """``steps`` more steps after ``plan``, the last one, each of the same rows and as many
        drafts: for a launch of all of them at once. None of them where another request would wait
        for that, where an answer ends meanwhile by its length, or without room, and where drafts
        may soon be found not to pay."""
        tasks = self.tasks
        if plan.prompts or tasks.waiting or list(tasks.running) != list(plan.requests):
            return []
        answers = [task.acceptance for task in tasks.running.values() if task.acceptance]
        if plan.batch.drafts and self.drafting and not self.drafting.is_settled(answers):
            return []
        ends = [
            (task, task.stored + steps * (1 + count))
            for task, count in zip(tasks.running.values(), plan.batch.draft_counts, strict=True)
        ]
        for task, end in ends:
            waits = task.waits or end >= task.free
            if waits or end > task.end or not self._room.reaches(task, end):
                return []
        for task, end in ends:
            task.stored = end
            task.in_flight += steps
        for answer in answers:
            answer.rested(steps)
        self.counts.steps += steps
        return [plan.after(step) for step in range(1, steps + 1)]

    def end(self, plan: StepPlan) -> int:
        """No token of the answers of ``plan`` that have not ended lies past this position."""
        tasks = [self.tasks.by_number.get(number) for number in plan.choosers]
        return max([task.end for task in tasks if task is not None], default=0)

    def chosen(self, plan: StepPlan, chosen: Sequence[Chosen]) -> Iterator[Outcome]:
        """A step is complete and has ``chosen`` tokens for each of its choosers.

        Yields what they mean for the requests that have not ended meanwhile, token by token: a
        request that ends by one of them has no more.
        """
        choosers = plan.choosers
        if len(chosen) != len(choosers):
            raise ModelError(f"{len(chosen)} choices of a step that chooses {len(choosers)}")
        by_number = self.tasks.by_number
        for number, segment in zip(plan.prompts, plan.batch.segments, strict=True):
            if (task := by_number.get(number)) is not None:
                task.in_flight -= 1
                task.complete = segment.end
                self._computed.append(task)
        counts = plan.batch.draft_counts
        for number, count, of in zip(plan.requests, counts, chosen, strict=False):
            if (task := by_number.get(number)) is not None:
                task.advance(count, len(of.tokens))
                if count:
                    self._learn(task, count, of)
        return self._outcomes(choosers, chosen)

    def _publish(self) -> None:
        """Share what steps have computed of prompts since the last plan: first their tokens are
        delivered."""
        computed, self._computed = self._computed, []
        for task in computed:
            self.tasks.publish(task)

    def _outcomes(self, choosers: Sequence[int], chosen: Sequence[Chosen]) -> Iterator[Outcome]:
        for row, (number, of) in enumerate(zip(choosers, chosen, strict=True)):
            for token in of.tokens:
                if (task := self.tasks.by_number.get(number)) is None:
                    break
                if task.request.limit == 0:
                    alone = self.tasks.end(task, Finish.LENGTH)
                    yield Outcome(number, row, len(task.tokens) - 1, None, alone)
                    break
                task.tokens.append(token)
                finish = task.finish(self._end_ids, self.context)
                ending = None if finish is None else self.tasks.end(task, finish)
                yield Outcome(number, row, len(task.tokens) - 2, token, ending)

    def _learn(self, task: Task, wanted: int, chosen: Chosen) -> None:
        """Record the acceptance of a step's drafts, of which ``wanted`` were requested."""
        accepted = len(chosen.tokens) - 1
        task.drafted += chosen.drafts
        task.accepted += accepted
        self.counts.count_drafts(chosen.drafts, accepted)
        if self.drafting is not None and task.acceptance is not None:
            self.drafting.learn(task.acceptance, wanted, chosen.tokens)

    def _decode_rows(self) -> tuple[list[Task], Turns[tuple[int, int]] | None]:
        """The answers that go on, each with room for its next token, and what takes turns with
        them."""
        chosen, waiting, first = self._taking_turns()
        rows = []
        for task in chosen:
            if task.slot < 0:  # preempted for one before it
                continue
            if task.stored == task.room and not self._room.grow(task):
                continue
            task.stored += 1
            task.in_flight += 1
            rows.append(task)
        if not waiting or len(rows) < len(chosen) or any(task.slot < 0 for task in waiting):
            return rows, None
        return rows, Turns(tuple([(task.slot, task.stored) for task in waiting]), first)

    def _taking_turns(self) -> tuple[list[Task], list[Task], int]:
        """Of the answers that could go on, those that have a row in the next step, those that do
        not, and the row from which on these come after it."""
        running = self.tasks.running
        tasks = [*filter(_goes_on, running.values())]
        is_alone = len(tasks) == len(running) and not self.tasks.waiting
        if self.paced is None or not is_alone:
            return tasks, [], 0
        if (count := self.paced.choose(len(tasks))) == len(tasks):
            return tasks, [], 0
        rows, turns = self._in_turn
        if len(rows) == count and {*rows, *turns.waiting} == running.keys():
            rows, turns = turns.next(rows)
        else:
            known = [number for number in turns.in_order(rows) if number in running]
            rows, turns = Turns.of([*dict.fromkeys([*known, *running])], count)
        self._in_turn = rows, turns
        by_number = self.tasks.by_number
        waiting = [by_number[number] for number in turns.waiting]
        return [by_number[number] for number in rows], waiting, turns.first

    def _drafts(self, rows: Sequence[Task]) -> tuple[int, ...]:
        """Drafts for the rows of a step, where there is room without preempting others; empty where
        no row has any."""
        if self.drafting is None:
            return ()
        counts = self.drafting.choose([task.acceptance for task in rows])
        for number, task in enumerate(rows):
            end = min(task.stored + counts[number], task.end, max(task.free - 1, task.stored))
            if not self._room.reaches(task, end):
                end = task.room
            counts[number] = end - task.stored
            task.stored = end
            if counts[number] and task.acceptance is not None:
                task.acceptance.asked()
        return tuple(counts) if any(counts) else ()

    def _missed(
        self, rows: Sequence[Task], positions: Sequence[int], drafts: Sequence[int]
    ) -> tuple[tuple[int, Segment], ...]:
        """The tokens, by request, that a draft model has to pass before a step without prompts."""
        if self._rest is None:
            return ()
        behind = 1 if self._rest.of_tokens else 0
        if not drafts:
            for task in rows:
                task.rest_draft(behind)
            return ()
        missed = []
        for task, position, count in zip(rows, positions, drafts, strict=True):
            if count and task.missed is not None:
                if task.missed < position - behind:
                    missed.append((task.number, Segment(task.slot, task.missed, position - behind)))
                task.missed = None
        return tuple(missed)

    def _segment(
        self, task: Task, budget: int, segments: dict[int, Segment], planned: set[int]
    ) -> int:
        """Add the next rows of a prompt, ``budget`` at most, unless others take too much already or
        there is no room; how many of these are left. Other rows of the step are of ``planned``
        requests."""
        start = task.stored
        rows = min(budget, task.prefill - start)
        if task.awaits_scores:
            taken = sum(self.limits.aligned(s.end - s.start) for s in segments.values())
            rows = min(rows, MOST_SCORED - taken)
            if rows < 1:
                return budget  # for others
        is_alone = len(self.tasks.running) == 1 and not self.tasks.waiting
        if is_alone and not self.takes_whole(task.number, start, start + rows):
            rows = self.limits.first(rows)
        end = self._storage.cut(task.slot, start, start + rows)
        if segments and not self.limits.fit([*(s.end for s in segments.values()), end]):
            return 0
        if not self._room.takes(task, end, planned | segments.keys()):
            return 0
        chooses, scored = end == task.prefill, task.scored_rows(start, end)
        segments[task.number] = Segment(task.slot, start, end, chooses, scored)
        task.stored = end
        task.in_flight += 1
        return budget - self.limits.aligned(end - start)


def _goes_on(task: Task) -> bool:
    """Whether an answer could have a row in the next step."""
    if not task.prefill <= task.stored < task.end:
        return False
    return not task.in_flight or not (task.waits or task.stored + 1 >= task.free)
