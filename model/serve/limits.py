"""What a request may be at most, and reading a body within that."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, NoReturn

from starlette.requests import Request

from urdir.model.serve.errors import ApiError
from urdir.model.serve.interface import Json


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what one client can ask for; sizes are in bytes, times in seconds."""

    body: int = 4 << 20
    body_seconds: float = 30.0
    depth: int = 64  # of nested JSON
    stops: int = 16
    answers: int = 128  # prompts of a request, times n
    biases: int = 300
    tools: int = 128
    salt: int = 256  # characters
    schema: int = 64 << 10  # of a JSON schema, pattern or grammar
    open_requests: int = 2048  # of all clients together
    stalled_seconds: float = 30.0  # a client that reads nothing for so long is cut off
    silent_seconds: float = 30.0  # as is one that sends no whole request for that, or twice that


async def read_json(request: Request, limits: Limits) -> Json:
    """The JSON object that a request carries.

    Raises ApiError: 415 for another content type, 413 for a body that is too large, before it is
    read where the client says how large it is; 408 for one that is too slow; 400 for anything but
    an object within the limits.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # A web page of another origin can send other types without asking
    if kind != "application/json":
        raise ApiError("send JSON, with the header 'Content-Type: application/json'", status=415)
    return parse_json(await _read_body(request, limits), limits)


async def _read_body(request: Request, limits: Limits) -> bytes:
    announced = request.headers.get("content-length", "0")
    if not announced.isdecimal() or len(announced) > 18 or int(announced) > limits.body:
        _refuse_body(limits)
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for part in _parts(request):
                if len(body) + len(part) > limits.body:
                    _refuse_body(limits)
                body += part
    except TimeoutError:
        raise ApiError(
            f"the body took longer than {limits.body_seconds:g} s to arrive", status=408
        ) from None
    return bytes(body)


async def _parts(request: Request) -> AsyncIterator[bytes]:
    async for part in request.stream():
        yield part


def _refuse_body(limits: Limits) -> NoReturn:
    raise ApiError(
        f"the body is larger than {limits.body:,} bytes", status=413, code="body_too_large"
    )


def parse_json(body: bytes, limits: Limits) -> Json:
    """The object that ``body`` is as JSON; ApiError where it is none, or nested too deeply."""
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
    except RecursionError:
        _refuse_depth(limits)
    except ValueError as error:
        raise ApiError(f"the body is no JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError("the body must be a JSON object", code="invalid_json")
    _check_depth(value, limits)
    return value


def _check_depth(value: Any, limits: Limits) -> None:
    level = [value]
    for _ in range(limits.depth + 1):
        level = [
            item
            for container in level
            for item in (container.values() if isinstance(container, dict) else container)
            if isinstance(item, dict | list)
        ]
        if not level:
            return
    _refuse_depth(limits)


def _refuse_depth(limits: Limits) -> NoReturn:
    raise ApiError(f"the JSON nests deeper than {limits.depth} levels", code="invalid_json")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
