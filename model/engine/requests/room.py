"""Room in storage for the next tokens of answers; the youngest requests are preempted for it."""

from __future__ import annotations

from collections.abc import Container
from contextlib import suppress

from urdir.model.engine.requests.storage import Storage
from urdir.model.engine.requests.task import Task
from urdir.model.engine.requests.tasks import Tasks
from urdir.model.errors import ContextFullError


class Room:
    """Reserves room in ``storage`` for ``tasks``, for ``ahead`` tokens at once."""

    def __init__(self, tasks: Tasks, storage: Storage, ahead: int) -> None:
        self._tasks = tasks
        self._storage = storage
        self._ahead = ahead

    def grow(self, task: Task) -> bool:
        """Reserve room for the next tokens of an answer, taking it from younger requests if need
        be; False where the answer itself was preempted, or dropped."""
        ahead = self._ahead - (task.stored + task.slot) % self._ahead  # equal answers take turns
        end = min(task.stored + ahead, task.end)
        with self._tasks.alone(task):
            while True:
                with suppress(ContextFullError):
                    self._storage.reserve(task.slot, task.stored, end)
                    task.room = end
                    return True
                with suppress(ContextFullError):
                    task.room = self._storage.reserve(task.slot, task.stored, task.stored + 1)
                    return True
                youngest = next(reversed(self._tasks.running.values()))
                self._tasks.preempt(youngest)
                if youngest is task:
                    break
        return False

    def takes(self, task: Task, end: int, planned: Container[int]) -> bool:
        """Reserve room for the rows of a prompt up to ``end``, in layers that have none for all of
        it; False if there is too little at present. Younger requests that are not ``planned``,
        without rows in the step, are preempted for it."""
        while True:
            with suppress(ContextFullError):
                self._storage.reserve(task.slot, task.stored, end)
                return True
            self._tasks.is_short = True
            youngest = next(reversed(self._tasks.running.values()))
            if youngest is task or youngest.number in planned:
                return False
            self._tasks.preempt(youngest)

    def reaches(self, task: Task, end: int) -> bool:
        """Whether an answer has room up to ``end``, which is reserved where it is free."""
        if end > task.room:
            try:
                self._storage.reserve(task.slot, task.stored, end)
            except Exception:  # what is wrong shows again in the step that needs the room
                return False
            task.room = end
        return True
