"""The application of a router: what it answers itself, and what it passes to the models."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from http import HTTPStatus
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from urdir.model.serve.access import Access
from urdir.model.serve.app import guarded
from urdir.model.serve.bodies import Bodies
from urdir.model.serve.counts import Counts
from urdir.model.serve.errors import ApiError, error_body
from urdir.model.serve.guard import REQUEST_ID
from urdir.model.serve.interface import Json
from urdir.model.serve.json_response import JsonResponse, encode_json, iso_time
from urdir.model.serve.limits import Limits
from urdir.model.serve.ollama_model import VERSION
from urdir.model.serve.page import page
from urdir.model.serve.protocols import ANSWERED, EMBEDDED, FIXED, JOBS
from urdir.model.serve.router.fleet import AnyWorker, Fleet, Model
from urdir.model.serve.router.model_field import model_field
from urdir.model.serve.router.router_metrics import CONTENT_TYPE, metrics_text
from urdir.model.serve.router.upstream import GoneError, Headers, Reply, ask
from urdir.model.serve.stream import log, while_connected

#: Headers of a connection, or that the other side writes itself.
_NOT_PASSED = frozenset(
    b"connection keep-alive te trailer transfer-encoding upgrade proxy-authorization host expect "
    b"content-length date server x-request-id request-id accept-encoding".split()
)
_REPLY_KEEPS = frozenset({b"content-length"})
_MOST_NAMED = 20  # models in an error
_MOST_NAME = 256  # characters of a name in an error


def make_router_app(fleet: Fleet, access: Access, limits: Limits, counts: Counts) -> ASGIApp:
    """Build the application that answers with the models of ``fleet``."""
    router = Router(fleet, access, limits, counts)
    forward = Forward(router)
    own = [
        *([Route("/", page)] if access.page else []),
        Route("/health", router.health),
        Route("/v1/health", router.health),
        Route("/metrics", router.metrics),
        Route("/models", router.models),
        Route("/v1/models", router.models),
        Route("/models/load", router.load, methods=["POST"]),
        Route("/models/unload", router.unload, methods=["POST"]),
        Route("/v1/models/{name:path}", router.one),
        Route("/api/tags", router.tags),
        Route("/api/ps", router.running),
        Route("/api/version", router.version),
        Route("/api/show", router.show, methods=["POST"]),
        Route("/v1/responses/{name}", router.response, methods=["GET", "DELETE"]),
        Route("/v1/responses/{name}/cancel", router.response, methods=["POST"]),
    ]
    posts = [*ANSWERED, *EMBEDDED, *JOBS, "/slots/{slot}"]
    passed = [
        *(Route(path, forward, methods=["POST"]) for path in posts),
        *(Route(path, forward, methods=["GET"]) for path in (*FIXED, "/slots")),
        Route("/lora-adapters", forward, methods=["GET", "POST"]),
    ]
    return guarded([*own, *passed], access, limits, counts)


class Router:
    """What a router answers itself: which models there are, and where they stand."""

    def __init__(self, fleet: Fleet, access: Access, limits: Limits, counts: Counts) -> None:
        self.fleet = fleet
        self.bodies = Bodies(limits, counts)
        self.limits = limits
        self._counts = counts
        #: Of the router's own requests.
        self.headers: Headers = own_headers(access)

    # ---- which model ----

    async def named(self, name: str | None, path: str = "") -> Model:
        """The model of a name, which may be in new files, or in files that are gone. Raises
        ApiError."""
        models = self.fleet.models
        if len(models) == 1:
            (only,) = models.values()
            if not name or only.spec.any_name:
                return only
        if not name:
            raise ApiError(
                f"this server has several models: name one as 'model': {self._there()}",
                param="model",
                code="model_required",
            )
        wanted = [name, *([name.removesuffix(":latest")] if path.startswith("/api/") else [])]
        for is_new in (False, True):
            if is_new:
                await self.fleet.refresh()
            found = next((model for each in wanted if (model := self.fleet.get(each))), None)
            if found is not None and (is_new or found.status != "unloaded"):
                return found
        shown = name if len(name) <= _MOST_NAME else name[:_MOST_NAME] + "..."
        raise ApiError(
            f"there is no model {shown!r}; this server has {self._there()}",
            status=404,
            kind="not_found_error",
            param="model",
            code="model_not_found",
        )

    def _there(self) -> str:
        names = [*self.fleet.models]
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        return (", ".join(map(repr, names[:_MOST_NAMED])) or "none") + more

    # ---- endpoints ----

    async def health(self, request: Request) -> Response:
        """GET /health: the router answers, whatever its models do."""
        counted = {"loaded": 0, "loading": 0, "unloading": 0, "unloaded": 0}
        for model in self.fleet.models.values():
            counted[model.status] += 1
        return JsonResponse({"status": "ok", "models": counted})

    async def metrics(self, request: Request) -> Response:
        """GET /metrics: of all models, with their names as the label "model"."""
        text = await metrics_text(self.fleet, self._counts, self.headers)
        return Response(text, media_type=CONTENT_TYPE)

    async def models(self, request: Request) -> Response:
        """GET /models and /v1/models: all models, and where they stand."""
        await self.fleet.refresh()
        models = self.fleet.models.values()
        data = [model_json(model, name) for model in models for name in model.spec.names]
        ends = {name: data[at]["id"] for name, at in (("first_id", 0), ("last_id", -1)) if data}
        return JsonResponse({"object": "list", "data": data, **ends, "has_more": False})

    async def one(self, request: Request) -> Response:
        """GET /v1/models/NAME."""
        name = request.path_params["name"]
        return JsonResponse(model_json(await self.named(name), name))

    async def load(self, request: Request) -> Response:
        """POST /models/load: begin to load a model."""
        model = await self._model_of_body(request)
        if model.status != "loaded" or model.leaves:
            self.fleet.load(model)
        return JsonResponse({"success": True})

    async def unload(self, request: Request) -> Response:
        """POST /models/unload: unload a model once it has no open request, and wait for that."""
        model = await self._model_of_body(request)
        await while_connected(request.receive, self.fleet.unload(model))
        return JsonResponse({"success": True})

    async def tags(self, request: Request) -> Response:
        """GET /api/tags."""
        await self.fleet.refresh()
        return JsonResponse({"models": [tag_json(each) for each in self.fleet.models.values()]})

    async def running(self, request: Request) -> Response:
        """GET /api/ps: the models that are loaded."""
        there = [each for each in self.fleet.models.values() if each.status == "loaded"]
        return JsonResponse({"models": [tag_json(each) | _running(each) for each in there]})

    async def version(self, request: Request) -> Response:
        """GET /api/version."""
        return JsonResponse({"version": VERSION})

    async def show(self, request: Request) -> Response:
        """POST /api/show: what is known of a model, which is not loaded for that."""
        model = await self._model_of_body(request)
        unknown: Json = {"modelfile": "", "parameters": "", "template": "", "license": ""}
        unknown |= {"details": tag_json(model)["details"], "model_info": {}}
        unknown |= {"capabilities": ["completion"], "modified_at": iso_time(model.spec.modified)}
        return JsonResponse(model.info.get("show", unknown))

    async def response(self, request: Request) -> Response:
        """GET and DELETE /v1/responses/NAME, and its cancel: of the loaded model that keeps it."""
        name = request.query_params.get("model")
        asked = [await self.named(name)] if name else [*self.fleet.models.values()]
        method, target = request.method, target_of(request.scope)
        for model in asked:
            if model.status != "loaded":
                continue
            with suppress(GoneError):
                async with (
                    self.fleet.use(model, loads=False) as worker,
                    ask(worker.path, method, target, passed(request.scope)) as reply,
                ):
                    if reply.status != HTTPStatus.NOT_FOUND:
                        kind = dict(reply.headers).get(b"content-type", b"").decode()
                        return Response(await reply.whole(), reply.status, media_type=kind)
        raise ApiError(
            f"there is no response {request.path_params['name']!r}",
            status=404,
            kind="not_found_error",
            code="response_not_found",
        )

    async def _model_of_body(self, request: Request) -> Model:
        """The model that a small body names."""
        async with self.bodies.body(request) as body:
            name = model_field(body, self.limits)
        return await self.named(name, request.url.path)


class Forward:
    """An ASGI application that passes requests to the model they name, and its answers back."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. Raises ApiError before the response begins."""
        request = Request(scope, receive)
        is_post = request.method == "POST"
        async with AsyncExitStack() as held:
            body = bytearray()
            if is_post:
                body = await held.enter_async_context(self._router.bodies.body(request))
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
        async with self._router.fleet.use(model, loads) as worker:
            try:
                async with ask(
                    worker.path,
                    "GET" if request.method == "HEAD" else request.method,
                    target_of(request.scope),
                    passed(request.scope),
                    body,
                ) as reply:
                    await held.aclose()
                    await self._pass(reply, request, send)
            except GoneError:
                raise await _gone(model, worker) from None

    async def _choose(self, request: Request, body: bytearray) -> tuple[Model, bool | None]:
        """The model of a request, and whether to load it: as "autoload" of the query says. Facts
        that a GET asks for are of models that are loaded."""
        path, query = request.url.path, request.query_params
        name = query.get("model")
        if request.method != "POST":
            return await self._router.named(name, path), False
        model = await self._router.named(model_field(body, self._router.limits) or name, path)
        return model, {"true": True, "false": False}.get(query.get("autoload", ""))

    async def _pass(self, reply: Reply, request: Request, send: Send) -> None:
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
            kind = dict(headers).get(b"content-type", b"")
            last = _last_event(kind, request.url.path)
            if last is None:  # the length is known: the connection ends before
                return
            await send({"type": "http.response.body", "body": last, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


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


def target_of(scope: Scope) -> bytes:
    """The path and query of a request as they came."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    query: bytes = scope["query_string"]
    return raw + b"?" + query if query else raw


def passed(scope: Scope) -> Headers:
    """The headers of a request for its model."""
    named = [(name, value) for name, value in scope["headers"] if name not in _NOT_PASSED]
    return [*named, (b"x-request-id", scope[REQUEST_ID])]


def own_headers(access: Access) -> Headers:
    """Headers of the router's own requests to models, which ask for the same keys."""
    if not access.api_keys:
        return []
    return [(b"authorization", b"Bearer " + access.api_keys[0].encode())]


def status_json(model: Model) -> Json:
    """Where a model stands, as llama-server has it; "cause" says why it failed."""
    value = "loaded" if model.status == "unloading" else model.status
    if value == "unloaded" and model.loading is not None:  # others are loaded before
        value = "loading"
    status: Json = {"value": value}
    if model.cause is not None and value == "unloaded":
        status |= {"failed": True, "cause": model.cause}
    return status


def model_json(model: Model, name: str) -> Json:
    """An entry of /v1/models, with what was known of the model when it was loaded last."""
    spec = model.spec
    known = model.info.get("model", {})
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": spec.name,
        "created_at": iso_time(spec.modified),
        "created": int(spec.modified),
        "owned_by": "urdir",
        **{key: known[key] for key in ("max_model_len", "meta") if key in known},
        "status": status_json(model),
    }


_NO_DETAILS = {
    "parent_model": "",
    "format": "",
    "family": "",
    "families": [],
    "parameter_size": "",
    "quantization_level": "",
}


def tag_json(model: Model) -> Json:
    """An entry of ollama's /api/tags."""
    known: Mapping[str, Any] = model.info.get("tag", {})
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": iso_time(model.spec.modified),
        "size": known.get("size", model.spec.nbytes),
        "digest": "",
        "details": known.get("details", _NO_DETAILS),
    }


def _running(model: Model) -> Json:
    limit = model.spec.idle_seconds
    known: Mapping[str, Any] = model.info.get("model", {})
    return {
        "expires_at": "9999-12-31T23:59:59Z" if limit is None else _end_of(model, limit),
        "size_vram": model.info.get("tag", {}).get("size", model.spec.nbytes),
        "context_length": known.get("max_model_len", 0),
    }


def _end_of(model: Model, limit: float) -> str:
    """When an idle model is unloaded."""
    since = 0.0 if model.open else time.monotonic() - model.used
    return iso_time(time.time() + max(0.0, limit - since))
