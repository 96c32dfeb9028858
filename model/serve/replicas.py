"""Deployment on Ray Serve: replicas on the GPUs of one or many hosts (extra `ray`).

Ray Serve listens, routes requests to replicas, scales them, and replaces those whose device is
lost. A replica is an engine with the whole application, independent of the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.metrics import Gauge

from urdir.model.engine.requests.metrics import Metrics
from urdir.model.serve.access import Access
from urdir.model.serve.app import make_app
from urdir.model.serve.interface import AsyncService
from urdir.model.serve.limits import Limits
from urdir.model.serve.metrics import ServerMetrics

if TYPE_CHECKING:
    from ray.serve import Application
    from starlette.types import ASGIApp

#: Health check interval; Ray replaces a replica after three failures.
_CHECK_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Scale:
    """Autoscaling: ``least`` to ``most`` replicas, to keep ``busy`` requests open in each; ``gpus``
    per replica, 0 on the emulator. ``router`` is the import path of a request router of Ray; None
    is Ray's default, which takes the less busy of two.
    """

    least: int
    most: int
    busy: int
    gpus: int
    router: str | None = None


def application(
    open_service: Callable[[], AsyncService], access: Access, limits: Limits, scale: Scale
) -> Application:
    """The Ray Serve application. Every replica calls ``open_service``, which must be picklable, in
    its own process, which sees only its own GPUs.
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
    """An engine with its application. Ray calls all methods in one event loop, except the
    constructor."""

    def __init__(
        self, open_service: Callable[[], AsyncService], access: Access, limits: Limits
    ) -> None:
        self._service = open_service()
        self._metrics = ServerMetrics()
        self._metrics.say_whose(serve.get_replica_context().replica_id.unique_id)
        self._figures = _Figures(self._metrics)
        self._access, self._limits = access, limits
        self._background: set[asyncio.Task[None]] = set()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """The ASGI application, for Ray."""
        return make_app(
            self._service, self._access, self._limits, self._metrics, tasks=self._background
        )

    async def check_health(self) -> None:
        """Raise the error of every request once the device is lost: Ray then replaces the replica.

        Also exports the replica's metrics.
        """
        if (lost := self._service.lost) is not None:
            raise lost
        self._figures.export(await self._service.metrics())

    async def __del__(self) -> None:
        """Finish responses in the background when Ray, which has waited for open requests, releases
        the replica; Ray's time limit ends both."""
        if not hasattr(self, "_service"):
            return
        while self._background:
            await asyncio.wait(self._background)
        await self._service.close()


class _Figures:
    """The metrics of /metrics exported to Ray, labelled by replica."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self._gauges: dict[str, Gauge] = {}

    def export(self, now: Metrics) -> None:
        """Export the current values."""
        for sample in self._metrics.samples(now):
            if sample.name not in self._gauges:
                self._gauges[sample.name] = Gauge(sample.name, tag_keys=tuple(sample.labels))
            self._gauges[sample.name].set(sample.value, tags=sample.labels)
