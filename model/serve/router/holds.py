"""Models that write responses without a connection: they are not unloaded meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from urdir.model.serve.router.changes import Changes
from urdir.model.serve.router.model import Model

_LOOK_SECONDS = 1.0  # between looks whether a model still writes

IsBusy = Callable[[], Awaitable[bool]]
Begin = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


class Holds:
    """Keeps models loaded. ``tasks`` are those of models that write; ``begin`` begins one."""

    def __init__(self, changes: Changes, begin: Begin) -> None:
        self.tasks: set[asyncio.Task[None]] = set()
        self._changes = changes
        self._begin = begin

    def hold(self, model: Model, is_busy: IsBusy) -> None:
        """Keep a model that is in use from being unloaded until it is not busy, which is asked
        every second."""
        model.held += 1
        if model.held == 1:
            model.open += 1
            task = self._begin(self._wait(model, is_busy))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def _wait(self, model: Model, is_busy: IsBusy) -> None:
        worker = model.worker
        try:
            while model.worker is worker:
                held = model.held
                await asyncio.sleep(_LOOK_SECONDS)
                if not await is_busy() and model.held == held:  # no more came meanwhile
                    return
        finally:
            model.held = 0
            model.open -= 1
            model.used = time.monotonic()
            self._changes.notify()
