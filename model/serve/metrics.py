"""What Prometheus reads at /metrics."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, Info
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from urdir.model.engine.requests.metrics import Metrics
from urdir.model.serve.interface import AsyncService

#: Seconds, a factor of two apart at most.
_FIRST_TOKEN = (0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60)
_NEXT_TOKEN = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2)

_GAUGES = {
    "running": "Requests that are being answered.",
    "queued": "Requests that wait.",
    "pages_used": "Pages of the cache that hold tokens of running requests.",
    "pages_total": "Pages of the cache.",
    "states_kept": "States of recurrent layers that are kept for prompts that begin alike.",
    "states_total": "States that there is room for.",
    "graph_bytes": "Device memory that recorded steps take, about.",
    "graphs_recorded": "Likely steps that are recorded ahead.",
    "graphs_wanted": "Likely steps that are recorded ahead while nobody asks, in the end.",
}
_COUNTERS = {
    "prefix_queries": "Prompt tokens that were looked up among known prefixes.",
    "prefix_hits": "Prompt tokens that a known prefix had.",
    "prompt_tokens": "Tokens of prompts.",
    "generated_tokens": "Tokens of answers.",
    "steps": "Steps of the engine.",
    "preemptions": "Requests that gave their pages up and were computed again.",
    "busy_seconds": "Seconds in which the device ran steps.",
    "idle_seconds": "Seconds between steps while requests were open.",
}


class ServerMetrics:
    """Histograms that the server fills, and the figures of its service."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, service: AsyncService) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_ServiceCollector(service))
        self.first_token = Histogram(
            "urdir_time_to_first_token_seconds",
            "From a request that is read to its first token.",
            buckets=_FIRST_TOKEN,
            registry=self._registry,
        )
        self.next_token = Histogram(
            "urdir_inter_token_seconds",
            "Between tokens of an answer.",
            buckets=_NEXT_TOKEN,
            registry=self._registry,
        )
        self._responses = Counter(
            "urdir_http_responses", "Responses.", ["route", "status"], registry=self._registry
        )

    def count_response(self, route: str, status: int) -> None:
        """A response has begun."""
        self._responses.labels(route, str(status)).inc()

    def say_whose(self, replica: str) -> None:
        """Add which of several replicas these are of."""
        Info("urdir_replica", "Whose figures these are.", registry=self._registry).info(
            {"id": replica}
        )

    def samples(self) -> Iterator[Sample]:
        """Each of them: its name, labels and value."""
        for metric in self._registry.collect():
            yield from metric.samples

    def text(self) -> bytes:
        """All of it in Prometheus's format."""
        return generate_latest(self._registry)


class TokenClock:
    """Notes when the tokens of one answer come."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self._last = time.perf_counter()
        self._is_first = True

    def came(self, tokens: int) -> None:
        """So many tokens are there."""
        if not tokens:
            return
        now = time.perf_counter()
        pause, self._last = now - self._last, now
        if self._is_first:
            self._is_first = False
            self._metrics.first_token.observe(pause)
            return
        for _ in range(tokens):
            self._metrics.next_token.observe(pause / tokens)


class _ServiceCollector(Collector):
    """Asks the service when Prometheus asks."""

    def __init__(self, service: AsyncService) -> None:
        self._service = service

    def collect(self) -> Iterable[Metric]:
        now: Metrics = self._service.metrics()
        for name, help_text in _GAUGES.items():
            yield GaugeMetricFamily(f"urdir_{name}", help_text, getattr(now, name))
        for name, help_text in _COUNTERS.items():
            yield CounterMetricFamily(f"urdir_{name}", help_text, getattr(now, name))
