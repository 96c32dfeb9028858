"""A service for asyncio: answers as asynchronous iterators, cancelled by closing them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Generic, TypeVar

from urdir.model.engine.requests.answer import Item
from urdir.model.engine.requests.limits import Limits
from urdir.model.engine.requests.metrics import Metrics
from urdir.model.engine.requests.request import Ending, Piece, Request
from urdir.model.engine.requests.service import OpenModel, Service
from urdir.model.engine.requests.warm_up import WarmUp

_Model = TypeVar("_Model")


class AsyncService(Generic[_Model]):
    """Answers requests by an engine, which it owns; ``model``, what its users know of it, is made
    by ``describe``. Without text there are tokens alone, and no vocabulary is needed.

    To be used and closed in one event loop.
    """

    def __init__(
        self,
        engine: OpenModel,
        describe: Callable[[Service], _Model],
        limits: Limits | None = None,
        warm_up: WarmUp | None = None,
        has_text: bool = True,
    ) -> None:
        self._engine = engine
        self._loop: asyncio.AbstractEventLoop | None = None  # of those who wait for answers
        self._open = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        tokenizer = engine.tokenizer if has_text else None
        self._service = Service(engine, tokenizer, limits, self._post, warm_up)
        self.model = describe(self._service)

    async def generate(self, request: Request) -> AsyncGenerator[Piece | Ending, None]:
        """Pieces, and an ending last; closing it cancels the request.

        Raises, at the first item: BusyError, ContextFullError, SettingsError; at any: ModelError,
        DriverError.
        """
        self._loop = asyncio.get_running_loop()
        items: asyncio.Queue[Item] = asyncio.Queue()
        answer = self._service.submit(request, items.put_nowait)
        self._open += 1
        self._is_idle.clear()
        try:
            while True:
                item = await items.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                if isinstance(item, Ending):
                    return
        finally:
            self._service.cancel(answer)
            self._open -= 1
            if not self._open:
                self._is_idle.set()

    @property
    def lost(self) -> Exception | None:
        """See `Service.lost`."""
        return self._service.lost

    def metrics(self) -> Metrics:
        """Where it stands now."""
        return self._service.metrics()

    async def drain(self) -> None:
        """Wait until all that was asked for is answered."""
        await self._is_idle.wait()

    async def close(self) -> None:
        """End what runs, free the device; closing twice does nothing."""
        try:
            await asyncio.to_thread(self._service.close)
        finally:
            self._engine.close()

    def _post(self, work: Callable[[], None]) -> None:
        """Have the event loop do some work; it may be closed already."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(work)
