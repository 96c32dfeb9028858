"""Requests to the server of a model over its Unix socket: one a connection, as its end cancels an
answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec
from httptools import HttpParserError, HttpResponseParser

from urdir.model.serve.errors import loading

_READ_BYTES = 1 << 16
_MOST_BYTES = 16 << 20  # of a response that is read whole
_RETRY_SECONDS = 0.02  # while a front end of the model has not begun

Headers = list[tuple[bytes, bytes]]


class GoneError(Exception):
    """The server of a model has closed the connection before the end of its response."""


class Reply:
    """A response: its head, then its body in parts as they come."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self.status = 0
        self.headers: Headers = []
        self._reader = reader
        self._parts: list[bytes] = []
        self._is_complete = False
        self._parser = HttpResponseParser(self)

    async def begin(self) -> None:
        """Read the head. Raises GoneError."""
        while not self.status:
            await self._read()

    async def parts(self) -> AsyncGenerator[bytes, None]:
        """The body. Raises GoneError."""
        while True:
            if self._parts:
                part = b"".join(self._parts)
                self._parts.clear()
                yield part
            if self._is_complete:
                return
            await self._read()

    async def whole(self) -> bytes:
        """All of the body. Raises GoneError."""
        body = bytearray()
        async for part in self.parts():
            body += part
            if len(body) > _MOST_BYTES:
                raise GoneError(f"a response has more than {_MOST_BYTES:,} bytes")
        return bytes(body)

    async def is_loading(self) -> bool:
        """Whether the front end does not have its model yet (`errors.loading`). The body stays."""
        body = await self.whole()
        self._parts.append(body)
        return str(loading()).encode() in body

    async def _read(self) -> None:
        try:
            data = await self._reader.read(_READ_BYTES)
            if data:
                self._parser.feed_data(data)
        except (OSError, HttpParserError) as error:
            raise GoneError(str(error)) from None
        if not data and not self._is_complete:
            raise GoneError("the connection was closed")

    # ---- of the parser ----

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header is complete."""
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """The head is complete."""
        self.status = self._parser.get_status_code()

    def on_body(self, part: bytes) -> None:
        """A part of the body is there."""
        self._parts.append(part)

    def on_message_complete(self) -> None:
        """The response is complete."""
        self._is_complete = True


@asynccontextmanager
async def ask(
    path: Path,
    method: str,
    target: bytes,
    headers: Iterable[tuple[bytes, bytes]] = (),
    body: bytes | bytearray = b"",
) -> AsyncGenerator[Reply, None]:
    """Send a request to the server at a Unix socket; its reply, whose head is there. Leaving the
    context cancels the answer.

    A server whose front end has not begun yet is asked again. Raises GoneError.
    """
    while True:
        try:
            reader, writer = await asyncio.open_unix_connection(str(path))
        except OSError as error:
            raise GoneError(str(error)) from None
        try:
            head = [f"{method} ".encode() + target + b" HTTP/1.1", b"host: localhost"]
            head += [name + b": " + value for name, value in headers]
            head += [b"content-length: %d" % len(body), b"connection: close", b"", b""]
            writer.write(b"\r\n".join(head))
            writer.write(body)
            reply = Reply(reader)
            await reply.begin()
            if reply.status == HTTPStatus.SERVICE_UNAVAILABLE and await reply.is_loading():
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            yield reply
            return
        finally:
            writer.transport.abort()


async def describe(headers: Headers, path: Path) -> dict[str, Any]:
    """What the server of a model says of it: an entry of /v1/models as "model", one of /api/tags as
    "tag", and the reply of /api/show as "show". Raises GoneError."""
    found: dict[str, Any] = {}
    json = [*headers, (b"content-type", b"application/json")]
    for name, method, target in (
        ("model", "GET", b"/v1/models"),
        ("tag", "GET", b"/api/tags"),
        ("show", "POST", b"/api/show"),
    ):
        async with ask(path, method, target, json, b"{}" if method == "POST" else b"") as reply:
            said = await reply.whole()
        if reply.status != HTTPStatus.OK:
            raise GoneError(f"{target.decode()} is answered with {reply.status}")
        found[name] = msgspec.json.decode(said)
    found["model"], found["tag"] = found["model"]["data"][0], found["tag"]["models"][0]
    return found
