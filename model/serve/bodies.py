"""Request bodies: read within limits per client and for all clients together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any, NoReturn

from starlette.requests import Request

from urdir.model.serve.counts import Counts
from urdir.model.serve.errors import ApiError, overloaded
from urdir.model.serve.interface import Json
from urdir.model.serve.json_reader import JsonReader, JsonTooLargeError
from urdir.model.serve.limits import Limits


class Bodies:
    """Accounts for the bodies of all clients, from reading until they have become requests.

    A small body is always accepted: the limit on open requests bounds their number.
    """

    def __init__(self, limits: Limits, counts: Counts) -> None:
        self._limits = limits
        self._counts = counts  # of bytes above the free allowance of each body

    @contextlib.asynccontextmanager
    async def body(self, request: Request) -> AsyncGenerator[bytearray, None]:
        """Read the body of a request, which counts until the context ends.

        Raises ApiError: 415 for a page's body that is not said to be JSON, and for a compressed
        one, 413 for one that is too large, 429 if other bodies leave no room, 408 for one that
        arrives too slowly. With a Content-Length, 413 and 429 come before the body is read. Raises
        ClientDisconnect.
        """
        _check_kind(request)
        self._check_announced(request.headers.get("content-length", "0"))
        body = bytearray()
        try:
            await self._read(request, body)
            yield body
        finally:
            self._counts.add("body_bytes", -self._counted(len(body)))

    def _check_announced(self, length: str) -> None:
        if not length.isdecimal() or len(length) > 18 or int(length) > self._limits.body:
            self._refuse_size()
        self._check_room(self._counted(int(length)))

    async def _read(self, request: Request, body: bytearray) -> None:
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                async for part in request.stream():
                    self._add(body, part)
        except TimeoutError:
            raise ApiError(
                f"the body took longer than {self._limits.body_seconds:g} s to arrive", status=408
            ) from None

    def _add(self, body: bytearray, part: bytes) -> None:
        size = len(body) + len(part)
        if size > self._limits.body:
            self._refuse_size()
        more = self._counted(size) - self._counted(len(body))
        self._check_room(more)
        self._counts.add("body_bytes", more)
        body += part

    def _counted(self, size: int) -> int:
        return max(0, size - self._limits.small_body)

    def _check_room(self, more: int) -> None:
        if more and (held := self._counts.open("body_bytes")) + more > self._limits.bodies:
            raise overloaded(f"{held:,} bytes of large requests are being prepared")

    def _refuse_size(self) -> NoReturn:
        raise ApiError(
            f"the body is larger than {self._limits.body:,} bytes",
            status=413,
            code="body_too_large",
        )


def parse_body(body: bytes | bytearray, limits: Limits) -> Json:
    """Parse ``body`` as a JSON object; ApiError if it is not one, or exceeds the limits."""
    value = parse_json(body, limits)
    if not isinstance(value, dict):
        raise ApiError("the body must be a JSON object", code="invalid_json")
    return value


def parse_json(body: bytes | bytearray, limits: Limits) -> Any:
    """Parse ``body`` as JSON; ApiError if it is not, or exceeds the limits."""
    try:
        return JsonReader(limits).read(body)
    except JsonTooLargeError as error:
        raise ApiError(f"the body {error}", code="invalid_json") from None
    except ValueError as error:
        raise ApiError(f"the body is not JSON: {error}", code="invalid_json") from None


#: Browsers say with these that a request is a page's.
_OF_PAGES = ("origin", "sec-fetch-site")


def _check_kind(request: Request) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # Pages of other origins can send other types, or none, without a CORS preflight. So do, as
    # ollama's examples have it, curl and LiteLLM.
    is_of_page = any(name in request.headers for name in _OF_PAGES)
    if is_of_page and kind != "application/json":
        raise ApiError("send JSON, with the header 'Content-Type: application/json'", status=415)
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        raise ApiError(f"the body has the encoding {coding!r:.80}: send it as it is", status=415)
