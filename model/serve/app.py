"""ASGI application: routes, middleware and error responses."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from http import HTTPStatus

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from urdir.driver.errors import DriverError
from urdir.model.engine.requests.device_lost import DeviceLostError
from urdir.model.errors import ModelError
from urdir.model.serve.access import Access
from urdir.model.serve.background import Background
from urdir.model.serve.counts import Counts
from urdir.model.serve.endpoints import Endpoints
from urdir.model.serve.errors import ApiError, api_error, text_field
from urdir.model.serve.guard import REQUEST_ID, Guard, error_response
from urdir.model.serve.interface import AsyncService
from urdir.model.serve.kept import Keeping, KeepingHere, Kept, Store
from urdir.model.serve.limits import Limits
from urdir.model.serve.metrics import ServerMetrics
from urdir.model.serve.page import no_page, page
from urdir.model.serve.protocols import ANSWERED, COUNTED, EMBEDDED, FIXED, JOBS
from urdir.model.serve.stream import log
from urdir.model.serve.version import own_version

#: Origins of pages of this machine.
_LOCAL_PAGE = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"
#: Endpoints of other APIs that clients may try -> why they are missing.
_REFUSED = {
    "/api/": "takes its models from its flags",
    "/embedding": "has embeddings at /v1/embeddings",
    "/v1/audio": "has no audio",
    "/v1/batches": "has no batches; use urdir batch, or send requests concurrently",
    "/v1/files": "stores no files",
    "/v1/fine_tuning": "has no training",
    "/v1/images": "has no image generation",
    "/v1/moderations": "has no moderation",
}


def make_app(
    service: AsyncService,
    access: Access,
    limits: Limits,
    metrics: ServerMetrics,
    keeping: Keeping | None = None,
    tasks: set[asyncio.Task[None]] | None = None,
) -> ASGIApp:
    """Build the application that answers with ``service``, restricted by ``access``;
    ``metrics`` count. ``keeping`` is what all front ends keep together, by default its own.
    ``tasks`` gets those that write responses without a connection."""
    kept = Kept(keeping or KeepingHere(Store(limits.kept_bytes, limits.kept_seconds)))
    background = Background(kept, metrics.counts, limits, set() if tasks is None else tasks)
    endpoints = Endpoints(service, limits, metrics, kept, background)
    posts = {path: endpoints.answered(read) for path, read in ANSWERED.items()}
    posts |= {path: endpoints.answered(read, counts=True) for path, read in COUNTED.items()}
    posts |= {path: endpoints.embedded(read) for path, read in EMBEDDED.items()}
    posts |= {path: endpoints.text_job(job) for path, job in JOBS.items()}
    routes = [  # compared with a path in this order: those of answers come first
        *(Route(path, endpoint, methods=["POST"]) for path, endpoint in posts.items()),
        Route("/", page if access.page else no_page),
        Route("/health", endpoints.health),
        Route("/v1/health", endpoints.health),
        Route("/version", own_version),
        Route("/metrics", endpoints.metrics),
        Route("/slots", endpoints.slots),
        Route("/props", endpoints.props),
        Route("/models", endpoints.models),
        Route("/v1/models", endpoints.models),
        Route("/v1/models/{name:path}", endpoints.model),
        Route("/v1/responses/{name}", background.response, methods=["GET", "DELETE"]),
        Route("/v1/responses/{name}/input_items", background.items),
        Route("/v1/responses/{name}/cancel", background.cancel, methods=["POST"]),
        Route("/slots/{slot}", endpoints.slot, methods=["POST"]),
        Route("/lora-adapters", endpoints.adapters, methods=["GET", "POST"]),
        *(Route(path, endpoints.fixed(make)) for path, make in FIXED.items()),
    ]
    return guarded(routes, access, limits, metrics.counts)


def guarded(routes: Sequence[Route], access: Access, limits: Limits, counts: Counts) -> ASGIApp:
    """An application of ``routes``, restricted by ``access``, with errors in the shape of each
    protocol."""
    app: ASGIApp = Starlette(
        routes=routes,
        exception_handlers={
            HTTPException: _no_endpoint,
            ClientDisconnect: _nobody_reads,
            ApiError: _refused,
            ModelError: _refused,
            DriverError: _refused,
            Exception: _failed,
        },
    )
    app = Guard(app, access, limits, counts)
    if access.origins:
        app = CORSMiddleware(
            app,
            allow_origins=access.origins,
            allow_origin_regex=_LOCAL_PAGE if "localhost" in access.origins else None,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    return app


async def _refused(request: Request, error: Exception) -> Response:
    """Respond to an error of an endpoint in its protocol's format. Failures of the server are
    logged, refusals (ApiError: the model is being read, the server is stopping) are not; so is
    every request, in one line, if access logging is on."""
    told = api_error(error, text_field(request.url.path))
    if told.status >= HTTPStatus.INTERNAL_SERVER_ERROR and not isinstance(error, ApiError):
        is_lost = isinstance(error, DeviceLostError)
        log.error(
            "%s (%s): %s",
            request.url.path,
            request.scope[REQUEST_ID].decode(),
            error,
            exc_info=None if is_lost else error,
        )
    return error_response(request.url.path, told)


async def _failed(request: Request, error: Exception) -> Response:
    """Respond to an unexpected error; uvicorn logs it."""
    return error_response(request.url.path, api_error(error))


async def _no_endpoint(request: Request, error: Exception) -> Response:
    """Respond to an unknown path or method."""
    assert isinstance(error, HTTPException)
    path, headers = request.url.path, error.headers or {}
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        taken = sorted(set(headers["Allow"].split(", ")) - {"HEAD"})
        told = ApiError(
            f"{path} takes no {request.method}, but {' and '.join(taken)}",
            status=error.status_code,
            code="method_not_supported",
            headers=headers,
        )
        return error_response(path, told)
    missing = next((why for prefix, why in _REFUSED.items() if path.startswith(prefix)), None)
    message = f"this server {missing}" if missing else f"no such endpoint: {request.method} {path}"
    return error_response(
        path,
        ApiError(
            message,
            status=error.status_code,
            kind="not_found_error",
            code="unsupported_endpoint" if missing else "unknown_endpoint",
            headers=headers,
        ),
    )


async def _nobody_reads(request: Request, error: Exception) -> Response:
    """The client disconnected while sending its request."""
    return Response(status_code=HTTPStatus.BAD_REQUEST)
