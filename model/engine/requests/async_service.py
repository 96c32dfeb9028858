"""A service for asyncio, by an engine of this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Generic, TypeVar

from urdir.model.engine.adapters import AdapterScale
from urdir.model.engine.requests.answer import Answer
from urdir.model.engine.requests.answering import Answering
from urdir.model.engine.requests.limits import Limits
from urdir.model.engine.requests.metrics import Metrics
from urdir.model.engine.requests.request import Ending, Item, Piece, Request
from urdir.model.engine.requests.service import OpenModel, Service
from urdir.model.engine.requests.slots import SlotAction, SlotDone
from urdir.model.engine.requests.warm_up import WarmUp
from urdir.model.text.constraints import Constraint

_Model = TypeVar("_Model")


class AsyncAnswers(Answering[Answer]):
    """Answers requests with an engine of this process, used exclusively until closed."""

    def __init__(
        self,
        engine: OpenModel,
        limits: Limits | None = None,
        warm_up: WarmUp | None = None,
    ) -> None:
        super().__init__(engine.tokenizer)
        self._loop: asyncio.AbstractEventLoop | None = None  # of those who wait for answers
        self._service = Service(engine, engine.tokenizer, limits, self._post, warm_up)

    async def _begin(self, request: Request, deliver: Callable[[Item], None]) -> Answer:
        self._loop = asyncio.get_running_loop()
        make = self._service.answer_to
        if request.constraint is None:
            answer = make(request, deliver)
        else:
            answer = await asyncio.to_thread(make, request, deliver)
        self._service.add(answer)
        return answer

    def _stop(self, begun: Answer) -> None:
        self._service.stop(begun)

    def _cancel(self, begun: Answer) -> None:
        self._service.cancel(begun)

    async def check(self, constraint: Constraint) -> None:
        """Compile a constraint, which is kept for a while. Raises ModelError for a bad one."""
        await asyncio.to_thread(self._service.compiler.matcher, constraint)

    async def act_on_slot(self, action: SlotAction) -> SlotDone:
        """See `Service.act_on_slot`."""
        return await asyncio.to_thread(self._service.act_on_slot, action)

    async def adapters(self, scales: Mapping[int, float] | None) -> tuple[AdapterScale, ...]:
        """See `Service.adapters`."""
        return self._service.adapters(scales)

    @property
    def lost(self) -> Exception | None:
        """See `Service.lost`."""
        return self._service.lost

    async def metrics(self) -> Metrics:
        """Counts and gauges of now. Raises what `lost` has."""
        if self.lost is not None:
            raise self.lost
        return self._service.metrics()

    async def close(self) -> None:
        """End what runs. Idempotent."""
        await asyncio.to_thread(self._service.close)

    def _post(self, work: Callable[[], None]) -> None:
        """Have the event loop do some work; it may be closed already."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(work)


class AsyncService(AsyncAnswers, Generic[_Model]):
    """The same by an engine that it owns; ``model`` is what its users know of it."""

    def __init__(
        self,
        engine: OpenModel,
        model: _Model,
        limits: Limits | None = None,
        warm_up: WarmUp | None = None,
    ) -> None:
        super().__init__(engine, limits, warm_up)
        self._engine = engine
        self.model = model

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
