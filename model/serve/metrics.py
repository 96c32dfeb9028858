"""Prometheus metrics at /metrics."""

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

#: Bucket bounds in seconds, at most a factor of two apart.
_FIRST_TOKEN = (0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60)
_NEXT_TOKEN = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2)

_GAUGES = {
    "running": "Running requests.",
    "queued": "Queued requests.",
    "pages_used": "KV cache pages in use by running requests.",
    "pages_total": "KV cache pages in all.",
    "states_kept": "Cached recurrent states for shared prefixes.",
    "states_total": "Capacity for cached recurrent states.",
    "graph_bytes": "Approximate device memory of recorded graphs.",
    "graphs_recorded": "Expected steps whose graphs are recorded.",
    "graphs_wanted": "Expected steps whose graphs will be recorded while idle.",
}
_COUNTERS = {
    "prefix_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_hits": "Prompt tokens found in the prefix cache.",
    "prompt_tokens": "Prompt tokens.",
    "generated_tokens": "Generated tokens.",
    "steps": "Engine steps.",
    "preemptions": "Requests preempted and recomputed.",
    "busy_seconds": "Seconds in which the device ran steps.",
    "idle_seconds": "Seconds between steps while requests were open.",
}
#: Of drafts, by their place in a step, from 1.
_BY_PLACE = {
    "drafted_tokens": "Draft tokens verified.",
    "accepted_tokens": "Draft tokens accepted.",
}


class ServerMetrics:
    """Histograms of the server, and the metrics of its service."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, service: AsyncService) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_ServiceCollector(service))
        self.first_token = Histogram(
            "urdir_time_to_first_token_seconds",
            "From receiving a request to its first token.",
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
        """Count a response."""
        self._responses.labels(route, str(status)).inc()

    def say_whose(self, replica: str) -> None:
        """Add a label for this replica."""
        Info("urdir_replica", "The replica of these metrics.", registry=self._registry).info(
            {"id": replica}
        )

    def samples(self) -> Iterator[Sample]:
        """All samples: name, labels and value."""
        for metric in self._registry.collect():
            yield from metric.samples

    def text(self) -> bytes:
        """All metrics in Prometheus's text format."""
        return generate_latest(self._registry)


class TokenClock:
    """Measures the times between the tokens of one answer."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self._last = time.perf_counter()
        self._is_first = True

    def came(self, tokens: int) -> None:
        """Record ``tokens`` new tokens."""
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
    """Reads the service's metrics when Prometheus scrapes."""

    def __init__(self, service: AsyncService) -> None:
        self._service = service

    def collect(self) -> Iterable[Metric]:
        now: Metrics = self._service.metrics()
        for name, help_text in _GAUGES.items():
            yield GaugeMetricFamily(f"urdir_{name}", help_text, getattr(now, name))
        for name, help_text in _COUNTERS.items():
            yield CounterMetricFamily(f"urdir_{name}", help_text, getattr(now, name))
        for name, help_text in _BY_PLACE.items():
            counter = CounterMetricFamily(f"urdir_{name}", help_text, labels=["place"])
            for place, count in enumerate(getattr(now, name), 1):
                counter.add_metric([str(place)], count)
            yield counter
