"""Passing requests to the model that they name, and its answers back."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from functools import partial
from http import HTTPStatus

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from urdir.model.serve.access import Access
from urdir.model.serve.bodies import Bodies
from urdir.model.serve.errors import ApiError, error_body
from urdir.model.serve.guard import REQUEST_ID
from urdir.model.serve.json_response import encode_json
from urdir.model.serve.limits import Limits
from urdir.model.serve.router.fleet import Fleet
from urdir.model.serve.router.model import AnyWorker, Model
from urdir.model.serve.router.model_field import is_background, model_field
from urdir.model.serve.router.upstream import GoneError, Headers, Reply, ask
from urdir.model.serve.stream import log, while_connected

#: Headers of a connection, or that the other side writes itself.
_NOT_PASSED = frozenset(
    b"connection keep-alive te trailer transfer-encoding upgrade proxy-authorization host expect "
    b"content-length date server x-request-id request-id accept-encoding".split()
)
Named = Callable[[str | None, str], Awaitable[Model]]
_REPLY_KEEPS = frozenset({b"content-length"})


class Forward:
    """An ASGI application that passes requests to the model they name, and its answers back.

    ``named`` finds the model of a name and a path. ``headers`` are of the router's own requests.
    """

    def __init__(
        self,
        fleet: Fleet,
        bodies: Bodies,
        limits: Limits,
        named: Named,
        headers: Headers,
    ) -> None:
        self._fleet = fleet
        self._bodies = bodies
        self._limits = limits
        self._named = named
        self._headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. Raises ApiError before the response begins."""
        request = Request(scope, receive)
        is_post = request.method == "POST"
        async with AsyncExitStack() as held:
            body = bytearray()
            if is_post:
                body = await held.enter_async_context(self._bodies.body(request))
            work = self._answer(request, body, held, send)
            try:
                await while_connected(receive, work)
            except ClientDisconnect:
                return

    async def _answer(
        self, request: Request, body: bytearray, held: AsyncExitStack, send: Send
    ) -> None:
        """Pass a request on; ``held`` is the room of its body, until the answer begins."""
        model, loads = await self._choose(request, body)
        async with self._fleet.use(model, loads) as worker:
            try:
                async with ask(worker.path, *_sent(request), body) as reply:
                    if request.url.path == "/v1/responses" and is_background(body):
                        self._fleet.hold(model, partial(_has_background, worker, self._headers))
                    await held.aclose()
                    with suppress(BufferError):  # a part is still being sent
                        body.clear()
                    await _pass(reply, request, send)
            except GoneError:
                raise await _gone(model, worker) from None

    async def _choose(self, request: Request, body: bytearray) -> tuple[Model, bool | None]:
        """The model of a request, and whether to load it: as "autoload" of the query says. Facts
        that a GET asks for are of models that are loaded."""
        path, query = request.url.path, request.query_params
        name = query.get("model")
        if request.method != "POST":
            return await self._named(name, path), False
        model = await self._named(model_field(body, self._limits) or name, path)
        return model, {"true": True, "false": False}.get(query.get("autoload", ""))


class ForwardKept:
    """An ASGI application of /v1/responses/NAME: passes requests to the loaded model that keeps the
    response, or to the one that the query names."""

    def __init__(self, fleet: Fleet, named: Named) -> None:
        self._fleet = fleet
        self._named = named

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. Raises ApiError before the response begins."""
        with suppress(ClientDisconnect):
            await while_connected(receive, self._answer(Request(scope, receive), send))

    async def _answer(self, request: Request, send: Send) -> None:
        name = request.query_params.get("model")
        models = self._fleet.models.values()
        for model in [await self._named(name, request.url.path)] if name else [*models]:
            if model.status != "loaded":
                continue
            async with self._fleet.use(model, loads=False) as worker:
                with suppress(GoneError):
                    async with ask(worker.path, *_sent(request)) as reply:
                        if reply.status != HTTPStatus.NOT_FOUND:
                            await _pass(reply, request, send)
                            return
        raise ApiError(
            f"there is no response {request.path_params['name']!r}",
            status=404,
            kind="not_found_error",
            code="response_not_found",
        )


async def _pass(reply: Reply, request: Request, send: Send) -> None:
    """Pass an answer on as it comes."""
    headers = [
        (name, value)
        for name, value in reply.headers
        if name not in _NOT_PASSED or name in _REPLY_KEEPS
    ]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    try:
        async for part in reply.parts():
            await send({"type": "http.response.body", "body": part, "more_body": True})
    except GoneError as error:
        log.error("an answer was cut off: %s", error)
        last = _last_event(dict(headers).get(b"content-type", b""), request.url.path)
        if last is None:  # the length is known: the connection ends before
            return
        await send({"type": "http.response.body", "body": last, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _has_background(worker: AnyWorker, headers: Headers) -> bool:
    """Whether a model writes responses without a connection."""
    try:
        async with ask(worker.path, "GET", b"/metrics", headers) as reply:
            return re.search(rb"^urdir_background [^0]", await reply.whole(), re.M) is not None
    except GoneError:
        return False


async def _gone(model: Model, worker: AnyWorker) -> ApiError:
    """The error for a request whose model's process has ended, once the cause is known."""
    await asyncio.wait((worker.ended,), timeout=1.0)
    failure = worker.ended.result() if worker.ended.done() else None
    why = failure.cause if failure is not None else "its process does not answer"
    return ApiError(
        f"the model {model.name!r} is gone: {why}; the next request loads it again",
        status=503,
        kind="server_error",
        code="model_gone",
        headers={"Retry-After": "1"},
    )


def _last_event(kind: bytes, path: str) -> bytes | None:
    """The event that ends a stream which was cut off; None for other responses."""
    error = ApiError("the model's process has ended", status=503, kind="server_error")
    said = encode_json(error_body(path, error))
    if kind.startswith(b"text/event-stream"):
        name = b"event: error\n" if path.startswith("/v1/messages") else b""
        return b"\n\n" + name + b"data: " + said + b"\n\n"
    return said + b"\n" if kind.startswith(b"application/x-ndjson") else None


def _sent(request: Request) -> tuple[str, bytes, Headers]:
    """A request as its model gets it: method, path with query, headers."""
    scope = request.scope
    target: bytes = scope.get("raw_path") or scope["path"].encode()
    query: bytes = scope["query_string"]
    named = [(name, value) for name, value in scope["headers"] if name not in _NOT_PASSED]
    return (
        "GET" if request.method == "HEAD" else request.method,
        target + b"?" + query if query else target,
        [*named, (b"x-request-id", scope[REQUEST_ID])],
    )


def own_headers(access: Access) -> Headers:
    """Headers of the router's own requests to models, which ask for the same keys."""
    if not access.api_keys:
        return []
    return [(b"authorization", b"Bearer " + access.api_keys[0].encode())]
