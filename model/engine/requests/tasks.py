"""The requests of a scheduler: which have a sequence, which wait, and what their end leaves."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice

from urdir.model.engine.requests.request import Ending, Finish
from urdir.model.engine.requests.step_plan import StepPlan
from urdir.model.engine.requests.storage import Storage
from urdir.model.engine.requests.task import Task
from urdir.model.engine.speculation.draft_rest import DraftRest


@dataclass(slots=True)
class Counts:
    """What a scheduler did: prompt tokens of its requests and those found in storage, tokens
    chosen, steps planned, requests preempted, begun, and the seconds that these waited; by place in
    a step, drafts and those accepted."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    begun: int = 0
    queue_seconds: float = 0.0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def count_drafts(self, drafts: int, accepted: int) -> None:
        """Count the drafts of a sequence in a step, of which the first ones were accepted."""
        for counts, number in ((self.drafted, drafts), (self.accepted, accepted)):
            counts += [0] * (number - len(counts))
            for place in range(number):
                counts[place] += 1


class Tasks:
    """Requests that have not ended, by number: ``running`` ones have a sequence of ``storage``, of
    which there are ``slots``; others are ``waiting``.

    Both are in order of arrival. Every running one is older than all that wait. With
    ``share_prefixes`` what is computed of one is found by others of its scope. A draft model may
    have missed some of that in a ``rest``.
    """

    def __init__(
        self,
        storage: Storage,
        slots: int,
        *,
        share_prefixes: bool,
        rest: DraftRest | None = None,
    ) -> None:
        self.counts = Counts()
        self.by_number: dict[int, Task] = {}
        self.running: dict[int, Task] = {}
        self.waiting: deque[Task] = deque()
        # Last in, first out. Requests are preempted the youngest first and admitted again the
        # oldest first, so that none gets the slot of another whose tokens in flight are unread.
        self.free_slots = list(reversed(range(slots)))
        self.dropped: dict[int, Exception] = {}
        self.is_short = False  # of pages: none is admitted until a request ends
        self._storage = storage
        self._shares = share_prefixes
        self._rest = rest or DraftRest()

    @property
    def begun(self) -> tuple[int, ...]:
        """The requests that a step which fails may be of: those with a slot or with tokens in
        flight; if there are none, the first that waits."""
        begun = [t.number for t in self.by_number.values() if t.slot >= 0 or t.in_flight]
        return tuple(begun or [task.number for task in islice(self.waiting, 1)])

    def add(self, task: Task) -> None:
        """Queue a request."""
        self.by_number[task.number] = task
        self.waiting.append(task)

    def admit(self, found: int) -> Task:
        """Give the first request that waits the next slot, where storage has ``found`` of its
        tokens and room for all that are known."""
        task = self.waiting.popleft()
        self.running[task.number] = task
        task.slot = self.free_slots.pop()
        task.stored = task.complete = found
        task.prefill, task.room = len(task.tokens), task.least_room
        task.missed = 0 if found and self._rest.has_gaps else None
        if not task.has_begun:
            task.has_begun, task.cached = True, found
            self.counts.prompt_tokens += task.request.given
            self.counts.cached_tokens += found
        return task

    def preempt(self, task: Task) -> None:
        """Take slot and pages from a request, which waits before all younger ones. Its tokens in
        flight are still read."""
        self.waiting.appendleft(task)
        self._release(task)
        self.counts.preemptions += 1

    def end(self, task: Task, finish: Finish) -> Ending:
        """Forget a request. Its rows in flight are ignored."""
        del self.by_number[task.number]
        if task.slot < 0:
            self.waiting.remove(task)
        else:
            self._release(task)
        self.is_short = False
        generated = task.answered - (finish is Finish.END)
        self.counts.generated_tokens += generated
        return Ending(
            *(finish, task.request.given, task.cached, generated),
            drafted_tokens=task.drafted,
            accepted_tokens=task.accepted,
            queue_seconds=task.waited,
        )

    def drop(self, task: Task, error: Exception) -> None:
        """End a request by an error, which is kept in ``dropped``."""
        self.dropped[task.number] = error
        self.end(task, Finish.INTERRUPTED)

    @contextmanager
    def alone(self, task: Task) -> Iterator[None]:
        """Plan the rows of one request: an error ends it and no other."""
        try:
            yield
        except Exception as error:
            self.drop(task, error)

    def scored(self, plan: StepPlan) -> Iterator[tuple[int, int, int]]:
        """A step is complete: requests that have not ended, each with the first of the scored rows
        that tell something new of it, and the end of these."""
        end = 0
        for number, segment in zip(plan.prompts, plan.batch.segments, strict=True):
            start, end = end, end + segment.scored
            task, reached = self.by_number.get(number), segment.start + segment.scored
            if segment.scored and task is not None and reached > task.scored:
                yield number, start + task.scored - segment.start, end
                task.scored = reached

    def publish(self, task: Task) -> None:
        """Share what complete steps have computed of a request."""
        if task.slot >= 0 and self._shares:
            self._storage.publish(task.slot, task.tokens[: task.complete], task.request.scope)

    def _release(self, task: Task) -> None:
        known = task.tokens[: task.complete] if self._shares else ()
        slot, reached = task.slot, max(task.reached, task.stored)
        is_gap = task.missed is not None and self._shares
        self._rest.has_gaps |= self._rest.of_tokens and is_gap
        self.free_slots.append(slot)
        del self.running[task.number]
        task.slot = -1
        task.stored = task.complete = task.reached = task.room = task.prefill = 0
        self._storage.release(slot, known, reached, task.request.scope)
