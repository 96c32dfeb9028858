"""Requests to an engine of this process, as a server would make them: without HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from urdir.driver.errors import DriverError
from urdir.model.engine.requests.request import Ending, Item, Piece, Request
from urdir.model.engine.requests.service import Service
from urdir.model.engine.sampling_settings import GREEDY
from urdir.model.errors import ModelError
from urdir.model.measure.load import Ask, LoadCase, Reply, run_load

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
    `run_load`. Answers are tokens: a server makes text of them in other processes."""
    with closing(engine), Service(engine, None, limits) as service:
        replies = await run_load(partial(_ask, service), case, asks, on_reply)
        return replies, DeviceUse.of(service.metrics())


async def _ask(service: Service, ask: Ask) -> Reply:
    request = Request(prompt=ask.prompt, settings=GREEDY, limit=ask.tokens, ignore_end=True)
    reply, loop, ended = Reply(time.perf_counter()), asyncio.get_running_loop(), asyncio.Event()

    def note(item: Item) -> None:
        """In the thread of the service, as little as front ends ask of it."""
        if isinstance(item, Piece):
            reply.add(len(item.choices))
            return
        reply.end = time.perf_counter()
        if isinstance(item, Ending):
            reply.prompt_tokens = item.prompt_tokens
            reply.cached_tokens = item.cached_tokens
            reply.tokens = item.generated_tokens
        else:
            reply.error = str(item)
        loop.call_soon_threadsafe(ended.set)

    try:
        answer = service.submit(request, note)
    except (ModelError, DriverError) as error:
        reply.error, reply.end = str(error), time.perf_counter()
        return reply
    try:
        await ended.wait()
    except asyncio.CancelledError:
        service.cancel(answer)
        raise
    return reply
