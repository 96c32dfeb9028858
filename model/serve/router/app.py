"""The application of a router: what it answers itself, and what it passes to the models."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from urdir.model.serve.access import Access
from urdir.model.serve.app import guarded
from urdir.model.serve.bodies import Bodies
from urdir.model.serve.counts import Counts
from urdir.model.serve.errors import ApiError
from urdir.model.serve.interface import Json
from urdir.model.serve.json_response import JsonResponse, iso_time
from urdir.model.serve.limits import Limits
from urdir.model.serve.ollama_model import VERSION
from urdir.model.serve.page import no_page, page
from urdir.model.serve.protocols import ANSWERED, COUNTED, EMBEDDED, FIXED, JOBS
from urdir.model.serve.router.fleet import Fleet
from urdir.model.serve.router.forward import Forward, ForwardKept, own_headers
from urdir.model.serve.router.listing import model_json, running_json, tag_json
from urdir.model.serve.router.model import Model
from urdir.model.serve.router.model_field import model_field
from urdir.model.serve.router.router_metrics import CONTENT_TYPE, metrics_text
from urdir.model.serve.router.upstream import Headers
from urdir.model.serve.router.watch import model_events
from urdir.model.serve.stream import DATA, while_connected
from urdir.model.serve.version import own_version

_MOST_NAMED = 20  # models in an error
_MOST_NAME = 256  # characters of a name in an error


def make_router_app(fleet: Fleet, access: Access, limits: Limits, counts: Counts) -> ASGIApp:
    """Build the application that answers with the models of ``fleet``."""
    router = Router(fleet, access, limits, counts)
    forward = Forward(fleet, router.bodies, limits, router.named, router.headers)
    kept = ForwardKept(fleet, router.named)
    own = [
        Route("/", page if access.page else no_page),
        Route("/health", router.health),
        Route("/v1/health", router.health),
        Route("/version", own_version),
        Route("/metrics", router.metrics),
        Route("/models", router.models),
        Route("/v1/models", router.models),
        Route("/models/sse", router.watch),
        Route("/models/load", router.load, methods=["POST"]),
        Route("/models/unload", router.unload, methods=["POST"]),
        Route("/v1/models/{name:path}", router.one),
        Route("/api/tags", router.tags),
        Route("/api/ps", router.running),
        Route("/api/version", router.version),
        Route("/api/show", router.show, methods=["POST"]),
        Route("/v1/responses/{name}", kept, methods=["GET", "DELETE"]),
        Route("/v1/responses/{name}/input_items", kept),
        Route("/v1/responses/{name}/cancel", kept, methods=["POST"]),
    ]
    posts = [*ANSWERED, *COUNTED, *EMBEDDED, *JOBS, "/slots/{slot}"]
    passed = [
        *(Route(path, forward, methods=["POST"]) for path in posts),
        *(Route(path, forward, methods=["GET"]) for path in (*FIXED, "/slots", "/props")),
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

    async def watch(self, request: Request) -> Response:
        """GET /models/sse: changes of the models, as they come."""
        events = model_events(self.fleet, self.limits.pulse_seconds)
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(events, media_type=DATA.content_type.decode(), headers=headers)

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
        return JsonResponse({"models": [tag_json(each) | running_json(each) for each in there]})

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

    async def _model_of_body(self, request: Request) -> Model:
        """The model that a small body names."""
        async with self.bodies.body(request) as body:
            name = model_field(body, self.limits)
        return await self.named(name, request.url.path)
