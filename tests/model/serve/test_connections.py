"""Connections: more than there may be, files that run out, and clients that only listen."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import http.client
import json
import logging
import resource
import socket
from typing import Any

import pytest

from tests.model.serve.conftest import Gate
from tests.patience import PATIENCE
from urdir.model.errors import ModelError
from urdir.model.serve import connections as module
from urdir.model.serve import protocol
from urdir.model.serve.access import Access
from urdir.model.serve.connections import Connections, accept, room
from urdir.model.serve.counts import Counts
from urdir.model.serve.limits import Limits
from urdir.model.serve.listening import listen
from urdir.model.serve.loops import run_in_loop
from urdir.model.serve.server import HttpServer

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "Hi"}]}
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


def request(version: str = "1.1", **fields: Any) -> bytes:
    body = json.dumps({**HI, **fields}).encode()
    head = f"POST {CHAT} HTTP/{version}\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def connect(server: Any) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)


def all_of(connection: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    return b"".join(iter(lambda: connection.recv(65536), b""))


# ---- how many ------------------------------------------------------------------------------------


class _Link:
    """A connection that notes what becomes of it."""

    def __init__(self, log: list[str], name: str) -> None:
        self.transport: Any = self
        self._log, self._name = log, name

    def abort(self) -> None:
        self._log.append(f"{self._name} aborted")

    def write(self, data: bytes) -> None:
        self._log.append(f"{self._name} {data.split()[1].decode()}")

    def close(self) -> None:
        self._log.append(f"{self._name} closed")


def test_who_makes_room() -> None:
    log: list[str] = []
    a, b, c, d, e = (_Link(log, name) for name in "abcde")
    links = Connections(2, Counts())
    links.opened(a)
    links.opened(b)
    links.works(a)
    links.waits(a)
    assert log == []
    links.opened(c)
    assert log == ["b aborted"]  # since a had a request after it began to wait
    links.closed(b)
    links.works(a)
    links.works(c)
    links.opened(d)
    assert log[1:] == ["d 503", "d closed"]
    links.closed(d)
    links.closed(a)
    links.opened(e)
    assert len(log) == 3


def test_connections_beyond_the_limit(start: Any) -> None:
    server = start(connections=3)
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connect(server)) for _ in range(10)]
        with connect(server) as connection:
            connection.sendall(HEALTH)
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        for connection in idle[:7]:
            with contextlib.suppress(ConnectionResetError):
                assert all_of(connection) == b""
    server.service.delay = 60
    with connect(server) as one, connect(server) as two, connect(server) as three:
        for connection in (one, two, three):
            connection.sendall(request())
        server.wait_for(lambda: server.service.running == 3)
        with connect(server) as more:
            reply = all_of(more)
        assert reply.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After: 1\r\n" in reply
    server.wait_for(lambda: server.service.running == 0)
    server.service.delay = 0
    assert server.http().post(CHAT, json=HI).status_code == 200


# ---- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", range(8))
def test_a_connection_that_begins_when_accepting_ends(rounds: int) -> None:
    """Its protocol is told of its end, however far it has come: a server waits for that."""
    lost: list[Protocol] = []

    class Protocol(asyncio.Protocol):
        transport: asyncio.BaseTransport

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = transport
            made.append(self)

        def connection_lost(self, error: Exception | None) -> None:
            lost.append(self)

    made: list[Protocol] = []

    async def run(listener: socket.socket) -> None:
        accepting = asyncio.create_task(accept(listener, Protocol))
        for _ in range(rounds):  # of the event loop
            await asyncio.sleep(0)
        accepting.cancel()
        await asyncio.gather(accepting, return_exceptions=True)
        for each in made:
            each.transport.close()
        async with asyncio.timeout(PATIENCE):
            while len(lost) < len(made):
                await asyncio.sleep(0.001)

    with listen("127.0.0.1", 0) as listener, contextlib.ExitStack() as clients:
        for _ in range(3):
            clients.enter_context(socket.create_connection(listener.getsockname()))
        run_in_loop(run(listener))
    assert len(lost) == len(made)
    assert len(made) == 3 or rounds < 7


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The limits of open files of this process, as a list whose last is in force."""
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, wanted: limits.append(wanted))
    monkeypatch.setattr(module, "_open_files", lambda: 20)
    return limits


