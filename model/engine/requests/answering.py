"""Answers for asyncio as asynchronous iterators, cancelled by closing them, whatever makes them."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Generic, TypeVar

from urdir.model.engine.requests.answer_text import AnswerText
from urdir.model.engine.requests.request import Ending, Item, Piece, Request
from urdir.model.text.tokenizer import Tokenizer

_Begun = TypeVar("_Begun")


class _Mailbox:
    """The items of one answer for a reader in an event loop; pieces that it is late for are
    joined."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._reader: asyncio.Future[None] | None = None

    def put(self, item: Item) -> None:
        """Add an item, in the thread of the event loop."""
        items = self._items
        if items and isinstance(item, Piece) and isinstance(last := items[-1], Piece):
            items[-1] = last.then(item)
        else:
            items.append(item)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> Piece | Ending:
        """The next item. Raises it if it is an error."""
        while not self._items:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        item = self._items.popleft()
        if isinstance(item, Exception):
            raise item
        return item


class Answering(ABC, Generic[_Begun]):
    """Answers requests by an engine, of this process or another; ``tokenizer`` makes text of the
    tokens. To be used in one event loop."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._open = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @abstractmethod
    async def _begin(self, request: Request, deliver: Callable[[Item], None]) -> _Begun:
        """Queue a request whose items, without text, go to ``deliver`` in the event loop."""

    @abstractmethod
    def _stop(self, begun: _Begun) -> None:
        """See `Service.stop`."""

    @abstractmethod
    def _cancel(self, begun: _Begun) -> None:
        """See `Service.cancel`."""

    async def generate(self, request: Request) -> AsyncGenerator[Piece | Ending, None]:
        """Pieces, and an ending last; closing it cancels the request.

        Raises, at the first item: BusyError, ContextFullError, SettingsError; at any: ModelError,
        DriverError.
        """
        items = _Mailbox()
        deliver: Callable[[Item], None] = items.put

        def stop() -> None:
            if begun is not None:
                self._stop(begun)

        if self._tokenizer is not None:
            deliver = AnswerText(self._tokenizer, request, items.put, stop)
        begun: _Begun | None = None
        self._open += 1
        self._is_idle.clear()
        try:
            begun = await self._begin(request, deliver)
            while True:
                item = await items.get()
                if isinstance(item, Ending):
                    begun = None
                    yield item
                    return
                yield item
        finally:
            if begun is not None:
                self._cancel(begun)
            self._open -= 1
            if not self._open:
                self._is_idle.set()

    async def drain(self) -> None:
        """Wait until every request is answered."""
        await self._is_idle.wait()
