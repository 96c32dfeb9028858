"""Prometheus metrics at /metrics."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from urdir.model.engine.requests.metrics import Metrics
from urdir.model.serve.counts import Counts

_GAUGES = {
    "running": "Running requests.",
    "sequences": "Requests that may run at once.",
    "queued": "Queued requests.",
    "pages_used": "KV cache pages in use by running requests.",
    "pages_total": "KV cache pages in all.",
    "states_kept": "Cached recurrent states for shared prefixes.",
    "states_total": "Capacity for cached recurrent states.",
    "graph_bytes": "Approximate device memory of recorded graphs and of kernels.",
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
    "begun": "Requests begun, which left the queue.",
    "queue_seconds": "Seconds that these waited in the queue.",
    "busy_seconds": "Seconds in which the device ran steps.",
    "idle_seconds": "Seconds between steps while requests were open.",
}
#: Of drafts, by their place in a step, from 1.
_BY_PLACE = {
    "drafted_tokens": "Draft tokens verified.",
    "accepted_tokens": "Draft tokens accepted.",
}


class ServerMetrics:
    """Metrics of the server, all of its processes together, and of its service."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, counts: Counts | None = None) -> None:
        self.counts = counts or Counts()
        self._replica = ""
        self._model = ""

    def say_model(self, name: str) -> None:
        """Add the name of the model."""
        self._model = name

    def say_whose(self, replica: str) -> None:
        """Add a label for this replica."""
        self._replica = replica

    def collect(self, now: Metrics) -> Iterator[Metric]:
        """All metrics, with those of the service as they are ``now``."""
        counts = self.counts
        yield from _service_metrics(now)
        for name, help_text, times in (
            (
                "urdir_time_to_first_token_seconds",
                "From receiving a request to its first token.",
                counts.first_token,
            ),
            (
                "urdir_inter_token_seconds",
                "Between tokens of an answer.",
                counts.next_token,
            ),
            (
                "urdir_request_seconds",
                "From receiving a request to the end of its answer.",
                counts.whole,
            ),
        ):
            buckets, total = times.buckets()
            yield HistogramMetricFamily(name, help_text, buckets=buckets, sum_value=total)
        yield GaugeMetricFamily(
            "urdir_background",
            "Responses being written without a connection.",
            counts.open("background"),
        )
        responses = CounterMetricFamily(
            "urdir_http_responses", "Responses.", labels=["route", "status"]
        )
        for route, status, number in counts.responses():
            responses.add_metric([route, str(status)], number)
        yield responses
        endings = CounterMetricFamily("urdir_answers", "Answers ended.", labels=["reason"])
        for reason, number in counts.endings():
            endings.add_metric([reason], number)
        yield endings
        if self._model:
            model = InfoMetricFamily("urdir_model", "The model that answers.")
            model.add_metric([], {"name": self._model})
            yield model
        if self._replica:
            info = InfoMetricFamily("urdir_replica", "The replica of these metrics.")
            info.add_metric([], {"id": self._replica})
            yield info

    def samples(self, now: Metrics) -> Iterator[Sample]:
        """All samples: name, labels and value."""
        for metric in self.collect(now):
            yield from metric.samples

    def text(self, now: Metrics) -> bytes:
        """All metrics in Prometheus's text format."""
        registry = CollectorRegistry()
        registry.register(Collected([*self.collect(now)]))
        return generate_latest(registry)


class TokenClock:
    """Measures the times of one answer: between its tokens, and of all of it."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._counts = metrics.counts
        self._begun = self._last = time.perf_counter()
        self._is_first = True

    def came(self, tokens: int) -> None:
        """Record ``tokens`` new tokens."""
        if not tokens:
            return
        now = time.perf_counter()
        pause, self._last = now - self._last, now
        if self._is_first:
            self._is_first = False
            self._counts.first_token.observe(pause)
            self._counts.next_token.observe(0.0, tokens - 1)
        else:
            self._counts.next_token.observe(pause / tokens, tokens)

    def ended(self, reason: str) -> None:
        """Record the end of the answer, by one of `ENDINGS`."""
        self._counts.count_ending(reason)
        self._counts.whole.observe(time.perf_counter() - self._begun)


class Collected(Collector):
    """Metrics that were collected."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        """These metrics."""
        return self._metrics


def _service_metrics(now: Metrics) -> Iterator[Metric]:
    for name, help_text in _GAUGES.items():
        yield GaugeMetricFamily(f"urdir_{name}", help_text, getattr(now, name))
    for name, help_text in _COUNTERS.items():
        yield CounterMetricFamily(f"urdir_{name}", help_text, getattr(now, name))
    for name, help_text in _BY_PLACE.items():
        counter = CounterMetricFamily(f"urdir_{name}", help_text, labels=["place"])
        for place, count in enumerate(getattr(now, name), 1):
            counter.add_metric([str(place)], count)
        yield counter
