"""Requests that wait to begin: how many, and for how long."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import takewhile
from math import ceil

from urdir.model.engine.requests.limits import Limits
from urdir.model.engine.requests.task import Task
from urdir.model.errors import BusyError


class Waiting(deque[Task]):
    """Tasks in the order that they came, as many and as long as ``limits`` allow; ``clock`` is in
    seconds."""

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        super().__init__()
        self._limits = limits
        self._clock = clock

    def check_room(self) -> None:
        """Raise BusyError where no more may wait."""
        if len(self) >= self._limits.queue:
            raise self._busy(f"{len(self)} requests are waiting already")

    def overdue(self) -> dict[Task, BusyError]:
        """The tasks that have waited too long without being begun, and what to say."""
        latest = self._clock() - self._limits.wait_seconds
        late = takewhile(lambda task: task.arrived < latest, self)
        waited = f"the request waited {self._limits.wait_seconds:g} s without being begun"
        return {task: self._busy(waited) for task in late if not task.has_begun}

    def _busy(self, what: str) -> BusyError:
        """As long as the first in the queue waits, a newcomer will, too."""
        first = self[0].arrived if self else self._clock()
        seconds = min(max(1, ceil(self._clock() - first)), ceil(self._limits.wait_seconds))
        return BusyError(f"{what}: try again in {seconds} s", seconds)
