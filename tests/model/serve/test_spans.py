"""OpenTelemetry spans of requests, by the SDK's exporter in memory."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from urdir.model.errors import BusyError
from urdir.model.serve import spans

sdk = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "model": "toy"}


@pytest.fixture
def exporter() -> Iterator[Any]:
    made = sdk.InMemorySpanExporter()
    spans.begin("", made)
    yield made
    spans.end()


def ask(server: Any, exporter: Any, path: str, body: Any, **more: Any) -> tuple[Any, list[Any]]:
    """The span of a request, and those of its phases."""
    exporter.clear()
    with server.http().stream("POST", path, json=body, headers={**HEADERS, **more}) as reply:
        reply.read()
    server.wait_for(lambda: any(each.kind.name == "SERVER" for each in found(exporter)))
    *phases, whole = found(exporter)
    assert all(each.parent.span_id == whole.context.span_id for each in phases)
    return whole, phases


def found(exporter: Any) -> list[Any]:
    return list(exporter.get_finished_spans())


@pytest.mark.parametrize("stream", [False, True])
def test_a_span_continues_the_client_s_trace(server: Any, exporter: Any, stream: bool) -> None:
    body = {**CHAT, "stream": stream, "temperature": 0.5, "max_tokens": 99, "stop": ["x"]}
    whole, phases = ask(server, exporter, "/v1/chat/completions", body)
    assert f"{whole.context.trace_id:032x}" == TRACE
    assert f"{whole.parent.span_id:016x}" == PARENT
    assert (whole.name, whole.kind.name, whole.status.status_code.name) == (
        *("chat toy", "SERVER", "UNSET"),
    )
    wanted = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "toy",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 99,
        "gen_ai.request.stop_sequences": ("x",),
        "gen_ai.usage.output_tokens": 8,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "gen_ai.usage.input_tokens": len(server.service.requests[0].prompt),
        "gen_ai.response.finish_reasons": ("end",),
        "url.path": "/v1/chat/completions",
        "urdir.request_id": "mine",
    }
    assert {name: whole.attributes.get(name) for name in wanted} == wanted
    assert [each.name for each in phases] == ["queue", "prefill", "decode"]
    times = [time for each in phases for time in (each.start_time, each.end_time)]
    assert times == sorted(times)
    assert whole.start_time <= times[0]
    assert times[-1] <= whole.end_time


def test_a_clock_that_is_set_meanwhile(
    server: Any, exporter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(10**18, -(10**10))
    monkeypatch.setattr("urdir.model.serve.spans.time.time_ns", lambda: next(clock))
    whole, phases = ask(server, exporter, "/v1/chat/completions", CHAT)
    times = [time for each in phases for time in (each.start_time, each.end_time)]
    assert [whole.start_time, *times] == sorted([whole.start_time, *times])
    assert times[-1] <= whole.end_time


def test_requests_without_a_trace_begin_one(server: Any, exporter: Any) -> None:
    made = [
        ask(server, exporter, "/v1/completions", {"prompt": "a", "n": n}, traceparent="bad")[0]
        for n in (1, 2)
    ]
    assert [each.name for each in made] == ["text_completion toy"] * 2
    assert [each.parent for each in made] == [None, None]
    assert made[0].context.trace_id != made[1].context.trace_id
    assert made[1].attributes["gen_ai.request.choice.count"] == 2
    assert made[1].attributes["gen_ai.response.finish_reasons"] == ("end", "end")
    assert made[1].attributes["gen_ai.usage.output_tokens"] == 16


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("good", [0, 3])
def test_errors(server: Any, exporter: Any, stream: bool, good: int) -> None:
    server.service.error, server.service.good = BusyError("full", 1), good
    whole, phases = ask(server, exporter, "/v1/chat/completions", {**CHAT, "stream": stream})
    assert (whole.status.status_code.name, whole.attributes["error.type"]) == ("ERROR", "BusyError")
    assert "gen_ai.response.finish_reasons" not in whole.attributes
    assert [each.name for each in phases] == (["queue", "prefill", "decode"] if good else ["queue"])


def test_a_client_that_leaves(server: Any, exporter: Any) -> None:
    server.service.delay, server.service.repeat = 0.01, 1000
    body = {**CHAT, "stream": True}
    with server.http().stream("POST", "/v1/chat/completions", json=body) as reply:
        next(reply.iter_lines())
    server.wait_for(lambda: len(found(exporter)) == 4)
    assert found(exporter)[-1].attributes["error.type"] == "ClientDisconnect"


def test_a_response_in_the_background(server: Any, exporter: Any) -> None:
    body = {"input": "Hi", "background": True}
    whole, phases = ask(server, exporter, "/v1/responses", body)
    assert f"{whole.context.trace_id:032x}" == TRACE
    assert whole.attributes["gen_ai.usage.output_tokens"] == 8
    assert len(phases) == 3


def test_time_in_the_queue() -> None:
    from urdir.model.engine.requests.request import Ending, Finish
    from urdir.model.serve.usage import Usage

    usage = Usage(2)
    usage._began, usage._first, usage._has_first = 10.0, 13.0, True
    for seconds in (2.5, 1.5):
        usage.add(0, Ending(Finish.END, 3, 0, 4, queue_seconds=seconds))
    (_, start, queued), (_, _, first), _ = usage.phases(0)
    assert (queued - start, first - start) == pytest.approx((1.5, 3))


def test_spans_go_to_a_collector(server: Any) -> None:
    """In a process of its own, by the exporter, to a server that keeps what it gets."""
    from http.server import BaseHTTPRequestHandler, HTTPServer

    trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    got: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            got.append((self.path, body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            """Nothing."""

    script = (
        "import sys; from urdir.model.serve import spans; spans.begin(sys.argv[1]);"
        "spans.Incoming('/v1/embeddings', 'x', {}, 1, 0).ended('toy', tokens=7)"
    )
    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        url = f"http://127.0.0.1:{collector.server_port}"
        with subprocess.Popen([sys.executable, "-c", script, url]) as process:
            collector.timeout = 120
            collector.handle_request()
        assert process.returncode == 0
    [(path, body)] = got
    assert path == "/v1/traces"
    [sent] = trace_service.ExportTraceServiceRequest.FromString(body).resource_spans
    names = {each.key: each.value.string_value for each in sent.resource.attributes}
    assert names["service.name"] == "urdir"
    [span] = sent.scope_spans[0].spans
    counts = {each.key: each.value.int_value for each in span.attributes}
    assert (span.name, counts["gen_ai.usage.input_tokens"]) == ("embeddings toy", 7)


def test_nothing_is_imported_when_it_is_off() -> None:
    script = (
        "import sys; import urdir.model.serve.app, urdir.model.commands.serve;"
        "from urdir.model.serve.spans import trace_request; trace_request('/', 'x', []);"
        "assert not any(name.startswith('opentelemetry') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
