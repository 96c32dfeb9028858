"""A service for asyncio: answers as asynchronous iterators, cancelled by closing them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Generic, TypeVar

from urdir.model.engine.requests.answer import Answer, Item
from urdir.model.engine.requests.limits import Limits
from urdir.model.engine.requests.metrics import Metrics
from urdir.model.engine.requests.request import Ending, Piece, Request
from urdir.model.engine.requests.service import OpenModel, Service
from urdir.model.engine.requests.warm_up import WarmUp

_Model = TypeVar("_Model")


class AsyncAnswers:
    """Answers requests with an engine, used exclusively until closed.

    Without text answers have tokens only, and no vocabulary is needed. To be used and closed in one
    event loop.
    """

    def __init__(
        self,
        engine: OpenModel,
        limits: Limits | None = None,
        warm_up: WarmUp | None = None,
        has_text: bool = True,
    ) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None  # of those who wait for answers
        self._open = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        tokenizer = engine.tokenizer if has_text else None
        self._service = Service(engine, tokenizer, limits, self._post, warm_up)

    async def generate(self, request: Request) -> AsyncGenerator[Piece | Ending, None]:
        """Pieces, and an ending last; closing it cancels the request.

        Raises, at the first item: BusyError, ContextFullError, SettingsError; at any: ModelError,
        DriverError.
        """
        self._loop = asyncio.get_running_loop()
        items: asyncio.Queue[Item] = asyncio.Queue()
        answer: Answer | None = None
        self._open += 1
        self._is_idle.clear()
        try:
            answer = await self._answer_to(request, items.put_nowait)
            self._service.add(answer)
            while True:
                item = await items.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                if isinstance(item, Ending):
                    return
        finally:
            if answer is not None:
                self._service.cancel(answer)
            self._open -= 1
            if not self._open:
                self._is_idle.set()

    async def _answer_to(self, request: Request, deliver: Callable[[Item], None]) -> Answer:
        if request.constraint is None:
            return self._service.answer_to(request, deliver)
        return await asyncio.to_thread(self._service.answer_to, request, deliver)

    @property
    def lost(self) -> Exception | None:
        """See `Service.lost`."""
        return self._service.lost

    def metrics(self) -> Metrics:
        """Counts and gauges of now."""
        return self._service.metrics()

    async def drain(self) -> None:
        """Wait until every request is answered."""
        await self._is_idle.wait()

    async def close(self) -> None:
        """End what runs. Idempotent."""
        await asyncio.to_thread(self._service.close)

    def _post(self, work: Callable[[], None]) -> None:
        """Have the event loop do some work; it may be closed already."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(work)


class AsyncService(AsyncAnswers, Generic[_Model]):
    """The same by an engine that it owns; ``model``, what its users know of it, is made by
    ``describe``."""

    def __init__(
        self,
        engine: OpenModel,
        describe: Callable[[Service], _Model],
        limits: Limits | None = None,
        warm_up: WarmUp | None = None,
        has_text: bool = True,
    ) -> None:
        super().__init__(engine, limits, warm_up, has_text)
        self._engine = engine
        self.model = describe(self._service)

    async def close(self) -> None:
        """End what runs, free the device. Idempotent."""
        try:
            await super().close()
        finally:
            self._engine.close()


class AnswersOnDemand:
    """Answers with an engine that is free between requests: the first open request acquires it, the
    end of the last releases it.

    To be used in one event loop at a time.
    """

    def __init__(self, engine: OpenModel) -> None:
        self._engine = engine
        self._answers: AsyncAnswers | None = None
        self._open = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = asyncio.Lock()  # held while the engine is acquired or released

    async def generate(self, request: Request) -> AsyncGenerator[Piece | Ending, None]:
        """See `AsyncAnswers.generate`; ModelError as well while the engine is in use."""
        if self._loop is not (loop := asyncio.get_running_loop()):
            self._loop, self._lock = loop, asyncio.Lock()
        async with self._lock:
            if self._answers is None:
                self._answers = AsyncAnswers(self._engine)
            answers = self._answers
            self._open += 1
        try:
            async with contextlib.aclosing(answers.generate(request)) as items:
                async for item in items:
                    yield item
        finally:
            self._open -= 1
            await self._give_back()

    async def _give_back(self) -> None:
        async with self._lock:
            if not self._open and self._answers is not None:
                answers, self._answers = self._answers, None
                await answers.close()
