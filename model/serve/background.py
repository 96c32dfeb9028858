"""/v1/responses/ID: responses that are kept, and those that go on without a connection.

A response with ``background`` is written by the front end that took its request. What it has come
to, its events, a sign of life and the order to stop are kept in the engine's process under its
name, where every front end finds them.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from enum import Enum

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from urdir.model.serve.counts import Counts
from urdir.model.serve.errors import ApiError, api_error, overloaded
from urdir.model.serve.input_items import input_items
from urdir.model.serve.interface import Json
from urdir.model.serve.json_response import JsonResponse
from urdir.model.serve.kept import Kept, Part
from urdir.model.serve.limits import Limits
from urdir.model.serve.prefix_scope import CALLER
from urdir.model.serve.response_shape import ResponseShape
from urdir.model.serve.stream import NAMED, AnswerResponse, log_failure

_LOOK_SECONDS = 0.05  # between looks for new events, by a stream that has all
_ORDER_SECONDS = 0.25  # between looks for an order
_ALIVE_SECONDS = 15.0  # without a sign of life, after which a response has failed
_FAR = 1 << 40  # bytes, behind the end of everything that is kept
_LAST = b": the end"  # a comment after the last event
_OPEN = ("queued", "in_progress")


class Order(Enum):
    """What a caller wants of a response that is being written."""

    CANCEL = b"cancel"
    DELETE = b"delete"


class Background:
    """Writes responses without connections, and has the endpoints of kept ones.

    ``tasks`` are those that write; a server that ends waits for them, or cancels them.
    """

    def __init__(
        self, kept: Kept, counts: Counts, limits: Limits, tasks: set[asyncio.Task[None]]
    ) -> None:
        self._kept = kept
        self._counts = counts
        self._limits = limits
        self._tasks = tasks

    async def begin(self, caller: bytes, answer: AnswerResponse) -> Response:
        """Begin to write; the response that is queued, or its stream. Raises ApiError for one too
        many or too large."""
        if (count := self._counts.open("background")) >= self._limits.background:
            raise overloaded(f"{count} responses are being written, which is the limit")
        shape = answer.shape
        assert isinstance(shape, ResponseShape)
        standing = shape.standing("queued")
        name, is_streamed = standing["response"]["id"], shape.parameters.stream
        opening = b"".join(map(NAMED.write, shape.opening())) if is_streamed else b""
        self._counts.add("background", 1)  # before others look at it
        try:
            await self._keep_queued(caller, name, standing, opening)
        except BaseException:
            self._counts.add("background", -1)
            raise
        task = asyncio.create_task(self._write(caller, name, answer, shape, len(opening)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if not is_streamed:
            return JsonResponse(standing["response"])
        return self._stream(caller, name, -1)

    async def _keep_queued(self, caller: bytes, name: str, standing: Json, opening: bytes) -> None:
        """Keep a response that is queued, and its first events. Raises ApiError for what is too
        large."""
        await self._kept.put(caller, name, standing)
        await self._kept.append(caller, name, opening, 0)
        for part in (Part.WHOLE, Part.EVENTS):
            if await self._kept.part(caller, name, part, _FAR) is None:
                await self._kept.drop(caller, name, Part.WHOLE, Part.EVENTS)
                raise ApiError("the response is too large to be kept", param="background")
        await self._say_alive(caller, name)

    # ---- endpoints ----

    async def response(self, request: Request) -> Response:
        """GET and DELETE /v1/responses/NAME."""
        name, caller = request.path_params["name"], request.scope[CALLER]
        found = await self._standing(caller, name)
        if request.method == "DELETE":
            if found["status"] in _OPEN:
                await self._kept.put_part(caller, name, Part.ORDER, Order.DELETE.value)
            await self._kept.drop(caller, name, Part.WHOLE, Part.EVENTS)
            return JsonResponse({"id": name, "object": "response", "deleted": True})
        if request.query_params.get("stream") not in ("true", "True", "1"):
            return JsonResponse(found)
        if not await self._kept.part(caller, name, Part.EVENTS):
            raise ApiError(
                "only a response that was requested with 'background' and 'stream' is streamed",
                param="stream",
            )
        after = request.query_params.get("starting_after", "-1")
        if re.fullmatch(r"-?\d{1,9}", after, re.ASCII) is None:
            raise ApiError(
                "'starting_after' must be the number of an event", param="starting_after"
            )
        return self._stream(caller, name, int(after))

    async def items(self, request: Request) -> Response:
        """GET /v1/responses/NAME/input_items."""
        name = request.path_params["name"]
        kept = await self._kept.get(request.scope[CALLER], name)
        return JsonResponse(input_items(name, kept["input"], request.query_params))

    async def cancel(self, request: Request) -> Response:
        """POST /v1/responses/NAME/cancel: the response as it is then."""
        name, caller = request.path_params["name"], request.scope[CALLER]
        found = await self._standing(caller, name)
        if not found["background"]:
            raise ApiError("only a response in the background can be cancelled: close the others'")
        if found["status"] in _OPEN:
            await self._kept.put_part(caller, name, Part.ORDER, Order.CANCEL.value)
        while found["status"] in _OPEN:
            await asyncio.sleep(_LOOK_SECONDS)
            found = await self._standing(caller, name)
        return JsonResponse(found)

    async def _standing(self, caller: bytes, name: str) -> Json:
        """A response as it is now: failed if the process that wrote it is gone."""
        found: Json = (await self._kept.get(caller, name))["response"]
        if found["status"] not in _OPEN:
            return found
        if not await self._is_written(caller, name):
            error = {"code": "server_error", "message": "the process that wrote it has ended"}
            found |= {"status": "failed", "error": error}
        return found

    async def _is_written(self, caller: bytes, name: str) -> bool:
        """Whether a process writes a response."""
        alive = await self._kept.part(caller, name, Part.ALIVE)
        return alive is not None and time.monotonic() - float(alive) <= _ALIVE_SECONDS

    # ---- writing ----

    async def _write(
        self, caller: bytes, name: str, answer: AnswerResponse, shape: ResponseShape, length: int
    ) -> None:
        """Write a response to its end, an error's, or that of an order, whose events have
        ``length`` bytes so far."""
        ordering = asyncio.create_task(self._obey(caller, name, asyncio.current_task()))
        last = b""
        failure: BaseException | None = None
        try:
            is_queued = True
            async with aclosing(answer.events()) as events:
                async for data in events:
                    if is_queued and not answer.is_complete:
                        await self._kept.put(caller, name, shape.standing("in_progress"))
                    is_queued = False
                    if shape.parameters.stream:
                        await self._kept.append(caller, name, data, length)
                        length += len(data)
        except asyncio.CancelledError as error:
            failure = error
            if not answer.is_complete:  # else it is kept as it is
                with contextlib.suppress(Exception):  # the engine is gone
                    await self._kept.put(caller, name, shape.standing("cancelled"))
        except Exception as error:
            log_failure(error)
            failure, told = error, api_error(error)
            last = NAMED.write(shape.failure(told))
            with contextlib.suppress(Exception):
                await self._kept.put(caller, name, shape.standing("failed", told))
        finally:
            self._counts.add("background", -1)
            answer.trace(failure)
            ordering.cancel()
            await asyncio.gather(ordering, return_exceptions=True)  # it fails if the engine is gone
            with contextlib.suppress(Exception):
                if shape.parameters.stream:
                    await self._kept.append(caller, name, last + _LAST + b"\n\n", length)
                if await self._kept.part(caller, name, Part.ORDER) == Order.DELETE.value:
                    await self._kept.drop(caller, name, *Part)

    async def _obey(self, caller: bytes, name: str, task: asyncio.Task[None] | None) -> None:
        """Say that a response is being written; cancel its task when that is ordered."""
        assert task is not None
        while await self._kept.part(caller, name, Part.ORDER) is None:
            await self._say_alive(caller, name)
            await asyncio.sleep(_ORDER_SECONDS)
        task.cancel()

    async def _say_alive(self, caller: bytes, name: str) -> None:
        """The clock is of the machine, so that all processes have the same."""
        await self._kept.put_part(caller, name, Part.ALIVE, str(time.monotonic()).encode())

    # ---- reading ----

    def _stream(self, caller: bytes, name: str, after: int) -> Response:
        """The events of a response that come after that of a number."""
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        events, kind = self._events(caller, name, after), NAMED.content_type.decode()
        return StreamingResponse(events, media_type=kind, headers=headers)

    async def _events(self, caller: bytes, name: str, after: int) -> AsyncGenerator[bytes, None]:
        """Events are numbered from 0 in their order. They end where they are kept no longer."""
        start, skipped, silent = 0, after + 1, time.monotonic()
        while (data := await self._kept.part(caller, name, Part.EVENTS, start)) is not None:
            start += len(data)
            events = data.split(b"\n\n")[:-1]
            found = [event for event in events if event != _LAST]
            if new := found[max(skipped, 0) :]:
                yield b"".join(event + b"\n\n" for event in new)
                silent = time.monotonic()
            skipped -= len(found)
            if len(found) < len(events):
                return
            if not data and not await self._is_written(caller, name):
                return
            if time.monotonic() - silent > self._limits.pulse_seconds:
                yield NAMED.pulse
                silent = time.monotonic()
            await asyncio.sleep(_LOOK_SECONDS)
