"""Clients that send too much, nonsense, leave, or do not read; many of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.patience import PATIENCE, in_some_try
from urdir.model.measure.http_events import HttpServer

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "Hi"}]}
JSON = {"Content-Type": "application/json"}


def raw(server: Any, body: bytes, headers: str = "") -> socket.socket:
    """A connection that has sent a request."""
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    length = "" if "Content-Length" in headers else f"Content-Length: {len(body)}\r\n"
    connection.sendall(f"{head}{length}{headers}\r\n".encode() + body)
    return connection


# ---- bodies --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"5",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b"\xff\xfe",
        b'{"messages": [' + b'{"role": "user", "content": "Hi"}',
        b'{"n": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 65 + b"{}" + b"}" * 65,
        b'{"messages": ' + b"[" * 900 + b"]" * 900 + b"}",
    ],
    ids=lambda body: repr(body[:12]) + f" {len(body)}",
)
def test_bodies_that_are_no_request(server: Any, body: bytes) -> None:
    reply = server.http().post(CHAT, content=body, headers=JSON)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_json")


def test_deep_json_within_the_limit(server: Any) -> None:
    nested: Any = 1
    for _ in range(60):
        nested = [nested]
    assert server.http().post(CHAT, json={**HI, "metadata": nested}).status_code == 200


def test_a_large_body_is_refused_before_it_is_sent(server: Any) -> None:
    with raw(server, b"", "Content-Length: 104857600\r\nExpect: 100-continue\r\n") as connection:
        reply = connection.recv(65536)
    assert reply.startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("announced", [True, False])
def test_a_large_body_is_not_stored(server: Any, announced: bool) -> None:
    """100 MB of one request; the process of the test is the server's."""
    size, sent = 100 << 20, 0
    part = b" " * (1 << 20)

    def parts() -> Iterator[bytes]:
        nonlocal sent
        while sent < size:
            sent += len(part)
            yield part

    headers = JSON | ({"Content-Length": str(size)} if announced else {})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    reply = server.http().post(CHAT, content=parts(), headers=headers)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "body_too_large")
    assert grown < 30 << 10  # KiB
    assert server.http().post(CHAT, json=HI).status_code == 200


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_a_text_that_cannot_fit_is_not_tokenised(server: Any, kind: str) -> None:
    text = "abc" * 300_000
    start = time.process_time()
    if kind == "chat":
        body: Any = {"messages": [{"role": "user", "content": text}]}
        reply = server.http().post(CHAT, json=body)
    else:
        reply = server.http().post("/v1/completions", json={"prompt": text})
    assert reply.json()["error"]["code"] == "context_length_exceeded"
    assert time.process_time() - start < 1.5


SURROGATE = "\ud800"  # as JSON writes it; UTF-8 has no bytes for it
TOOL = {"type": "function", "function": {"name": "f", "description": SURROGATE}}


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {SURROGATE: "x"}},
        {"logit_bias": {SURROGATE: 1}},
        {"model": SURROGATE},
        {"messages": [{"role": SURROGATE, "content": "x"}]},
        {"messages": [{"role": "user", "content": SURROGATE}]},
        {"messages": [{"role": "user", "content": [{"type": SURROGATE}]}]},
        {"response_format": {"type": SURROGATE}},
        {"structured_outputs": {SURROGATE: 1}},
        {"tools": [{**TOOL, "function": {"name": SURROGATE}}]},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": SURROGATE}}},
        {"tools": [{"type": SURROGATE}]},
        {"modalities": [SURROGATE]},
    ],
    ids=str,
)
def test_lone_surrogates_are_the_clients_fault(server: Any, fields: Any) -> None:
    body = json.dumps({**HI, **fields}).encode()
    reply = server.http().post(CHAT, content=body, headers=JSON)
    assert reply.status_code in (400, 404)
    assert reply.json()["error"]["message"]
    for path in ("/v1/completions", "/tokenize"):
        content = json.dumps({"prompt": SURROGATE}).encode()
        assert server.http().post(path, content=content, headers=JSON).status_code == 400


def test_lone_surrogates_in_names_of_the_server(server: Any) -> None:
    """As Python reads a file's name that is no UTF-8."""
    server.service.model.names = ("\udcff.gguf",)
    http = server.http()
    assert http.get("/v1/models").json()["data"][0]["id"] == "\udcff.gguf"
    assert http.post(CHAT, json=HI).json()["model"] == "\udcff.gguf"


@pytest.mark.parametrize("length", ["-5", "x", "9" * 30])
def test_lengths_that_are_none(server: Any, length: str) -> None:
    with raw(server, b"", f"Content-Length: {length}\r\n") as connection:
        assert connection.recv(65536).split()[1] in (b"400", b"413")


def test_a_body_that_does_not_come(start: Any) -> None:
    server = start(body_seconds=0.1)
    with raw(server, b"{", "Content-Length: 10\r\n") as connection:
        assert connection.recv(65536).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("sent", [b"", b"POST /v1/chat/comp", b"GET /health HTTP/1.1\r\nHost:"])
