"""The server on Ray: replicas of it on the GPUs of one host or of many (extra `ray`).

Ray Serve listens, spreads requests over the replicas, has more or fewer of them, and replaces those
whose device is lost. A replica is an engine with the whole application, which knows of no other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.metrics import Gauge

from urdir.model.serve.app import make_app
from urdir.model.serve.guard import Access
from urdir.model.serve.interface import AsyncService
from urdir.model.serve.limits import Limits
from urdir.model.serve.metrics import ServerMetrics

if TYPE_CHECKING:
    from ray.serve import Application
    from starlette.types import ASGIApp

#: Between two checks of a replica; Ray replaces it after the third that fails.
_CHECK_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Scale:
    """How many replicas, and what each has: ``least`` to ``most`` of them, as many as keep
    ``busy`` requests open in each; ``gpus`` each, 0 on the emulator. ``router`` is the import path
    of one of Ray's request routers, None: Ray's default, which takes the less busy of two.
    """

    least: int
    most: int
    busy: int
    gpus: int
    router: str | None = None


def application(
    open_service: Callable[[], AsyncService], access: Access, limits: Limits, scale: Scale
) -> Application:
    """What `ray.serve.run` runs. Every replica calls ``open_service``, in a process of its own that
    sees only its own GPUs; it must be picklable.
    """
    routing = {}
    if scale.router is not None:
        routing["request_router_config"] = RequestRouterConfig(request_router_class=scale.router)
    deployment = serve.deployment(
        Replica,
        autoscaling_config=AutoscalingConfig(
            min_replicas=scale.least, max_replicas=scale.most, target_ongoing_requests=scale.busy
        ),
        ray_actor_options={"num_gpus": scale.gpus},
        max_ongoing_requests=limits.open_requests,
        health_check_period_s=_CHECK_SECONDS,
        **routing,
    )
    return deployment.bind(open_service, access, limits)


@serve.ingress()
class Replica:
    """An engine and the application that answers with it. Ray calls all of this in one event loop,
    but for the constructor."""

    def __init__(
        self, open_service: Callable[[], AsyncService], access: Access, limits: Limits
    ) -> None:
        self._service = open_service()
        self._metrics = ServerMetrics(self._service)
        self._metrics.say_whose(serve.get_replica_context().replica_id.unique_id)
        self._figures = _Figures(self._metrics)
        self._access, self._limits = access, limits

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """What answers HTTP requests."""
        return make_app(self._service, self._access, self._limits, self._metrics)

    async def check_health(self) -> None:
        """Raise what every request is told once the device is lost: Ray replaces the replica then.

        The replica's figures are handed on at the same time.
        """
        self._figures.hand_on()
        if (lost := self._service.lost) is not None:
            raise lost

    async def __del__(self) -> None:
        """Ray lets the replica go: open requests are answered, or their time is up."""
        if hasattr(self, "_service"):
            await self._service.close()


class _Figures:
    """The figures of /metrics among Ray's own, which have the replica as a label."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self._gauges: dict[str, Gauge] = {}

    def hand_on(self) -> None:
        """All of them, as they stand."""
        for sample in self._metrics.samples():
            if sample.name not in self._gauges:
                self._gauges[sample.name] = Gauge(sample.name, tag_keys=tuple(sample.labels))
            self._gauges[sample.name].set(sample.value, tags=sample.labels)
