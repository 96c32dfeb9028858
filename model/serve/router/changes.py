"""Waiting for a condition that changes of the models may bring about."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Changes:
    """Changes of an event loop, of which nothing but that they came is known."""

    def __init__(self) -> None:
        self._next = asyncio.Event()  # a new one after each
        self.has_ended = False  # the server stops: those who watch for ever do so no longer

    def notify(self) -> None:
        """Look at all conditions again."""
        self._next.set()
        self._next = asyncio.Event()

    def end(self) -> None:
        """Have those stop who watch for ever."""
        self.has_ended = True
        self.notify()

    async def until(self, condition: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait until a condition holds; whether it does within this many seconds."""
        try:
            async with asyncio.timeout(seconds):
                while not condition():
                    await self._next.wait()
        except TimeoutError:
            return False
        return True
