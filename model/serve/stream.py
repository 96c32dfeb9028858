"""Responses as a whole or as server-sent events, cancelled when the client disconnects."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from urdir.model.engine.requests.request import Ending, Piece
from urdir.model.serve.answers import Item, Usage
from urdir.model.serve.errors import api_error
from urdir.model.serve.interface import Json
from urdir.model.serve.json_response import encode_json

log = logging.getLogger("urdir.serve")
_Result = TypeVar("_Result")


class Shape(ABC):
    """The JSON format of one endpoint. OpenAI calls answers "choices"."""

    @abstractmethod
    def head(self, streamed: bool) -> Json:
        """Common fields of chunks or of the whole response: id, object, created, model."""

    @abstractmethod
    def opening(self) -> list[Json]:
        """Choices of the first chunks."""

    @abstractmethod
    def piece(self, index: int, piece: Piece) -> Json | None:
        """The choice of a chunk; None if there is nothing to send yet."""

    @abstractmethod
    def ending(self, index: int, ending: Ending) -> list[Json]:
        """The last choices of an answer's chunks."""

    @abstractmethod
    def whole(self) -> list[Json]:
        """The choices of a whole response, after all answers have ended."""


class AnswerResponse:
    """An ASGI response made of a service's answers, streamed or whole.

    A client that disconnects cancels them. Errors before the first token are raised, so that the
    response gets their status; later ones end the stream with an error event.
    """

    def __init__(
        self,
        answers: AsyncGenerator[list[Item], None],
        shape: Shape,
        usage: Usage,
        *,
        stream: bool,
        include_usage: bool,
    ) -> None:
        self._answers = answers
        self._shape = shape
        self._usage = usage
        self._stream = stream
        self._include_usage = include_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        work = self._send_events(send) if self._stream else self._send_whole(send)
        with contextlib.suppress(ClientDisconnect):  # the client is gone
            await while_connected(receive, work)

    async def _send_whole(self, send: Send) -> None:
        async with aclosing(self._answers) as batches:
            async for items in batches:
                for index, item in items:
                    self._take(index, item)
        response = self._shape.head(streamed=False)
        response |= {"choices": self._shape.whole(), "usage": self._usage.json()}
        await _start(send, "application/json")
        await _send_part(send, encode_json(response), more=False)

    def _take(self, index: int, item: Piece | Ending) -> list[Json]:
        """Convert an item to choices of chunks."""
        if isinstance(item, Piece):
            choice = self._shape.piece(index, item)
            return [] if choice is None else [choice]
        self._usage.add(index, item)
        return self._shape.ending(index, item)

    async def _send_events(self, send: Send) -> None:
        async with aclosing(self._events()) as events:
            first = await anext(events)
            await _start(send, "text/event-stream; charset=utf-8")
            try:
                await _send_part(send, first)
                async for event in events:
                    await _send_part(send, event)
                last = b"data: [DONE]\n\n"
            except Exception as error:
                log.error("an answer failed: %s", error, exc_info=error)
                last = _event(api_error(error).body)
        await _send_part(send, last, more=False)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events; items that are available together share one."""
        head = self._shape.head(streamed=True)
        usage: Json = {"usage": None} if self._include_usage else {}
        choices = self._shape.opening()
        async with aclosing(self._answers) as batches:
            async for items in batches:
                for index, item in items:
                    choices += self._take(index, item)
                if choices:
                    yield b"".join(_event({**head, "choices": [c], **usage}) for c in choices)
                choices = []
        if self._include_usage:
            yield _event({**head, "choices": [], "usage": self._usage.json()})


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Run ``work``, and cancel it if the client disconnects, with ClientDisconnect."""
    working = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return await working
        raise ClientDisconnect
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _start(send: Send, content_type: str) -> None:
    headers = [(b"content-type", content_type.encode()), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _send_part(send: Send, body: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


def _event(value: Json) -> bytes:
    return b"data: " + encode_json(value) + b"\n\n"