def test_the_limit_of_open_files_is_raised_as_far_as_is_needed(
    limit: list[tuple[int, int]],
) -> None:
    endless = resource.RLIM_INFINITY
    for given, raised, found in (
        ((256, 10_000), (1052, 10_000), 1000),
        ((256, endless), (1052, endless), 1000),
        ((256, 500), (500, 500), 448),
        ((64, 64), (64, 64), 12),
        ((5000, 10_000), (5000, 10_000), 1000),
        ((endless, endless), (endless, endless), 1000),
    ):
        limit[:] = [given]
        assert (room(1000), limit[-1]) == (found, raised)
    limit[:] = [(256, 500)]
    assert room(1000, with_tls=True) == 448 - module._HANDSHAKES
    limit[:] = [(52, 52)]
    with pytest.raises(
        ModelError, match="the limit of 52 open files is too low, 52 are in use: raise `ulimit"
    ):
        room(1000)


def test_a_line_for_each_second_without_files(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Then the connections that wait are accepted."""
    tried: list[float] = []

    async def run() -> list[bytes]:
        loop = asyncio.get_running_loop()
        found = module._next

        async def scarce(listener: Any) -> Any:
            tried.append(loop.time())
            if len(tried) in (1, 2):
                raise OSError(errno.EMFILE, "Too many open files")
            if len(tried) == 3:
                raise ConnectionAbortedError(errno.ECONNABORTED, "gone")
            return await found(listener)

        monkeypatch.setattr(module, "_next", scarce)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            task = asyncio.create_task(accept(listener, _Greeter))
            greeted = []
            for _ in range(20):
                reader, writer = await asyncio.open_connection(*listener.getsockname())
                greeted.append(await reader.read())
                writer.close()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return greeted

    monkeypatch.setattr(module, "_PAUSE_SECONDS", 0.2)
    with caplog.at_level(logging.ERROR):
        assert asyncio.run(run()) == [b"hello"] * 20
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["accepting no connections for 0.2 s: Too many open files"] * 2
    assert tried[2] - tried[0] > 0.35


class _Greeter(asyncio.Protocol):
    def connection_made(self, transport: Any) -> None:
        transport.write(b"hello")
        transport.close()


# ---- HTTP/1.0 ------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_client_of_http_1_0_reads_to_the_end(start: Any, is_kept: bool) -> None:
    """It knows no chunks: the end of a stream is that of the connection, even if it asks for
    more."""
    server = start()
    asked = request("1.0", stream=True)
    if is_kept:
        asked = asked.replace(b"\r\n", b"\r\nConnection: keep-alive\r\n", 1)
    with connect(server) as connection:
        connection.sendall(asked)
        head, _, body = all_of(connection).partition(b"\r\n\r\n")
    assert b"\r\nconnection: close" in head
    assert b"transfer-encoding" not in head
    *events, end = body.split(b"\n\n")
    assert end == b""
    assert [event[:6] for event in events] == [b"data: "] * len(events)
    assert events.pop() == b"data: [DONE]"
    deltas = [json.loads(event[6:])["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content", "") for delta in deltas) == "2 plus 3 is 5."


def test_a_client_of_http_1_0_gets_errors_and_whole_answers(start: Any) -> None:
    server = start()
    for asked, status in (
        (request("1.0"), b"200 OK"),
        (request("1.0", n=0), b"400 Bad Request"),
        (HEALTH.replace(b"HTTP/1.1", b"HTTP/1.0"), b"200 OK"),
        (HEALTH.replace(b"HTTP/1.1", b"HTTP/1.0").replace(b"GET", b"HEAD"), b"200 OK"),
    ):
        with connect(server) as connection:
            connection.sendall(asked)
            head, _, body = all_of(connection).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 " + status)
        assert b"transfer-encoding" not in head
        assert body == b"" if asked.startswith(b"HEAD") else json.loads(body)


# ---- one half closed -----------------------------------------------------------------------------


def half_closed(server: Any, data: bytes) -> bytes:
    """The replies to a client that sends ``data``, and then that it sends no more."""
    with connect(server) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        return all_of(connection)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("delay", [0.0, 0.02])
def test_who_only_listens_is_answered(start: Any, version: str, stream: bool, delay: float) -> None:
    server = start()
    server.service.delay = delay
    reply = half_closed(server, request(version, stream=stream))
    if version == "1.1":  # which has others before it on a busy machine
        reply = reply.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")
    assert reply.startswith(b"HTTP/1.1 200 OK\r\n")
    assert (b"data: [DONE]" if stream else b'"content":"2 plus 3 is 5."') in reply
    if version == "1.0" or not stream:
        assert b"transfer-encoding" not in reply
    assert server.service.cancelled == 0


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_takes_long(
    start: Any, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client is told that all is well, in a way that clients know."""
    monkeypatch.setattr(protocol, "_FIRST_PROBE_SECONDS", 0.05)  # long before the answer
    server = start()
    server.service.gate = gate = Gate()
    with connect(server) as connection:
        connection.sendall(request(stream=stream))
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(12, socket.MSG_PEEK | socket.MSG_WAITALL) == b"HTTP/1.1 100"
        gate.open()
        with http.client.HTTPResponse(connection) as response:
            response.begin()
            assert response.status == 200
            assert (b"[DONE]" if stream else b"2 plus 3 is 5.") in response.read()
    server.service.delay = 0.1
    reply = half_closed(server, request("1.0", stream=stream, max_tokens=2))
    assert reply.startswith(b"HTTP/1.1 200 OK\r\n")  # HTTP/1.0 knows no other kind of reply


def test_a_request_is_told_of_when_it_begins_to_arrive(start: Any) -> None:
    """Once, whatever it comes in; not one that wants no answer of a model."""
    server = start()
    told: list[int] = []

    def status(connection: socket.socket) -> int:
        with http.client.HTTPResponse(connection) as response:
            response.begin()
            response.read()
            return response.status

    server.server.clients.on_post = lambda: told.append(len(server.service.requests))
    with connect(server) as connection:
        for number, cut in enumerate((30, 200), 1):
            connection.sendall(HEALTH)
            assert status(connection) == 200
            assert len(told) == number - 1
            whole = request()
            connection.sendall(whole[:cut])
            server.wait_for(lambda count=number: len(told) == count)
            connection.sendall(whole[cut:])
            assert status(connection) == 200
    assert told == [0, 1]


def test_all_requests_are_answered_before_it_closes(start: Any) -> None:
    server = start()
    server.service.delay = 0.01
    reply = half_closed(server, HEALTH + request() + request(stream=True) + HEALTH)
    assert reply.count(b"HTTP/1.1 200 OK\r\n") == 4
    assert b"data: [DONE]" in reply


@pytest.mark.parametrize("sent", [b"", b"GET /hea", request()[:-5], HEALTH])
def test_who_sends_no_more_and_waits_for_nothing(start: Any, sent: bytes) -> None:
    server = start()
    replies = half_closed(server, sent)
    assert replies.count(b"HTTP/1.1 ") == (sent == HEALTH)
    server.wait_for(lambda: not server.server.server_state.connections)
    assert server.service.requests == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("delay", [0.05, 3600])
def test_who_is_gone_is_noticed(start: Any, stream: bool, delay: float) -> None:
    """Before the answer begins, and in it."""
    server = start()
    server.service.delay, server.service.repeat = delay, 10_000
    with connect(server) as connection:
        connection.sendall(request(stream=stream))
        server.wait_for(lambda: server.service.running == 1)
    server.wait_for(lambda: server.service.cancelled == 1)


def test_an_idle_connection_stays_as_long_as_the_protocol_leaves_it() -> None:
    app: Any = None
    server = HttpServer(app, Access(), Limits(silent_seconds=7.2), Counts())
    assert server.config.timeout_keep_alive == 15
