"""A model that crashes, a client that leaves, a router that ends."""

from __future__ import annotations

import json
import signal
import socket
import struct

import httpx
import pytest

from tests.model.serve.router.toys import LONG, Start, held, streamed
from tests.patience import PATIENCE


def test_a_crash_is_of_one_model(start: Start) -> None:
    router = start("a", "b")
    for name in "ab":
        router.text(name)
    usual = router.toys.service("a").gate
    held(router, "a")
    gate = held(router, "b")
    with streamed(router, "a") as lines:
        beside, found = router.in_thread(lambda: router.ask("b"))
        whole, cut = router.in_thread(lambda: router.ask("a"))
        for name, count in (("a", 2), ("b", 1)):
            running = router.toys.service(name)
            router.wait_for(lambda running=running, count=count: running.running == count)
        router.call(router.toys.workers["a"].crash())
        last = [line for line in lines if line][-1]
        gate.open()
    assert json.loads(last.removeprefix("data: "))["error"]["message"]
    whole.join(PATIENCE)
    assert cut[0].status_code == 503
    assert "killed by SIGKILL" in cut[0].json()["error"]["message"]
    beside.join(PATIENCE)
    assert found[0].status_code == 200
    listed = router.client.get("/v1/models/a").json()["status"]
    assert listed["cause"] == "its process has ended: killed by SIGKILL"
    router.toys.service("a").gate = usual
    router.wait_for(lambda: router.ask("a").status_code == 200)


def test_a_client_that_leaves_cancels_its_answer_and_no_load(start: Start) -> None:
    router = start("a", "b", load_seconds=LONG)
    body = b'{"model": "a", "prompt": "Hi"}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", httpx.URL(router.url).port or 0)) as client:
        client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        router.wait_for(lambda: router.fleet.waiting == 1)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    router.wait_for(lambda: router.fleet.waiting == 0)
    assert router.status("a") == "loading"
    router.toys.load_seconds = 0.0
    router.wait_for(lambda: router.status("a") == "loaded")
    service = router.toys.service("a")
    assert service.requests == []
    gate = held(router, "a")
    service.delay, service.repeat = 0.02, 1000
    with streamed(router, "a"):
        assert service.running == 1
    gate.open()
    router.wait_for(lambda: service.cancelled == 1)
    router.wait_for(lambda: router.fleet.models["a"].open == 0)


def test_the_end_answers_what_is_open(start: Start) -> None:
    router = start("a", "b")
    gate = held(router, "a")
    thread, found = router.in_thread(lambda: router.ask("a"))
    router.wait_for(lambda: router.toys.service("a").running == 1)
    router.server.should_exit = True
    router.wait_for(router.server._accepting.done)
    gate.open()
    thread.join(PATIENCE)
    assert found[0].json()["choices"][0]["text"] == "I am a."
    router.wait_for(lambda: not router.toys.workers)


@pytest.mark.parametrize("drain", [None, 0.2])
def test_the_end_waits_for_responses_in_the_background(
    start: Start, monkeypatch: pytest.MonkeyPatch, drain: float | None
) -> None:
    monkeypatch.setattr("urdir.model.serve.router.holds._LOOK_SECONDS", 0.02)
    router = start("a", "b", drain=drain, end_seconds=0.0)
    gate, service = held(router, "a"), router.toys.service("a")
    body = {"model": "a", "input": "Hi", "background": True}
    assert router.client.post("/v1/responses", json=body).json()["status"] == "queued"
    router.wait_for(lambda: service.running == 1)
    router.loop.call_soon_threadsafe(router.server._end, signal.SIGTERM)
    if drain is None:
        router.wait_for(router.server._accepting.done)
        gate.open()
    router.wait_for(lambda: not router.toys.workers)
    assert service.cancelled == (drain is not None)
