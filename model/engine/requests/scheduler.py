"""Which rows the next step processes: requests are admitted, continued, set back and ended here.

Requests are served in the order they came. An admitted one has a slot, and pages for its whole
prompt. Every step continues all answers by a row each; beside them it has a budget of rows for the
prompts, the oldest first. When pages run out, the youngest request is *set back*: it gives up its
pages and waits, before all younger ones, to be computed again from its prompt and the answer so
far. So the oldest request always goes on, and everything ends.

Where drafts are verified, a step may take several tokens of an answer. How many is known when it is
complete. Until then ``stored`` of its `Task` counts all drafts as accepted: room is reserved for
them, and no step goes past the answer's end.

Steps are planned one ahead: a plan takes it that no answer ends by the tokens that steps before it
choose, which are still unknown. If one does, its next row was computed for nothing.

No device is needed here. `Storage` is what the key/value cache does for it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from math import ceil

from urdir.model.engine.batch import Batch, Segment
from urdir.model.engine.requests.drafting import Acceptance, Drafting
from urdir.model.engine.requests.limits import Limits
from urdir.model.engine.requests.request import Ending, Finish, Request
from urdir.model.engine.requests.step_plan import Chosen, Outcome, StepPlan
from urdir.model.engine.requests.storage import Storage
from urdir.model.engine.requests.task import Task
from urdir.model.errors import BusyError, ContextFullError, ModelError


@dataclass(slots=True)
class Counts:
    """What a scheduler did: tokens of prompts that requests brought and of those found in storage,
    tokens chosen, steps planned, requests set back; by place in a step, drafts and those accepted.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    set_back: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def count_drafts(self, drafts: int, accepted: int) -> None:
        """Of so many drafts of a step the first ones were accepted."""
        for counts, number in ((self.drafted, drafts), (self.accepted, accepted)):
            counts += [0] * (number - len(counts))
            for place in range(number):
                counts[place] += 1


