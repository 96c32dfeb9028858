"""ASGI application: routes, middleware and error responses."""

from __future__ import annotations

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
from urdir.model.serve.endpoints import Endpoints
from urdir.model.serve.errors import ApiError, api_error
from urdir.model.serve.guard import Guard, error_response
from urdir.model.serve.interface import AsyncService
from urdir.model.serve.limits import Limits
from urdir.model.serve.metrics import ServerMetrics
from urdir.model.serve.page import page
from urdir.model.serve.stream import log
from urdir.model.serve.tokens import detokenize, tokenize

#: Endpoints of other APIs that clients may try -> why they are missing.
_REFUSED = {
    "/api/": "has OpenAI's API only; use /v1/chat/completions",
    "/apply-template": "does not return rendered prompts; use /v1/chat/completions",
    "/completion": "has OpenAI's API only; use /v1/completions",
    "/embedding": "has no embeddings",
    "/infill": "has no infilling; use /v1/completions",
    "/props": "has no settings to change; /v1/models has the context",
    "/rerank": "has no reranking",
    "/slots": "has no slots; /metrics counts running and queued requests",
    "/v1/audio": "has no audio",
    "/v1/batches": "has no batches; send requests concurrently",
    "/v1/embeddings": "has no embeddings",
    "/v1/files": "stores no files",
    "/v1/fine_tuning": "has no training",
    "/v1/images": "has no image generation",
    "/v1/messages": "has OpenAI's API only; use /v1/chat/completions",
    "/v1/moderations": "has no moderation",
    "/v1/rerank": "has no reranking",
    "/v1/responses": "has no responses API; use /v1/chat/completions",
}


def make_app(
    service: AsyncService, access: Access, limits: Limits, metrics: ServerMetrics
) -> ASGIApp:
    """Build the application that answers with ``service``, restricted by ``access``;
    ``metrics`` count."""
    endpoints = Endpoints(service, limits, metrics)
    routes = [
        *([Route("/", page)] if access.page else []),
        Route("/health", endpoints.health),
        Route("/metrics", endpoints.metrics),
        Route("/v1/models", endpoints.models),
        Route("/v1/models/{name:path}", endpoints.model),
        Route("/v1/completions", endpoints.completions, methods=["POST"]),
        Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
        Route("/lora-adapters", endpoints.adapters, methods=["GET", "POST"]),
        Route("/tokenize", endpoints.text_job(tokenize), methods=["POST"]),
        Route("/detokenize", endpoints.text_job(detokenize), methods=["POST"]),
    ]
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
    app = Guard(app, access, limits, metrics.counts)
    if access.origins:
        app = CORSMiddleware(
            app,
            allow_origins=access.origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
    return app


async def _refused(request: Request, error: Exception) -> Response:
    """Respond to an error of an endpoint in OpenAI's format. Server errors are logged; so is every
    request, in one line, if access logging is on."""
    told = api_error(error)
    if told.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        is_lost = isinstance(error, DeviceLostError)
        log.error("%s: %s", request.url.path, error, exc_info=None if is_lost else error)
    return error_response(told)


async def _failed(request: Request, error: Exception) -> Response:
    """Respond to an unexpected error; uvicorn logs it."""
    return error_response(api_error(error))


async def _no_endpoint(request: Request, error: Exception) -> Response:
    """Respond to an unknown path or method."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    missing = next((why for prefix, why in _REFUSED.items() if path.startswith(prefix)), None)
    message = f"this server {missing}" if missing else f"no such endpoint: {request.method} {path}"
    return error_response(
        ApiError(
            message,
            status=error.status_code,
            kind="not_found_error",
            code="unsupported_endpoint" if missing else "unknown_endpoint",
            headers=error.headers,
        )
    )


async def _nobody_reads(request: Request, error: Exception) -> Response:
    """The client disconnected while sending its request."""
    return Response(status_code=HTTPStatus.BAD_REQUEST)
