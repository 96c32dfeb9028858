"""A thread that parses, renders and tokenises, one request at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

_Result = TypeVar("_Result")


class Run(Protocol):
    """Runs a job in the thread; raises its errors."""

    def __call__(self, job: Callable[[], _Result], /) -> Awaitable[_Result]:
        """The job's result."""


class TextThread:
    """A thread used in turns, since a template's process serves one caller at a time.

    Callers wait in the event loop: a cancelled one leaves the queue, and only its running job is
    completed. So only one large request at a time is parsed and held in memory.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "text")
        self._turn = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncGenerator[Run, None]:
        """Wait for a turn; run any number of jobs in it."""
        await self._turn.acquire()
        last: asyncio.Future[Any] | None = None

        async def run(job: Callable[[], _Result], /) -> _Result:
            nonlocal last
            last = running = asyncio.get_running_loop().run_in_executor(self._thread, job)
            return await asyncio.shield(running)  # a thread continues when its caller is cancelled

        try:
            yield run
        finally:
            if last is None or last.done():
                self._turn.release()
            else:
                last.add_done_callback(lambda _: self._turn.release())
