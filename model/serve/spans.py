"""OpenTelemetry spans of answers (extra `otel`): a span for each request, with its phases.

Attributes follow the semantic conventions of generative AI (1.37). A request that brings W3C's
`traceparent` goes on with its trace. Nothing is imported before `begin`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from urdir.model.errors import UnsupportedError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Tracer

    from urdir.model.serve.parameters import Parameters
    from urdir.model.serve.usage import Usage

_tracer: Tracer | None = None
_W3C = ("traceparent", "tracestate")
#: The conventions' names of operations, by the path of a request; others are chats.
_OPERATIONS = {
    **dict.fromkeys(("/v1/completions", "/completion", "/completions"), "text_completion"),
    **dict.fromkeys(("/infill", "/api/generate"), "text_completion"),
    **dict.fromkeys(("/v1/embeddings", "/embeddings"), "embeddings"),
    **dict.fromkeys(("/api/embed", "/api/embeddings"), "embeddings"),
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), "rerank"),
    **dict.fromkeys(("/v1/reranking", "/reranking"), "rerank"),
    **dict.fromkeys(("/v1/score", "/score"), "score"),
}
#: Attributes of a request, by the name of a sampling setting.
_SETTINGS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}


def check_extra() -> None:
    """Raise UnsupportedError if the packages of the extra are not installed."""
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace.export  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(f"{error}: pip install 'urdir[otel]'") from None


def begin(endpoint: str, exporter: SpanExporter | None = None) -> None:
    """Record spans from now on, and send them to a collector by OTLP over HTTP: to ``endpoint``,
    or its /v1/traces if that has no path. `OTEL_...` variables are read by the SDK. Raises
    UnsupportedError without it."""
    global _tracer
    check_extra()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor

    named = Resource({SERVICE_NAME: "urdir"}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=Resource.create(named.attributes))
    if exporter is not None:
        provider.add_span_processor(SimpleSpanProcessor(exporter))
    else:
        path = urlsplit(endpoint).path.strip("/")
        url = endpoint if path else f"{endpoint.rstrip('/')}/v1/traces"
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
    _tracer = provider.get_tracer("urdir.serve")


def end() -> None:
    """Record no more spans."""
    global _tracer
    _tracer = None


@dataclass(frozen=True, slots=True)
class Incoming:
    """A request that is traced: its path, id and headers, and when it came, in seconds of
    `time.perf_counter`. ``shift`` (ns) makes times since 1970 of those of that clock: all times of
    a request have one, so that they are in order."""

    path: str
    name: str
    headers: Mapping[str, str]
    came: float
    shift: float

    def _time(self, seconds: float) -> int:
        return round(1e9 * seconds + self.shift)

    def ended(
        self,
        model: str,
        usage: Usage | None = None,
        parameters: Parameters | None = None,
        reasons: Sequence[str] = (),
        error: BaseException | None = None,
        tokens: int = 0,
    ) -> None:
        """Record the spans of a request that has ended: its own, and those of its phases, if it had
        answers. ``tokens`` are those of a request without answers."""
        if _tracer is None:
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        operation = _OPERATIONS.get(self.path, "chat")
        span = _tracer.start_span(
            f"{operation} {model}",
            context=TraceContextTextMapPropagator().extract(self.headers),
            kind=SpanKind.SERVER,
            start_time=self._time(self.came),
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "urdir",
                "gen_ai.request.model": model,
                "gen_ai.response.model": model,
                "url.path": self.path,
                "urdir.request_id": self.name,
                **_of_parameters(parameters),
                **_of_usage(usage, reasons, tokens),
            },
        )
        if error is not None:
            span.set_attribute("error.type", type(error).__name__)
            span.set_status(Status(StatusCode.ERROR, str(error)))
        now = time.perf_counter()
        within = set_span_in_context(span)
        for name, start, stop in () if usage is None else usage.phases(now):
            _tracer.start_span(name, context=within, start_time=self._time(start)).end(
                self._time(stop)
            )
        span.end(self._time(now))


#: The request that a task answers, if it is traced.
INCOMING: ContextVar[Incoming | None] = ContextVar("incoming", default=None)


def trace_request(path: str, name: str, headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Trace a request of this task, if spans are recorded."""
    if _tracer is None:
        return
    texts = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
    kept = {name: text for name, text in texts.items() if name in _W3C}
    came = time.perf_counter()
    INCOMING.set(Incoming(path, name, kept, came, time.time_ns() - 1e9 * came))


def _of_parameters(parameters: Parameters | None) -> dict[str, Any]:
    if parameters is None:
        return {}
    settings = parameters.settings
    found: dict[str, Any] = {
        f"gen_ai.request.{name}": getattr(settings, field) for field, name in _SETTINGS.items()
    }
    if parameters.limit is not None:
        found["gen_ai.request.max_tokens"] = parameters.limit
    if parameters.n > 1:
        found["gen_ai.request.choice.count"] = parameters.n
    if parameters.stops:
        found["gen_ai.request.stop_sequences"] = parameters.stops
    return found


def _of_usage(usage: Usage | None, reasons: Sequence[str], tokens: int) -> dict[str, Any]:
    if usage is None:
        return {"gen_ai.usage.input_tokens": tokens} if tokens else {}
    found: dict[str, Any] = {
        "gen_ai.usage.input_tokens": usage.prompt,
        "gen_ai.usage.output_tokens": usage.completion,
        "gen_ai.usage.cache_read.input_tokens": usage.cached,
    }
    if usage.is_complete:
        found["gen_ai.response.finish_reasons"] = list(reasons)
    if usage.drafted:
        found["urdir.usage.drafted_tokens"] = usage.drafted
        found["urdir.usage.accepted_tokens"] = usage.accepted
    return found