def test_a_request_that_does_not_come(start: Any, sent: bytes) -> None:
    server = start(silent_seconds=0.1)

    def first_is_answered() -> None:
        with (
            socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection,
            contextlib.suppress(ConnectionError),
        ):
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" + sent)
            replies = b"".join(iter(lambda: connection.recv(65536), b""))
            assert replies.count(b"HTTP/1.1 200 OK") == 1  # none if it is sent too late

    in_some_try(first_is_answered)
    server.service.delay = 0.1  # an answer may take longer

    def is_answered() -> bool:
        with contextlib.suppress(httpx.TransportError):  # sent too late
            return bool(server.http().post(CHAT, json=HI).status_code == 200)
        return False

    server.wait_for(is_answered)


@pytest.mark.parametrize(
    ("head", "more"),
    [
        (b"GET /health HTTP/1.1\r\nHost: x\r\n", b"a: " + b"b" * 1000 + b"\r\n"),
        (b"GET /health HTTP/1.1\r\nHost: x\r\na: ", b"b" * 1000),
        (b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", b"\r\n" * 500),
        (
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            "Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n".encode(),
            b"a: " + b"b" * 1000 + b"\r\n",  # behind the body
        ),
    ],
    ids=["many", "long", "blank", "trailers"],
)
def test_headers_that_do_not_end(start: Any, head: bytes, more: bytes) -> None:
    """The server ends such a connection after 64 KiB, and whatever the system has buffered."""
    server = start(head=10_000)
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
        connection.sendall(head)
        with pytest.raises(ConnectionError):
            connection.sendall(more * 100_000)
    assert server.http().get("/health").status_code == 200


def test_headers_within_the_limit(start: Any) -> None:
    server = start(head=10_000)
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
        for _ in range(9):  # each read by itself, or several together
            connection.sendall(b"a: " + b"b" * 1000 + b"\r\n")
            time.sleep(0.002)
        connection.sendall(b"\r\n")
        assert connection.recv(15) == b"HTTP/1.1 200 OK"


# ---- clients that leave, or do not read ----------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_cancels_its_answers(server: Any, stream: bool) -> None:
    service = server.service
    service.delay, service.repeat = 0.01, 10_000
    body = json.dumps({**HI, "stream": stream, "n": 2}).encode()
    with raw(server, body) as connection:
        server.wait_for(lambda: service.running == 2 and service.tokens > 4)
        if stream:
            received = b""
            while b"data: " not in received:
                received += (part := connection.recv(65536))
                assert part, received
    server.wait_for(lambda: service.running == 0)
    assert service.cancelled == 2


def test_a_client_that_leaves_before_the_first_token(server: Any) -> None:
    server.service.delay = 60
    with raw(server, json.dumps({**HI, "stream": True}).encode()):
        server.wait_for(lambda: server.service.running == 1)
    server.wait_for(lambda: server.service.cancelled == 1)


def test_a_client_that_stops_reading(start: Any) -> None:
    """It is cut off; until then nothing piles up for it, and others are served."""
    server = start(stalled_seconds=2.0)
    service = server.service
    service.answer, service.repeat = "word " * 100, 10_000
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        body = json.dumps({**HI, "stream": True}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        server.wait_for(lambda: _stands_still(service))
        service.repeat = 1

        def others_are_served() -> None:
            before = service.tokens
            for _ in range(3):
                assert server.http().post(CHAT, json={**HI, "max_tokens": 3}).status_code == 200
            assert service.tokens == before + 9

        in_some_try(others_are_served)
        taken = service.tokens
        server.wait_for(lambda: service.running == 0)
        assert service.cancelled == 1
    assert taken * 200 < 16 << 20  # bytes of events, in the buffers of the two ends


def _stands_still(service: Any) -> bool:
    tokens = service.tokens
    time.sleep(0.5)
    return tokens > 0 and service.tokens == tokens


# ---- many ----------------------------------------------------------------------------------------


def test_too_many_open_requests(start: Any) -> None:
    server = start(open_requests=2)
    server.service.delay = 60
    body = json.dumps(HI).encode()
    with raw(server, body), raw(server, body):
        server.wait_for(lambda: server.service.running == 2)
        reply = server.http().post(CHAT, json=HI)
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
        assert reply.json()["error"]["code"] == "rate_limit_exceeded"
        assert server.http().get("/health").status_code == 200
    server.wait_for(lambda: server.service.running == 0)
    server.service.delay = 0
    assert server.http().post(CHAT, json=HI).status_code == 200


@pytest.mark.parametrize("connections", [50, pytest.param(400, marks=pytest.mark.slow)])
def test_many_connections_at_once(server: Any, connections: int) -> None:
    server.service.delay = 0.02

    target = HttpServer.parse(server.url)

    async def one() -> str:
        events = target.events(CHAT, {**HI, "stream": True})
        return "".join([event["choices"][0]["delta"].get("content", "") async for event in events])

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*(one() for _ in range(connections)))

    assert asyncio.run(all_of_them()) == ["2 plus 3 is 5."] * connections
    assert len(server.service.requests) == connections
    assert server.service.cancelled == 0
