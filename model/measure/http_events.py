"""A small HTTP client for measuring: JSON, and server-sent events with little work for each."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Self
from urllib.parse import urlsplit

from urdir.model.errors import ModelError, SettingsError

_ERROR_LIMIT = 300  # characters of a server's message
_LINE_LIMIT = 1 << 22  # bytes
_BROKEN = (OSError, EOFError, ValueError, asyncio.LimitOverrunError)
_Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class ServerError(ModelError):
    """The server cannot be reached, or refuses."""


@dataclass(slots=True)
class _Kept:
    """Connections that no request uses."""

    is_open: bool = False
    idle: list[_Connection] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class HttpServer:
    """Where requests go: ``base`` is the path that all of theirs begin with. As a context manager
    it keeps connections for later requests, as other clients do."""

    host: str
    port: int
    tls: bool
    base: str
    api_key: str | None = None
    _kept: _Kept = field(default_factory=_Kept, compare=False, repr=False)

    @classmethod
    def parse(cls, url: str, api_key: str | None = None) -> HttpServer:
        """Of http://host:port or http://host:port/v1; SettingsError for another URL."""
        try:
            parts = urlsplit(url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as error:
            raise SettingsError(f"{url}: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SettingsError(f"{url}: expected a URL such as http://127.0.0.1:8080")
        base = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port, parts.scheme == "https", base, api_key)

    async def __aenter__(self) -> Self:
        self._kept.is_open = True
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._kept.is_open = False
        while self._kept.idle:
            _, writer = self._kept.idle.pop()
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def json(self, path: str) -> Any:
        """GET a JSON value; ServerError."""
        async with aclosing(self._parts("GET", path, b"")) as parts:
            body = b"".join([part async for part in parts])
        try:
            return json.loads(body)
        except ValueError:
            raise ServerError(f"{self.host}:{self.port}{path}: the answer is not JSON") from None

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        """POST JSON, and the values of the events that come; ServerError."""
        held = b""
        async with aclosing(self._parts("POST", path, json.dumps(body).encode())) as parts:
            async for part in parts:
                *lines, held = (held + part).split(b"\n")
                for line in lines:
                    if line.startswith(b"data: {"):
                        yield json.loads(line[6:])

    async def _parts(self, method: str, path: str, body: bytes) -> AsyncGenerator[bytes, None]:
        """The body of a response as it comes."""
        where = f"{self.host}:{self.port}{self.base}{path}"
        request = self._head(method, path, len(body)) + body
        reader, writer, status, headers = await self._begun(request, where)
        is_whole = False
        try:
            async with aclosing(_read_body(reader, headers)) as parts:
                if status != HTTPStatus.OK:
                    text = b"".join([part async for part in parts])
                    raise ServerError(f"{where}: {status} {_message(text)}")
                async for part in parts:
                    yield part
            is_whole = headers.get("connection") != "close" and _has_end(headers)
        except _BROKEN as error:
            raise ServerError(f"{where}: the answer broke off: {error}") from None
        finally:
            if is_whole and self._kept.is_open:
                self._kept.idle.append((reader, writer))
            else:
                writer.close()

    async def _begun(self, request: bytes, where: str) -> tuple[*_Connection, int, dict[str, str]]:
        """Send a request, over an idle connection that the server has not closed, or a new one; the
        connection, status and headers."""
        while self._kept.idle:
            reader, writer = self._kept.idle.pop()
            try:
                writer.write(request)
                return reader, writer, *await _read_head(reader)
            except _BROKEN:
                writer.close()
        try:
            reader, writer = await asyncio.open_connection(
                self.host, self.port, ssl=self.tls or None, limit=_LINE_LIMIT
            )
        except OSError as error:
            raise ServerError(f"{where}: no connection: {error}") from None
        try:
            writer.write(request)
            return reader, writer, *await _read_head(reader)
        except _BROKEN as error:
            writer.close()
            raise ServerError(f"{where}: the answer broke off: {error}") from None

    def _head(self, method: str, path: str, length: int) -> bytes:
        lines = [
            f"{method} {self.base}{path} HTTP/1.1",
            f"Host: {f'[{self.host}]' if ':' in self.host else self.host}:{self.port}",
            "Content-Type: application/json",
            f"Content-Length: {length}",
        ]
        if self.api_key is not None:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Status and headers, their names in lower case."""
    status = int((await reader.readuntil(b"\r\n")).split()[1])
    headers = {}
    while line := (await reader.readuntil(b"\r\n")).strip().decode("latin-1"):
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip().lower()
    return status, headers


def _has_end(headers: Mapping[str, str]) -> bool:
    """Whether a body says where it ends."""
    return "content-length" in headers or headers.get("transfer-encoding") == "chunked"


async def _read_body(
    reader: asyncio.StreamReader, headers: Mapping[str, str]
) -> AsyncGenerator[bytes, None]:
    if headers.get("transfer-encoding") == "chunked":
        while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
        await reader.readuntil(b"\r\n")
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        while part := await reader.read(1 << 16):
            yield part


def _message(body: bytes) -> str:
    """What an error says, in OpenAI's shape or as it is."""
    text = body.decode("utf-8", "replace")
    with suppress(ValueError, KeyError, TypeError):
        text = str(json.loads(text)["error"]["message"])
    return " ".join(text.split())[:_ERROR_LIMIT]
