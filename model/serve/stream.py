"""Responses as a whole or as server-sent events, cancelled when the client disconnects."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from http import HTTPStatus
from typing import Any, NamedTuple, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from urdir.model.engine.requests.device_lost import DeviceLostError
from urdir.model.engine.requests.request import Ending, Piece
from urdir.model.serve.answer import Answer, Event
from urdir.model.serve.answers import Item
from urdir.model.serve.errors import ApiError, api_error
from urdir.model.serve.interface import Json, ServedModel
from urdir.model.serve.json_response import encode_json
from urdir.model.serve.parameters import Parameters
from urdir.model.serve.spans import INCOMING
from urdir.model.serve.usage import Usage

log = logging.getLogger("urdir.serve")
_Result = TypeVar("_Result")


class Framing(NamedTuple):
    """How the events of a stream are written."""

    content_type: bytes
    write: Callable[[Json], bytes]
    pulse: bytes = b""  # keeps a silent connection open
    end: bytes = b""


def _data(event: Json) -> bytes:
    return b"data: " + encode_json(event) + b"\n\n"


def _named(event: Json) -> bytes:
    kind: str = event["type"]
    return b"event: " + kind.encode() + b"\n" + _data(event)


_SSE = b"text/event-stream; charset=utf-8"
_COMMENT = b": still here\n\n"
DATA = Framing(_SSE, _data, _COMMENT, b"data: [DONE]\n\n")  # server-sent events
NAMED = Framing(_SSE, _named, _COMMENT)  # with the names of their types
LINES = Framing(b"application/x-ndjson", lambda event: encode_json(event) + b"\n")


class Shape(ABC):
    """The answers of one response in the format of a protocol: whole, or as events."""

    framing = DATA
    #: Whether a whole response is so long that a thread is to make it.
    is_long = False

    def __init__(
        self, model: ServedModel, parameters: Parameters, answers: Sequence[Answer]
    ) -> None:
        self.model = model
        self.parameters = parameters
        self.answers = answers

    def opening(self) -> list[Json]:
        """The first events; they are sent with those of the first tokens."""
        return []

    @abstractmethod
    def part(self, answer: Answer, events: Sequence[Event], piece: Piece) -> list[Json]:
        """What is new of an answer."""

    @abstractmethod
    def ending(self, answer: Answer, usage: Usage) -> list[Json]:
        """The last events of one answer."""

    def closing(self, usage: Usage) -> list[Json]:
        """The events after all answers."""
        return []

    @abstractmethod
    def whole(self, usage: Usage) -> Json:
        """The response, after all answers have ended."""

    def failure(self, error: ApiError) -> Json:
        """The last event of a stream that fails."""
        return error.body

    def kept(self, usage: Usage) -> tuple[str, Json] | None:
        """What is kept for later requests, and its name; None: nothing."""
        return None


def log_failure(error: Exception) -> None:
    """Log why an answer failed after its beginning: refusals, as of a queue that is too long, and
    a lost device, which ends all answers, in one line."""
    if api_error(error).status < HTTPStatus.INTERNAL_SERVER_ERROR:
        log.info("an answer was refused: %s", error)
        return
    is_lost = isinstance(error, DeviceLostError)
    log.error("an answer failed: %s", error, exc_info=None if is_lost else error)


_NO_PIECE = Piece("", ())


class AnswerResponse:
    """An ASGI response made of a service's answers, streamed or whole.

    A client that disconnects cancels them. Errors before the first event are raised, so that the
    response gets their status; later ones end the stream with an error event. A stream that is
    silent for ``pulse_seconds`` gets a comment. ``keep`` keeps what a shape wants kept.
    """

    def __init__(
        self,
        items: AsyncGenerator[list[Item], None],
        shape: Shape,
        usage: Usage,
        pulse_seconds: float,
        keep: Callable[[str, Json], Awaitable[None]],
    ) -> None:
        self.shape = shape
        self._items = items
        self._usage = usage
        self._pulse_seconds = pulse_seconds
        self._keep = keep
        self._is_streamed = shape.parameters.stream
        self._send: Send
        self._beginning = asyncio.Lock()
        self._has_begun = False
        self._error: Exception | None = None  # after the beginning
        self._last_sent = 0.0
        self._length = 0  # of a whole response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        self._send = send
        work = self._send_events() if self._is_streamed else self._send_whole()
        try:
            await while_connected(receive, work)
        except ClientDisconnect as error:  # the client is gone
            self.trace(error)
        except Exception as error:
            self.trace(error)
            raise
        else:
            self.trace(self._error)

    def trace(self, error: BaseException | None) -> None:
        """Record the spans of the request, which has ended, if it is traced."""
        if (incoming := INCOMING.get()) is None:
            return
        shape = self.shape
        reasons = [answer.reason.value for answer in shape.answers]
        incoming.ended(shape.model.names[0], self._usage, shape.parameters, reasons, error)

    async def _send_whole(self) -> None:
        async with aclosing(self._items) as batches:
            async for items in batches:
                for index, item in items:
                    self._take(index, item)
        await self._keep_answer()
        if self.shape.is_long:
            body = await asyncio.to_thread(lambda: encode_json(self.shape.whole(self._usage)))
        else:
            body = encode_json(self.shape.whole(self._usage))
        self._length = len(body)
        await self._send_part(body, more=False)

    def _take(self, index: int, item: Piece | Ending) -> tuple[list[Event], Piece, bool]:
        """Add an item to its answer: what is new, and whether that is its end."""
        answer = self.shape.answers[index]
        if isinstance(item, Piece):
            if item.choices:
                self._usage.came()
            return answer.push(item), item, False
        self._usage.add(index, item)
        return answer.finish(item), _NO_PIECE, True

    async def _send_events(self) -> None:
        framing = self.shape.framing
        pulse = asyncio.create_task(self._keep_open()) if framing.pulse else None
        last = framing.end
        try:
            async with aclosing(self.events(self.shape.opening())) as events:
                async for event in events:
                    await self._send_part(event)
        except Exception as error:
            async with self._beginning:  # a comment may be about to begin it
                if not self._has_begun:
                    raise
            log_failure(error)
            self._error = error
            last = framing.write(self.shape.failure(api_error(error)))
        finally:
            if pulse is not None:
                pulse.cancel()
                await asyncio.gather(pulse, return_exceptions=True)
        await self._send_part(last, more=False)

    async def events(self, opening: Sequence[Json] = ()) -> AsyncGenerator[bytes, None]:
        """The events as they are sent, after those of the ``opening``; those that are available
        together are."""
        shape, usage = self.shape, self._usage
        events = [*opening]
        async with aclosing(self._items) as batches:
            async for items in batches:
                for index, item in items:
                    new, piece, has_ended = self._take(index, item)
                    answer = shape.answers[index]
                    events += shape.part(answer, new, piece)
                    if has_ended:
                        events += shape.ending(answer, usage)
                if usage.is_complete:
                    await self._keep_answer()
                    events += shape.closing(usage)
                if events:
                    yield b"".join(map(shape.framing.write, events))
                events = []

    @property
    def is_complete(self) -> bool:
        """Whether all answers have ended."""
        return self._usage.is_complete

    async def _keep_answer(self) -> None:
        """Keep what later requests may go on from, before the client can send them."""
        if (kept := self.shape.kept(self._usage)) is not None:
            await self._keep(*kept)

    async def _keep_open(self) -> None:
        """Send a comment whenever nothing else was sent for a while."""
        loop = asyncio.get_running_loop()
        self._last_sent = loop.time()
        while True:
            if (left := self._last_sent + self._pulse_seconds - loop.time()) > 0:
                await asyncio.sleep(left)
                continue
            await self._send_part(self.shape.framing.pulse)

    async def _send_part(self, body: bytes, more: bool = True) -> None:
        """Send a part of the body, after the headers."""
        self._last_sent = asyncio.get_running_loop().time()
        if not self._has_begun:
            await self._begin()
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def _begin(self) -> None:
        """Send the headers, once, whichever task is first."""
        async with self._beginning:
            if not self._has_begun:
                start = {"type": "http.response.start", "status": 200, "headers": self._headers()}
                await self._send(start)
                self._has_begun = True

    def _headers(self) -> list[tuple[bytes, bytes]]:
        headers = [(b"cache-control", b"no-store")]
        if not self._is_streamed:
            headers.append((b"content-length", b"%d" % self._length))
            return [*headers, (b"content-type", b"application/json")]
        # nginx: pass events on as they come
        headers.append((b"x-accel-buffering", b"no"))
        return [*headers, (b"content-type", self.shape.framing.content_type)]


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Run ``work`` in this task, and cancel it if the client disconnects, with ClientDisconnect."""
    this, is_gone = asyncio.current_task(), False
    assert this is not None

    async def watch() -> None:
        nonlocal is_gone
        while (await receive())["type"] != "http.disconnect":
            pass
        if not this.cancelling():  # else it ends already
            is_gone = True
            this.cancel()

    watching = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if is_gone and this.uncancel() == 0:
            raise ClientDisconnect from None
        raise
    finally:
        watching.cancel()
