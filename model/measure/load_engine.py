"""Requests to an engine of this process, as a server would make them: without HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from urdir.driver.errors import DriverError
from urdir.model.engine.requests.async_service import AsyncService
from urdir.model.engine.requests.request import Ending, Request
from urdir.model.engine.sampling_settings import GREEDY
from urdir.model.errors import ModelError
from urdir.model.measure.load import Ask, LoadCase, Reply, run_load
from urdir.model.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from urdir.model.engine.engine import Engine
    from urdir.model.engine.requests.limits import Limits
    from urdir.model.engine.requests.metrics import Metrics


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """What the device did, by its own clock: ``idle_share`` of the time it waited between steps,
    while requests were open."""

    steps: int
    busy_seconds: float
    idle_seconds: float
    idle_share: float
    preemptions: int

    @classmethod
    def of(cls, metrics: Metrics) -> DeviceUse:
        """From the start of a service on."""
        busy, idle = metrics.busy_seconds, metrics.idle_seconds
        share = idle / (busy + idle) if busy + idle else 0.0
        return cls(metrics.steps, busy, idle, share, metrics.preemptions)


async def load_engine(
    engine: Engine,
    limits: Limits,
    case: LoadCase,
    asks: Sequence[Ask],
    on_reply: Callable[[Reply], None] = lambda reply: None,
) -> tuple[list[Reply], DeviceUse]:
    """Have all requests answered by an engine with several sequences, which is closed then; see
    `run_load`. A file without a vocabulary has no text, and its answers are tokens alone."""
    service = AsyncService(engine, None, limits, has_text=Tokenizer.is_there(engine.file))
    try:
        replies = await run_load(partial(_ask, service), case, asks, on_reply)
        return replies, DeviceUse.of(await service.metrics())
    finally:
        await service.close()


async def _ask(service: AsyncService[None], ask: Ask) -> Reply:
    request = Request(prompt=ask.prompt, settings=GREEDY, limit=ask.tokens, ignore_end=True)
    reply = Reply(time.perf_counter())
    last = reply.start
    try:
        async with aclosing(service.generate(request)) as items:
            async for item in items:
                if isinstance(item, Ending):
                    reply.prompt_tokens = item.prompt_tokens
                    reply.cached_tokens = item.cached_tokens
                    reply.tokens = item.generated_tokens
                    continue
                now = time.perf_counter()
                if reply.first is None:
                    reply.first = now
                else:  # tokens of one launch come together
                    count = len(item.choices)
                    reply.gaps += [(now - last) / count] * count
                last = now
    except (ModelError, DriverError) as error:
        reply.error = str(error)
    reply.end = time.perf_counter()
    return reply
