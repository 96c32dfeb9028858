"""Concurrent answers to one HTTP request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from urdir.model.engine.requests.request import Ending, Piece, Request
from urdir.model.serve.interface import AsyncService
from urdir.model.serve.metrics import ServerMetrics, TokenClock

Item = tuple[int, Piece | Ending]
"""The index of a request, and an item of its answer."""

_AHEAD = 32  # items buffered for a client slower than the engine
_Queue = asyncio.Queue[tuple[int, Piece | Ending | Exception]]


async def together(
    service: AsyncService, requests: Sequence[Request], metrics: ServerMetrics
) -> AsyncGenerator[list[Item], None]:
    """Batches of items from all answers, each as soon as it is available; closing cancels all
    requests.

    Raises the first error of a request and cancels the others.
    """
    if len(requests) == 1:  # the usual case, without tasks in between
        async with aclosing(_timed(service, requests[0], metrics)) as only:
            async for known in only:
                yield [(0, known)]
        return
    queue: _Queue = asyncio.Queue(_AHEAD)
    pumps = [
        asyncio.create_task(_pump(service, request, index, queue, metrics))
        for index, request in enumerate(requests)
    ]
    try:
        left = len(pumps)
        while left:
            found = [await queue.get()]
            while not queue.empty():
                found.append(queue.get_nowait())
            items = [(index, item) for index, item in found if not isinstance(item, Exception)]
            left -= sum(isinstance(item, Ending) for _, item in items)
            if items:
                yield items
            for _, item in found:
                if isinstance(item, Exception):
                    raise item
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    service: AsyncService, request: Request, index: int, queue: _Queue, metrics: ServerMetrics
) -> None:
    """Move a request's items to ``queue``."""
    try:
        async with aclosing(_timed(service, request, metrics)) as items:
            async for item in items:
                await queue.put((index, item))
    except Exception as error:  # raised by the reader of the queue
        await queue.put((index, error))


async def _timed(
    service: AsyncService, request: Request, metrics: ServerMetrics
) -> AsyncGenerator[Piece | Ending, None]:
    """A request's items; their times are recorded."""
    clock, reason = TokenClock(metrics), "cancelled"
    try:
        async with aclosing(service.generate(request)) as items:
            async for item in items:
                if isinstance(item, Piece):
                    clock.came(len(item.choices))
                else:
                    reason = item.finish.value
                yield item
    except Exception:
        reason = "error"
        raise
    finally:
        clock.ended(reason)
