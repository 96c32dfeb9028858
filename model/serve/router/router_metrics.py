"""Metrics of a router: those of every loaded model with a label, and its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from urdir.model.serve.counts import Counts
from urdir.model.serve.metrics import Collected
from urdir.model.serve.router.fleet import Fleet
from urdir.model.serve.router.model import AnyWorker
from urdir.model.serve.router.upstream import GoneError, Headers, ask

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = 5.0  # for a model to tell its metrics


async def metrics_text(fleet: Fleet, counts: Counts, headers: Headers) -> bytes:
    """All metrics in Prometheus's text format. A model that does not answer is left out."""
    loaded = fleet.room.with_status("loaded")
    workers = [model.worker for model in loaded if model.worker is not None]
    texts = await asyncio.gather(*(_of_worker(worker, headers) for worker in workers))
    families: dict[str, Metric] = {}
    for model, text in zip(loaded, texts, strict=True):
        for family in text_string_to_metric_families(text):
            named = families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            named.samples += [
                sample._replace(labels={"model": model.name, **sample.labels})
                for sample in family.samples
            ]
    registry = CollectorRegistry()
    registry.register(Collected([*families.values(), *_own(fleet, counts)]))
    return generate_latest(registry)


async def _of_worker(worker: AnyWorker, headers: Headers) -> str:
    """The metrics of a model's server; asking for them does not count as a request."""
    try:
        async with (
            asyncio.timeout(_SECONDS),
            ask(worker.path, "GET", b"/metrics", headers) as reply,
        ):
            return (await reply.whole()).decode()
    except (GoneError, TimeoutError):
        return ""


def _own(fleet: Fleet, counts: Counts) -> Iterator[Metric]:
    """The router's own."""
    models = fleet.models.values()
    loaded = GaugeMetricFamily("urdir_model_loaded", "Whether it is loaded.", labels=["model"])
    opened = GaugeMetricFamily("urdir_model_open", "Open requests.", labels=["model"])
    loads = CounterMetricFamily("urdir_model_loads", "Loads.", labels=["model"])
    failures = CounterMetricFamily(
        "urdir_model_load_failures", "Loads that failed.", labels=["model"]
    )
    for model in models:
        loaded.add_metric([model.name], model.status == "loaded")
        opened.add_metric([model.name], model.open)
        loads.add_metric([model.name], model.loads)
        failures.add_metric([model.name], model.failures)
    yield from (loaded, opened, loads, failures)
    yield CounterMetricFamily(
        "urdir_router_evictions", "Models unloaded to make room.", value=fleet.room.evictions
    )
    yield GaugeMetricFamily(
        "urdir_router_waiting", "Requests that wait for a model to be loaded.", value=fleet.waiting
    )
    responses = CounterMetricFamily(
        "urdir_router_http_responses", "Responses of the router.", labels=["route", "status"]
    )
    for route, status, number in counts.responses():
        responses.add_metric([route, str(status)], number)
    yield responses
