"""How requests come to a scheduler: they are queued, refused, dropped when late, and admitted."""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from math import ceil

from urdir.model.engine.requests.limits import Limits
from urdir.model.engine.requests.request import Request
from urdir.model.engine.requests.storage import Storage
from urdir.model.engine.requests.task import Task
from urdir.model.engine.requests.tasks import Tasks
from urdir.model.errors import BusyError, ContextFullError


class Admission:
    """Queues and admits requests of up to ``context`` tokens into ``tasks``, within ``limits``."""

    def __init__(
        self,
        tasks: Tasks,
        storage: Storage,
        limits: Limits,
        context: int,
        clock: Callable[[], float],
    ) -> None:
        self._tasks = tasks
        self._storage = storage
        self._limits = limits
        self._context = context
        self._clock = clock
        self._last = 0

    def add(self, request: Request) -> Task:
        """Queue a request. Raises ContextFullError for a prompt that never fits, and BusyError."""
        if (more := request.positions - self._context) > 0:
            raise ContextFullError(
                f"{request.positions} tokens exceed the context of {self._context} by {more}: "
                "open with a larger one and room for it, or shorten the prompt"
            )
        waiting = len(self._tasks.waiting)
        if waiting >= self._limits.queue:
            raise self._busy(f"{waiting} requests are waiting already")
        self._last += 1
        task = Task(self._last, request, self._context, self._clock())
        self._tasks.add(task)
        return task

    def drop_late(self) -> None:
        """End the requests that have waited too long to begin."""
        latest = self._clock() - self._limits.wait_seconds
        late = list(takewhile(lambda task: task.arrived < latest, self._tasks.waiting))
        late = [task for task in late if not task.has_begun]
        waited = f"the request waited {self._limits.wait_seconds:g} s without being begun"
        errors = [self._busy(waited) for _ in late]
        for task, error in zip(late, errors, strict=True):
            self._tasks.drop(task, error)

    def admit(self) -> Task | None:
        """Give the first request that waits a slot and room; None where none can begin now."""
        tasks = self._tasks
        running = tasks.running
        if not tasks.waiting or not tasks.free_slots or (tasks.is_short and running):
            return None
        task = tasks.waiting[0]
        if task.in_flight or self._is_being_computed(task):
            return None
        most = task.scored if task.awaits_scores else len(task.tokens) - 1
        known = task.tokens[:most] if self._limits.share_prefixes else ()
        spare = self._limits.ahead * len(running)  # or the next tokens would preempt it
        slot, scope = tasks.free_slots[-1], task.request.scope
        try:
            found = self._storage.match(slot, known, task.least_room, spare, scope)
        except Exception as error:
            if isinstance(error, ContextFullError) and running:
                tasks.is_short = True
            else:
                tasks.drop(task, error)
            return None
        if not task.has_begun:
            tasks.counts.begun += 1
            task.waited = self._clock() - task.arrived
            tasks.counts.queue_seconds += task.waited
        return tasks.admit(found)

    def _busy(self, what: str) -> BusyError:
        """As long as the first in the queue waits, a new one will, too."""
        waiting, now = self._tasks.waiting, self._clock()
        first = waiting[0].arrived if waiting else now
        seconds = min(max(1, ceil(now - first)), ceil(self._limits.wait_seconds))
        return BusyError(f"{what}: try again in {seconds} s", seconds)

    def _is_being_computed(self, task: Task) -> bool:
        """Whether steps in flight compute more of a request's prefix than is known in its scope: it
        can share that soon. Several answers to one prompt share it so."""
        if not self._limits.share_prefixes or task.awaits_scores:
            return False
        for leader in self._tasks.running.values():
            if leader.complete >= leader.prefill or leader.request.scope != task.request.scope:
                continue
            end = self._storage.next_shared(leader.slot, leader.complete)
            if not 0 < end < len(task.tokens) or end > leader.prefill:
                continue
            # the last token distinguishes most prompts
            is_alike = leader.tokens[end - 1] == task.tokens[end - 1]
            if is_alike and leader.tokens[:end] == task.tokens[:end]:
                return True
        return False
