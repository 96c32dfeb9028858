"""Middleware in front of the endpoints: host check, API keys, limit of open requests."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from urdir.model.serve.access import Access
from urdir.model.serve.counts import ROUTES, Counts
from urdir.model.serve.errors import ApiError, overloaded
from urdir.model.serve.json_response import JsonResponse
from urdir.model.serve.limits import Limits
from urdir.model.serve.prefix_scope import ANYBODY, CALLER, digest

#: Paths without a key: the health check, and the page, which prompts for one.
OPEN_PATHS = frozenset({"/", "/health"})


class Guard:
    """ASGI middleware: host name, API key, limit of open requests. Counts responses.

    Sets `CALLER` in the scope to the digest of the API key.
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

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._counts.count_response(route, message["status"])
            await send(message)

        try:
            caller = self._check(scope)
        except ApiError as error:
            await error_response(error)(scope, receive, counted)
            return
        self._counts.add("requests", 1)
        try:
            await self._app({**scope, CALLER: caller}, receive, counted)
        finally:
            self._counts.add("requests", -1)

    def _check(self, scope: Scope) -> bytes:
        """The digest of the caller's key; ApiError if access is denied."""
        headers = Headers(scope=scope)
        self._check_host(headers.get("host", ""))
        if scope["path"] in OPEN_PATHS:
            return ANYBODY
        caller = self._check_key(dict(scope["headers"]).get(b"authorization", b""))
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

    def _check_key(self, authorization: bytes) -> bytes:
        """The digest of the key. Compares with every key, in constant time."""
        if not self._keys:
            return ANYBODY
        scheme, _, key = authorization.partition(b" ")
        key = key.strip()
        matches = [hmac.compare_digest(key, known) for known in self._keys]
        if scheme.lower() != b"bearer" or not any(matches):
            raise ApiError(
                "the API key is missing or wrong: send 'Authorization: Bearer KEY'",
                status=401,
                kind="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return digest(key)


def error_response(error: ApiError) -> JsonResponse:
    """The response for a refused request."""
    return JsonResponse(error.body, error.status, error.headers)
