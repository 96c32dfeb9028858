"""Middleware in front of the endpoints: host check, API keys, limit of open requests."""

from __future__ import annotations

import hmac
import logging
import time
import uuid
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from urdir.model.serve.access import Access
from urdir.model.serve.counts import ROUTES, Counts
from urdir.model.serve.errors import ApiError, error_body, overloaded
from urdir.model.serve.json_response import JsonResponse
from urdir.model.serve.limits import Limits
from urdir.model.serve.logs import access_log, log_request
from urdir.model.serve.prefix_scope import ANYBODY, CALLER, digest
from urdir.model.serve.spans import trace_request

#: Paths without a key: the health check, and the page, which prompts for one.
OPEN_PATHS = frozenset({"/", "/health", "/v1/health"})
#: Key of an ASGI scope that holds the request's id.
REQUEST_ID = "urdir.request_id"
ID_LENGTH = 128


class Guard:
    """ASGI middleware: host name, API key, limit of open requests. Counts responses.

    Sets `CALLER` in the scope to the digest of the API key, and `REQUEST_ID`, which the response
    has, too.
    """

    def __init__(
        self,
        app: ASGIApp,
        access: Access,
        limits: Limits,
        counts: Counts,
    ) -> None:
        self._app = app
        self._access = access
        self._keys = [key.encode() for key in access.api_keys]
        self._limits = limits
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            return
        path = scope["path"]
        route = path if path in ROUTES else "other"

        name = request_id(scope)
        # Anthropic's clients read the second one
        ids = [(b"x-request-id", name), (b"request-id", name)]

        trace_request(path, name.decode(), scope["headers"])
        status, began = 0, time.perf_counter()

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._counts.count_response(route, status)
                message = {**message, "headers": [*message.get("headers", ()), *ids]}
            await send(message)

        try:
            await self._answer(scope, receive, counted, name)
        finally:
            if access_log.isEnabledFor(logging.INFO):
                log_request(_fields(scope, name, status, time.perf_counter() - began))

    async def _answer(self, scope: Scope, receive: Receive, send: Send, name: bytes) -> None:
        try:
            caller = self._check(scope)
        except ApiError as error:
            await error_response(scope["path"], error)(scope, receive, send)
            return
        self._counts.add("requests", 1)
        try:
            await self._app({**scope, CALLER: caller, REQUEST_ID: name}, receive, send)
        finally:
            self._counts.add("requests", -1)

    def _check(self, scope: Scope) -> bytes:
        """The digest of the caller's key; ApiError if access is denied."""
        headers = Headers(scope=scope)
        if (host := headers.get("host")) is not None:  # a browser always names one
            self._check_host(host)
        if scope["path"] in OPEN_PATHS:
            return ANYBODY
        caller = self._check_key(dict(scope["headers"]))
        if (count := self._counts.open("requests")) >= self._limits.open_requests:
            raise overloaded(f"{count} requests are open, which is the limit")
        return caller

    def _check_host(self, host: str) -> None:
        hosts = self._access.hosts
        name = host.rpartition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]
        if hosts is not None and name.lower() not in hosts:
            raise ApiError(
                f"the host name {name!r} is not allowed: start with --allowed-host {name}",
                status=403,
                kind="permission_error",
                code="unknown_host",
            )

    def _check_key(self, headers: Mapping[bytes, bytes]) -> bytes:
        """The digest of the key. Compares with every key, in constant time."""
        if not self._keys:
            return ANYBODY
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":
            key = headers.get(b"x-api-key", b"")  # Anthropic's clients
        key = key.strip()
        matches = [hmac.compare_digest(key, known) for known in self._keys]
        if not any(matches):
            raise ApiError(
                "the API key is missing or wrong: send 'Authorization: Bearer KEY'",
                status=401,
                kind="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return digest(key)


def _fields(scope: Scope, name: bytes, status: int, seconds: float) -> dict[str, object]:
    """What the log has of a request; status 499 of one whose client was gone before a response, as
    nginx has it."""
    client = scope.get("client")
    return {
        "client": client[0] if client else "",
        "method": scope["method"],
        "path": scope["path"],
        "status": status or 499,
        "seconds": round(seconds, 6),
        "request_id": name.decode(),
    }


def error_response(path: str, error: ApiError) -> JsonResponse:
    """The response for a refused request."""
    return JsonResponse(error_body(path, error), error.status, error.headers)


def request_id(scope: Scope) -> bytes:
    """The id that the client gave its request, if that is printable and no longer than
    `ID_LENGTH`, or a new one."""
    given: bytes = dict(scope["headers"]).get(b"x-request-id", b"")
    is_good = 0 < len(given) <= ID_LENGTH and given.isascii() and given.decode().isprintable()
    return given if is_good else uuid.uuid4().hex.encode()