class Scheduler:
    """Serves requests of up to ``context`` tokens by ``slots`` sequences of ``storage``, which no
    one else uses. A step has a row for each slot at most. ``end_ids`` end answers. An answer that
    ``waits`` goes on once its last token is known. ``drafting`` says how many drafts steps verify.
    ``clock`` is in seconds.

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
        self.limits = limits or Limits()
        self.context = min(context, storage.most_tokens)
        self.counts = Counts()
        self._storage = storage
        self._end_ids = end_ids
        self._waits = waits
        self._drafting = drafting
        self._clock = clock
        self._last = 0
        self._tasks: dict[int, Task] = {}
        # Both in the order that requests came. Every running one is older than all that wait.
        self._running: dict[int, Task] = {}
        self._waiting: deque[Task] = deque()
        # The last one given back is taken first. Requests are set back the youngest first, and
        # admitted again the oldest first, so that none takes the slot of another whose tokens under
        # way are still to be read.
        self._slots = list(reversed(range(slots)))
        self._dropped: dict[int, Exception] = {}
        self._is_short = False  # of pages: none is admitted until a request ends

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests that have a slot."""
        return len(self._running)

    @property
    def begun(self) -> tuple[int, ...]:
        """The requests that a step which fails may be of: those that have a slot or are set back
        with tokens under way; where there are none, the first that waits."""
        begun = [t.number for t in self._tasks.values() if t.slot >= 0 or t.in_flight]
        return tuple(begun or [task.number for task in islice(self._waiting, 1)])

    def tokens(self, request: int) -> Sequence[int]:
        """Prompt and answer of a request so far."""
        return self._tasks[request].tokens

    def last(self, request: int) -> int | None:
        """The position of the last token of a request that is known; None where it has ended."""
        task = self._tasks.get(request)
        return None if task is None else len(task.tokens) - 1

    def cached(self, request: int) -> int:
        """How many tokens of a request's prompt were found when it began."""
        return self._tasks[request].cached

    # ---- requests come and go ----

    def add(self, request: Request) -> int:
        """Queue a request; its number. Raises ContextFullError for a prompt that never fits, and
        BusyError."""
        if (more := len(request.prompt) - self.context) > 0:
            raise ContextFullError(
                f"{len(request.prompt)} tokens exceed the context of {self.context} by {more}: "
                "open with a larger one and room for it, or shorten the prompt"
            )
        if len(self._waiting) >= self.limits.queue:
            raise self._busy(f"{len(self._waiting)} requests are waiting already")
        self._last += 1
        task = Task(self._last, request, self.context, self._clock())
        task.waits |= self._waits
        if self._drafting is not None and request.drafts and not task.waits:
            task.acceptance = Acceptance()
        self._tasks[task.number] = task
        self._waiting.append(task)
        return task.number

    def cancel(
        self, request: int, finish: Finish = Finish.INTERRUPTED, stopped_by: str | None = None
    ) -> Ending | None:
        """End a request now: its user left, or its text has a stop string (``finish`` STOP). None
        for one that has ended."""
        task = self._tasks.get(request)
        return None if task is None else replace(self._end(task, finish), stopped_by=stopped_by)

    def dropped(self) -> dict[int, Exception]:
        """The requests that were ended here since this was last called, and why: they waited too
        long to begin, or storage failed for them."""
        latest = self._clock() - self.limits.wait_seconds
        late = list(takewhile(lambda task: task.arrived < latest, self._waiting))
        late = [task for task in late if not task.has_begun]
        waited = f"the request waited {self.limits.wait_seconds:g} s without being begun"
        errors = [self._busy(waited) for _ in late]
        for task, error in zip(late, errors, strict=True):
            self._drop(task, error)
        dropped, self._dropped = self._dropped, {}
        return dropped

    def _busy(self, what: str) -> BusyError:
        """As long as the first in the queue waits, a newcomer will, too."""
        first = self._waiting[0].arrived if self._waiting else self._clock()
        seconds = min(max(1, ceil(self._clock() - first)), ceil(self.limits.wait_seconds))
        return BusyError(f"{what}: try again in {seconds} s", seconds)

    # ---- steps ----

    def plan(self) -> StepPlan | None:
        """The next step; None where there is nothing to do, or all waits for tokens. A request for
        which storage fails is `dropped`.

        256 answers take 0.04 ms, some of them reserving room in every step, and `chosen` takes
        0.12 ms (medians on one core of a cloud Xeon, CPython 3.11).
        """
        rows = self._decode_rows()
        budget = self.limits.mixed_rows if rows else self.limits.prompt_rows
        segments: dict[int, Segment] = {}
        for task in list(self._running.values()):
            if task.stored < task.prefill and budget:
                with self._alone(task):
                    budget = self._segment(task, budget, segments)
        admitted = []
        while budget and (new := self._admit()) is not None:
            with self._alone(new):
                budget = self._segment(new, budget, segments)
                admitted.append((new.number, new.slot))
        if not rows and not segments:
            return None
        self.counts.steps += 1
        positions = tuple([task.stored - 1 for task in rows])
        drafts = () if segments else self._drafts(rows)
        return StepPlan(
            Batch(tuple([task.slot for task in rows]), tuple(segments.values()), drafts),
            tuple([task.number for task in rows]),
            positions,
            tuple(segments),
            tuple(admitted),
        )

    def repeat(self, plan: StepPlan, steps: int) -> list[StepPlan]:
        """``steps`` more steps after ``plan``, the last one, each of the same rows a token further:
        for a launch of all of them at once. None of them where another request would wait for
        that, where an answer ends meanwhile by its length, or where there is no room."""
        if plan.prompts or self._waiting or list(self._running) != list(plan.requests):
            return []
        drafts = plan.batch.drafts or (0,) * len(plan.requests)
        tasks = [*zip(self._running.values(), drafts, strict=True)]
        if not all(self._has_room(t, t.stored + steps * (1 + count)) for t, count in tasks):
            return []
        for task, count in tasks:
            task.stored += steps * (1 + count)
            task.in_flight += steps
        self.counts.steps += steps
        return [plan.after(step) for step in range(1, steps + 1)]

    def end(self, plan: StepPlan) -> int:
        """No token of the answers of ``plan`` that have not ended lies past this position."""
        tasks = [self._tasks.get(number) for number in plan.choosers]
        return max([task.end for task in tasks if task is not None], default=0)

    def chosen(self, plan: StepPlan, chosen: Sequence[Chosen]) -> Iterator[Outcome]:
        """A step is complete and has ``chosen`` something for each of its choosers.

        What it means for the requests that have not ended meanwhile, token by token: one that is
        ended by its first tokens has no more.
        """
        choosers = plan.choosers
        if len(chosen) != len(choosers):
            raise ModelError(f"{len(chosen)} choices of a step that chooses {len(choosers)}")
        for number, segment in zip(plan.prompts, plan.batch.segments, strict=True):
            if (task := self._tasks.get(number)) is not None:
                task.in_flight -= 1
                task.complete = segment.end
                self._publish(task)
        wanted = plan.batch.drafts or (0,) * len(plan.requests)
        for number, count, of in zip(plan.requests, wanted, chosen, strict=False):
            if (task := self._tasks.get(number)) is not None:
                task.in_flight -= 1
                task.complete += len(of.tokens)
                task.reached = max(task.reached, task.stored)
                task.stored -= 1 + count - len(of.tokens)
                if count:
                    self._learn(task, count, of)
        return self._outcomes(choosers, chosen)

    def _outcomes(self, choosers: Sequence[int], chosen: Sequence[Chosen]) -> Iterator[Outcome]:
        for row, (number, of) in enumerate(zip(choosers, chosen, strict=True)):
            for token in of.tokens:
                if (task := self._tasks.get(number)) is None:
                    break
                task.tokens.append(token)
                finish = task.finish(self._end_ids, self.context)
                ending = None if finish is None else self._end(task, finish)
                yield Outcome(number, row, len(task.tokens) - 2, token, ending)

    def _learn(self, task: Task, wanted: int, chosen: Chosen) -> None:
        """Note what became of the drafts of a step, so many of which were wanted."""
        accepted = len(chosen.tokens) - 1
        task.drafted += chosen.drafts
        task.accepted += accepted
        self.counts.count_drafts(chosen.drafts, accepted)
        if task.acceptance is not None:
            task.acceptance.learn(wanted, accepted)

    def _drafts(self, rows: Sequence[Task]) -> tuple[int, ...]:
        """Drafts for the rows of a step, as far as there is room without taking any from others;
        nothing where none has any."""
        if self._drafting is None:
            return ()
        counts = self._drafting.choose([task.acceptance for task in rows])
        for number, task in enumerate(rows):
            end = min(task.stored + counts[number], task.end)
            if end > task.room:
                with suppress(ContextFullError):
                    task.room = self._storage.reserve(task.slot, task.stored, end)
            counts[number] = min(end, task.room) - task.stored
            task.stored += counts[number]
        return tuple(counts) if any(counts) else ()

    def _decode_rows(self) -> list[Task]:
        """The answers that go on, each with room for its next token."""
        rows = []
        for task in list(self._running.values()):
            if not task.prefill <= task.stored < task.end or (task.waits and task.in_flight):
                continue
            if task.slot < 0:  # set back for one before it
                continue
            if task.stored == task.room and not self._has_grown(task):
                continue
            task.stored += 1
            task.in_flight += 1
            rows.append(task)
        return rows

    def _has_room(self, task: Task, end: int) -> bool:
        """Whether an answer can go on to ``end`` without a look at its tokens, in room that is
        there or that is free."""
        if task.waits or end > task.end:
            return False
        if end > task.room:
            try:
                self._storage.reserve(task.slot, task.stored, end)
            except Exception:  # what is wrong shows again in the step that needs the room
                return False
            task.room = end
        return True

    def _has_grown(self, task: Task) -> bool:
        """Reserve room for the next tokens of an answer, taking it from younger requests if need
        be; False where the answer itself was set back, or dropped."""
        ahead = self.limits.ahead
        ahead -= (task.stored + task.slot) % ahead  # equal answers take turns in reserving
        end = min(task.stored + ahead, task.end)
        with self._alone(task):
            while True:
                with suppress(ContextFullError):
                    self._storage.reserve(task.slot, task.stored, end)
                    task.room = end
                    return True
                with suppress(ContextFullError):
                    task.room = self._storage.reserve(task.slot, task.stored, task.stored + 1)
                    return True
                youngest = next(reversed(self._running.values()))
                self._set_back(youngest)
                if youngest is task:
                    break
        return False

    def _segment(self, task: Task, budget: int, segments: dict[int, Segment]) -> int:
        """Add the next rows of a prompt, ``budget`` at most, unless others take too much already;
        how many of these are left."""
        start = task.stored
        end = self._storage.cut(task.slot, start, min(start + budget, task.prefill))
        if segments and not self.limits.fit([*(s.end for s in segments.values()), end]):
            return 0
        segments[task.number] = Segment(task.slot, start, end, chooses=end == task.prefill)
        task.stored = end
        task.in_flight += 1
        aligned = -(-(end - start) // self.limits.alignment) * self.limits.alignment
        return budget - aligned

    def _admit(self) -> Task | None:
        """Give the first request that waits a slot and room; None where none can begin now."""
        if not self._waiting or not self._slots or (self._is_short and self._running):
            return None
        task = self._waiting[0]
        if task.in_flight or self._is_being_computed(task):
            return None
        known = task.tokens[:-1] if self.limits.share_prefixes else ()
        prefill, slot = len(task.tokens), self._slots[-1]
        spare = self.limits.ahead * len(self._running)  # or the next tokens would set it back
        try:
            found = self._storage.match(slot, known, prefill, spare, task.request.scope)
        except Exception as error:
            if isinstance(error, ContextFullError) and self._running:
                self._is_short = True
            else:
                self._drop(task, error)
            return None
        self._waiting.popleft()
        self._running[task.number] = task
        task.slot = self._slots.pop()
        task.stored = task.complete = found
        task.prefill = task.room = prefill
        if not task.has_begun:
            task.has_begun, task.cached = True, found
            self.counts.prompt_tokens += prefill
            self.counts.cached_tokens += found
        return task

    def _is_being_computed(self, task: Task) -> bool:
        """Whether steps under way compute more of a request's beginning than is known in its scope:
        it can share that soon. Answers to one prompt share it so."""
        if not self.limits.share_prefixes:
            return False
        for leader in self._running.values():
            if leader.complete >= leader.prefill or leader.request.scope != task.request.scope:
                continue
            end = self._storage.next_shared(leader.slot, leader.complete)
            if not 0 < end < len(task.tokens) or end > leader.prefill:
                continue
            # the last of them tells most apart
            is_alike = leader.tokens[end - 1] == task.tokens[end - 1]
            if is_alike and leader.tokens[:end] == task.tokens[:end]:
                return True
        return False

    # ---- endings ----

    @contextmanager
    def _alone(self, task: Task) -> Iterator[None]:
        """Plan the rows of one request: an error ends it and no other."""
        try:
            yield
        except Exception as error:
            self._drop(task, error)

    def _drop(self, task: Task, error: Exception) -> None:
        """End a request whose user hears of it by `dropped`."""
        self._dropped[task.number] = error
        self._end(task, Finish.INTERRUPTED)

    def _end(self, task: Task, finish: Finish) -> Ending:
        """Forget a request, wherever it is; rows of it that are under way count for nothing."""
        del self._tasks[task.number]
        if task.slot < 0:
            self._waiting.remove(task)
        else:
            self._release(task)
        self._is_short = False
        generated = task.answered - (finish is Finish.END)
        self.counts.generated_tokens += generated
        return Ending(
            *(finish, len(task.request.prompt), task.cached, generated),
            drafted_tokens=task.drafted,
            accepted_tokens=task.accepted,
        )

    def _set_back(self, task: Task) -> None:
        """Take slot and pages from a request. Its tokens under way are still read."""
        self._waiting.appendleft(task)
        self._release(task)
        self.counts.set_back += 1

    def _release(self, task: Task) -> None:
        known = task.tokens[: task.complete] if self.limits.share_prefixes else ()
        slot, reached = task.slot, max(task.reached, task.stored)
        self._slots.append(slot)
        del self._running[task.number]
        task.slot = -1
        task.stored = task.complete = task.reached = task.room = task.prefill = 0
        self._storage.release(slot, known, reached, task.request.scope)

    def _publish(self, task: Task) -> None:
        """Others may begin with what complete steps have computed of a request."""
        if task.slot >= 0 and self.limits.share_prefixes:
            self._storage.publish(task.slot, task.tokens[: task.complete], task.request.scope)
