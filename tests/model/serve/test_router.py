"""Several models behind one server: which are loaded, whose requests wait, what is passed on."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.model.serve.conftest import Gate
from tests.model.serve.router_toys import RunningRouter, Toys, running_router, spec
from tests.patience import PATIENCE
from urdir.model.errors import ModelError
from urdir.model.serve.access import Access
from urdir.model.serve.limits import Limits
from urdir.model.serve.router.fleet import Fleet
from urdir.model.serve.router.keep_alive import KeepAlive
from urdir.model.serve.router.spec import ModelSpec, RouterSettings
from urdir.model.serve.router.watch import model_events

Start = Callable[..., RunningRouter]
LONG = 3600.0  # seconds


@pytest.fixture
def start(toy_texts: Any) -> Iterator[Start]:
    """Starts a router; toys, settings and limits as wanted."""
    with contextlib.ExitStack() as stack:

        def begin(
            *specs: ModelSpec | str,
            limits: Limits | None = None,
            access: Access | None = None,
            memory: int = 100,
            load_seconds: float = 0.0,
            drain: float | None = None,
            **settings: Any,
        ) -> RunningRouter:
            toys = Toys(toy_texts, access or Access(), load_seconds, memory)
            named = [spec(each) if isinstance(each, str) else each for each in specs]
            bounds = limits or Limits()
            router = running_router(toys, named, RouterSettings(**settings), bounds, drain)
            return stack.enter_context(router)

        yield begin


def held(router: RunningRouter, name: str, tokens: int = 1) -> Gate:
    """A gate in the next answers of a model, after so many tokens."""
    gate = router.toys.service(name).gate = Gate(tokens)
    return gate


@contextlib.contextmanager
def streamed(router: RunningRouter, name: str) -> Iterator[Iterator[str]]:
    """The lines of a stream whose first one has come."""
    body = {"model": name, "prompt": "Hi", "max_tokens": 500, "stream": True}
    with router.client.stream("POST", "/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.iter_lines()
        next(lines)
        yield lines


def test_a_model_is_loaded_for_the_request_that_names_it(start: Start) -> None:
    router = start("a", "org/b:Q8_0")
    assert [router.status(name) for name in ("a", "org/b:Q8_0")] == ["unloaded"] * 2
    assert router.text("a") == "I am a."
    assert router.text("org/b:Q8_0") == "I am org/b:Q8_0."
    assert router.text("a") == "I am a."
    assert router.toys.started == ["a", "org/b:Q8_0"]
    assert router.toys.shares == [0.45, 0.9]  # of what is free: equal parts


def test_every_protocol_names_its_model(start: Start) -> None:
    router = start("a", "b")
    chat = {"model": "b", "messages": [{"role": "user", "content": "Hi"}]}
    http = router.client
    client = openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", http_client=http)
    assert client.chat.completions.create(**chat).choices[0].message.content == "I am b."
    assert client.responses.create(model="b", input="Hi").output_text == "I am b."
    said = http.post("/v1/messages", json={**chat, "max_tokens": 50}).json()
    assert said["content"][0]["text"] == "I am b."
    said = http.post("/api/chat", json={**chat, "model": "b:latest", "stream": False}).json()
    assert said["message"]["content"] == "I am b."
    assert http.post("/completion", json={"model": "b", "prompt": "Hi"}).json()["content"]
    assert http.post("/tokenize", json={"model": "b", "content": "Hi"}).json()["tokens"]
    embedding = http.post("/v1/embeddings", json={"model": "b", "input": "Hi"})
    assert embedding.json()["error"]["code"] == "no_embeddings"  # as the toy has none
    assert router.toys.started == ["b"]
    lines = [json.loads(line) for line in http.post("/api/chat", json=chat).text.splitlines()]
    assert "".join(line["message"]["content"] for line in lines) == "I am b."
    assert lines[-1]["done"] is True


def test_streams_pass_as_they_come(start: Start) -> None:
    router = start("a", "b")
    gate = held(router, "a")
    with streamed(router, "a") as lines:
        assert router.toys.service("a").running == 1
        gate.open()
        *_, last = filter(None, lines)
    assert last == "data: [DONE]"
    router.wait_for(lambda: router.fleet.models["a"].open == 0)


def test_what_is_listed_says_where_models_stand(start: Start) -> None:
    router = start("a", spec("b", nbytes=7, modified=1000.0), "c")
    router.toys.failing["c"] = "it has no tensor 'x'"
    router.text("a")
    assert router.ask("c").status_code == 500
    listed = {each["id"]: each for each in router.client.get("/models").json()["data"]}
    assert listed["a"]["status"] == {"value": "loaded"}
    assert (listed["a"]["max_model_len"], listed["a"]["meta"]["n_vocab"]) == (512, 2048)
    assert listed["b"]["status"] == {"value": "unloaded"}
    assert listed["b"]["created"] == 1000
    failed = {"value": "unloaded", "failed": True, "cause": "it has no tensor 'x'"}
    assert listed["c"]["status"] == failed
    one = router.client.get("/v1/models/b").json()
    assert one == listed["b"]
    tags = router.client.get("/api/tags").json()["models"]
    assert [(tag["name"], tag["size"]) for tag in tags] == [
        ("a", 1_000_000),
        ("b", 7),
        ("c", 0),
    ]
    assert [each["name"] for each in router.client.get("/api/ps").json()["models"]] == ["a"]
    shown = router.client.post("/api/show", json={"model": "b"}).json()
    assert shown["capabilities"] == ["completion"]
    assert router.client.post("/api/show", json={"name": "a"}).json()["template"]
    assert router.client.get("/health").json()["models"]["loaded"] == 1
    assert router.toys.started == ["a", "c"]  # nothing of this loaded a model


def test_models_are_loaded_and_unloaded_on_demand(start: Start) -> None:
    router = start("a", "b", load_seconds=LONG)
    http = router.client
    assert http.post("/models/load", json={"model": "a"}).json() == {"success": True}
    router.wait_for(lambda: router.status("a") == "loading")
    router.toys.load_seconds = 0.0
    router.wait_for(lambda: router.status("a") == "loaded")
    assert http.post("/models/unload", json={"model": "a"}).json() == {"success": True}
    assert router.status("a") == "unloaded"
    assert http.post("/models/unload", json={"model": "a"}).json() == {"success": True}
    router.toys.load_seconds = LONG
    http.post("/models/load", json={"model": "a"})
    assert http.post("/models/unload", json={"model": "a"}).json() == {"success": True}
    assert router.status("a") == "unloaded"  # the load was stopped
    router.toys.load_seconds = 0.0
    status = http.get("/v1/models/a").json()["status"]
    assert status == {"value": "unloaded"}
    assert not router.toys.workers
    assert router.text("a") == "I am a."


def test_without_autoload_requests_are_told(start: Start) -> None:
    router = start("a", "b", autoload=False)
    refused = router.ask("a")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "model_not_loaded")
    body = {"model": "b", "prompt": "Hi"}
    assert router.client.post("/v1/completions?autoload=true", json=body).status_code == 200
    router.call(router.fleet.unload(router.fleet.models["b"]))
    again = start("a", "b")
    assert again.client.post("/v1/completions?autoload=false", json=body).status_code == 400


def test_many_requests_load_a_model_once(start: Start) -> None:
    router = start("a", "b", load_seconds=LONG)
    asked = [router.in_thread(lambda name=name: router.ask(name)) for name in "abab"]
    router.wait_for(lambda: router.fleet.waiting == 4)
    router.toys.load_seconds = 0.0
    for thread, found in asked:
        thread.join(PATIENCE)
        assert found[0].status_code == 200
    assert sorted(router.toys.started) == ["a", "b"]


def test_the_model_used_longest_ago_makes_room(start: Start) -> None:
    router = start("a", "b", "c", loaded=2)
    for name in "abac":
        router.text(name)
    assert [router.status(name) for name in "abc"] == ["loaded", "unloaded", "loaded"]
    router.text("b")
    assert [router.status(name) for name in "abc"] == ["unloaded", "loaded", "loaded"]
    assert router.fleet.room.evictions == 2


def test_a_full_device_makes_room(start: Start) -> None:
    router = start("a", "b", "c", memory=2)
    for name in "abc":
        router.text(name)
    assert [router.status(name) for name in "abc"] == ["unloaded", "loaded", "loaded"]
    small = start("a", memory=0)
    assert small.ask("a").json()["error"]["message"].endswith("no memory")


def test_answers_are_not_cut_to_make_room(start: Start) -> None:
    router = start("a", "b", loaded=1, patience_seconds=0.05)
    gate = held(router, "a")
    router.toys.service("a").repeat = 8
    answering, found = router.in_thread(lambda: router.ask("a"))
    router.wait_for(lambda: router.toys.service("a").running == 1)
    waiting, later = router.in_thread(lambda: router.ask("b"))
    router.wait_for(lambda: router.fleet.models["a"].leaves)
    third, last = router.in_thread(lambda: router.ask("a"))  # does not hold up the second
    router.wait_for(lambda: router.fleet.waiting == 2)
    gate.open()
    for thread in (answering, waiting, third):
        thread.join(PATIENCE)
    assert found[0].json()["choices"][0]["text"] == "I am a." * 8
    assert later[0].json()["choices"][0]["text"] == "I am b."
    assert last[0].status_code == 200
    assert router.toys.started == ["a", "b", "a"]


def test_only_some_requests_wait(start: Start) -> None:
    router = start("a", "b", "c", loaded=1, room_seconds=LONG, waiting=2)
    gate = held(router, "a")
    with streamed(router, "a") as lines:
        asked = [router.in_thread(lambda: router.ask("b")) for _ in range(2)]
        router.wait_for(lambda: router.fleet.waiting == 2)
        full = router.ask("c")
        assert (full.status_code, full.headers["retry-after"]) == (503, "5")
        assert "2 requests wait" in full.json()["error"]["message"]
        gate.open()
        assert list(lines)
    for thread, found in asked:
        thread.join(PATIENCE)
        assert found[0].status_code == 200


def test_waiting_ends(start: Start) -> None:
    router = start("a", "b", loaded=1, patience_seconds=0.0, room_seconds=0.3)
    gate, service = held(router, "a"), router.toys.service("a")
    service.delay, service.repeat = 0.02, 1000
    with streamed(router, "a"):
        asked = [router.in_thread(lambda: router.ask("b")) for _ in range(2)]
        for thread, found in asked:
            thread.join(PATIENCE)
            assert found[0].status_code == 503
            assert found[0].json()["error"]["code"] == "no_room"
            assert "retry-after" in found[0].headers
        assert router.status("a") == "loaded"
        assert not router.fleet.models["a"].leaves
    gate.open()
    router.wait_for(lambda: service.cancelled == 1)  # the client is gone
    router.wait_for(lambda: router.fleet.models["a"].open == 0)
    assert router.text("b") == "I am b."


def test_idle_models_sleep(start: Start) -> None:
    router = start(spec("a", idle_seconds=0.3), "b")
    service = router.toys.service("a")
    service.delay, service.repeat = 0.02, 6
    began = time.monotonic()
    router.text("a")
    assert time.monotonic() - began > 0.35  # longer than it may be idle
    assert router.toys.started == ["a"]
    router.text("b")
    while router.status("a") != "unloaded":  # none of these is a use of it
        router.client.get("/metrics")
        router.client.get("/models")
        router.client.get("/props?model=a")
        assert time.monotonic() - began < PATIENCE
    assert router.status("b") == "loaded"
    service.delay = 0.0
    assert router.text("a").startswith("I am a.")


def test_models_are_loaded_at_the_start(start: Start) -> None:
    router = start("a", spec("b", load_on_startup=True))
    router.wait_for(lambda: router.status("b") == "loaded")
    assert router.status("a") == "unloaded"


def test_a_model_that_fails_says_why_and_is_tried_again(start: Start) -> None:
    router = start(spec("a", folder="/models"), "b", retry_seconds=LONG)
    router.toys.failing["a"] = "/models/a.gguf: not a GGUF file"
    for _ in range(3):
        error = router.ask("a").json()["error"]
        assert error["message"] == "the model 'a' could not be loaded: a.gguf: not a GGUF file"
        assert error["code"] == "model_not_available"
    assert router.toys.started == ["a"]
    assert router.text("b") == "I am b."
    router.toys.failing.clear()
    router.client.post("/models/load", json={"model": "a"})  # at once
    assert router.text("a") == "I am a."
    assert "failed" not in router.client.get("/v1/models/a").json()["status"]


def test_files_that_are_no_models_evict_none(start: Start) -> None:
    def check() -> None:
        raise ModelError("it is empty")

    router = start("a", spec("b", check=check), loaded=1)
    router.text("a")
    assert "it is empty" in router.ask("b").text
    assert router.status("a") == "loaded"
    assert router.toys.started == ["a"]


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


def test_unknown_models_are_refused_with_those_there_are(start: Start) -> None:
    router = start(*(f"m{n}" for n in range(25)))
    error = router.ask("nope")
    assert (error.status_code, error.json()["error"]["code"]) == (404, "model_not_found")
    assert "'m0', 'm1'" in error.json()["error"]["message"]
    assert error.json()["error"]["message"].endswith("'m19' and 5 more")
    assert router.ask(None).json()["error"]["code"] == "model_required"
    assert router.client.get("/props").json()["error"]["code"] == "model_required"
    anthropic = router.client.post("/v1/messages", json={"model": "x", "messages": []}).json()
    assert anthropic["error"]["type"] == "not_found_error"
    assert "no model" in router.client.post("/api/chat", json={"model": "x"}).json()["error"]


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("../../etc/passwd", 404), ("/etc/passwd", 404), ("a/../a", 404), ("a\0", 404),
        ("x" * 100_000, 404), ("\ud800", 404), (7, 400), (["a"], 400), ({"a": 1}, 400),
        (".", 404), ("a\r\nx-y: z", 404), ("%61", 404), ("", 400), (None, 400),
    ],
)  # fmt: skip
def test_hostile_names(shared: RunningRouter, name: Any, status: int) -> None:
    body = json.dumps({"model": name, "prompt": "Hi"}).encode()
    json_type = {"content-type": "application/json"}
    for path in ("/v1/completions", "/models/load", "/models/unload", "/api/show"):
        answer = shared.client.post(path, content=body, headers=json_type)
        assert answer.status_code == status, (path, answer.text)
        assert len(answer.content) < 2000
    if isinstance(name, str) and name.isprintable() and len(name) < 10_000:
        asked = shared.client.get("/props", params={"model": name})
        assert asked.status_code == status
    assert shared.toys.started == []


@pytest.fixture(scope="module")
def shared(toy_texts: Any) -> Iterator[RunningRouter]:
    """A router whose models no test loads."""
    toys = Toys(toy_texts)
    with running_router(toys, [spec("a"), spec("b")], RouterSettings(), Limits()) as router:
        yield router


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 400, "invalid_json"), (b"[1]", 400, "invalid_json"), (b'{"model": "a"', 400, None),
        (b'{"model": "a"} x', 400, "invalid_json"), (b"\xff", 400, "invalid_json"),
        (b'{"x":' + b"[" * 100_000, 400, "invalid_json"),
        (b'{"model": NaN}', 400, "invalid_json"),
    ],
)  # fmt: skip
def test_hostile_bodies(shared: RunningRouter, body: bytes, status: int, code: str | None) -> None:
    json_type = {"content-type": "application/json"}
    answer = shared.client.post("/v1/chat/completions", content=body, headers=json_type)
    assert answer.status_code == status
    assert code is None or answer.json()["error"]["code"] == code
    page = {"origin": "http://evil.example"}
    plain = shared.client.post("/v1/chat/completions", content=b"{}", headers=page)
    assert plain.status_code == 415
    assert shared.toys.started == []


def test_deep_fields_are_the_models_to_refuse(start: Start) -> None:
    router = start("a", "b")
    deep = b'{"model": "a", "x": ' + b"[" * 900 + b"]" * 900 + b"}"
    json_type = {"content-type": "application/json"}
    answer = router.client.post("/v1/completions", content=deep, headers=json_type)
    assert answer.json()["error"]["code"] == "invalid_json"
    large = {"model": "a", "prompt": "x " * 300_000}
    assert router.client.post("/v1/completions", json=large).status_code == 400
    assert router.client.post("/v1/completions", json={"model": "a", "p": "x" * (5 << 20)})


def test_keys_are_asked_for_and_passed_on(start: Start) -> None:
    router = start("a", "b", access=Access(("one", "two")))
    assert router.ask("a").status_code == 401
    assert router.client.get("/v1/models").status_code == 401
    assert router.client.get("/health").status_code == 200
    for headers in ({"Authorization": "Bearer two"}, {"x-api-key": "one"}):
        body = {"model": "a", "prompt": "Hi"}
        assert router.client.post("/v1/completions", json=body, headers=headers).status_code == 200
    scopes = {request.scope for request in router.toys.service("a").requests}
    assert len(scopes) == 2  # each key has its own cached prefixes
    found = router.client.get("/metrics", headers={"x-api-key": "one"}).text
    assert 'urdir_steps_total{model="a"} 12.0' in found


def test_metrics_have_the_model_as_a_label(start: Start) -> None:
    router = start("a", 'b"', "c")
    router.text("a")
    router.text('b"')
    text = router.client.get("/metrics").text
    assert 'urdir_steps_total{model="a"} 12.0' in text
    assert 'urdir_steps_total{model="b\\""} 12.0' in text
    assert 'urdir_model_loaded{model="c"} 0.0' in text
    assert 'urdir_model_loads_total{model="a"} 1.0' in text
    route = 'route="/v1/completions",status="200"'
    assert f"urdir_router_http_responses_total{{{route}}} 2.0" in text
    assert f'urdir_http_responses_total{{model="a",{route}}} 1.0' in text
    assert text.count("# TYPE urdir_steps_total counter") == 1


def test_facts_are_of_loaded_models(start: Start) -> None:
    router = start("a", "b")
    refused = router.client.get("/props?model=a")
    assert refused.json()["error"]["code"] == "model_not_loaded"
    router.text("a")
    assert router.client.get("/props?model=a").json()["default_generation_settings"]["n_ctx"] == 512
    assert router.client.get("/slots?model=a").status_code == 200
    assert router.client.head("/props?model=a").status_code == 200
    assert router.client.get("/nothing").json()["error"]["code"] == "unknown_endpoint"
    assert router.client.get("/version").json().keys() == {"version"}
    asked = {"model": "a", "messages": [{"role": "user", "content": "Hi"}]}
    counted = router.client.post("/v1/chat/completions/input_tokens", json=asked)
    assert counted.json()["input_tokens"] > 0


def test_kept_responses_are_found(start: Start) -> None:
    router = start("a", "b", "c")
    http = router.client
    router.text("a")
    first = http.post("/v1/responses", json={"model": "b", "input": "Hi"}).json()
    assert http.get(f"/v1/responses/{first['id']}").json()["model"] == "b"
    items = http.get(f"/v1/responses/{first['id']}/input_items").json()["data"]
    assert items[0]["content"][0]["text"] == "Hi"
    cancelled = http.post(f"/v1/responses/{first['id']}/cancel")
    assert "can be cancelled" in cancelled.json()["error"]["message"]
    assert http.delete(f"/v1/responses/{first['id']}").json()["deleted"] is True
    assert http.get(f"/v1/responses/{first['id']}").status_code == 404
    gate = held(router, "b")
    body = {"model": "b", "input": "Hi", "background": True, "stream": True}
    with http.stream("POST", "/v1/responses", json=body) as response:
        line = next(line for line in response.iter_lines() if line.startswith("data: "))
    name = json.loads(line[6:])["response"]["id"]
    asked = {"stream": "true", "starting_after": "1"}
    with http.stream("GET", f"/v1/responses/{name}", params=asked) as response:
        lines = response.iter_lines()
        next(lines)
        assert router.toys.service("b").running == 1  # each comes as it is made
        gate.open()
        *_, last = (line for line in lines if line.startswith("event: "))
    assert last in ("event: response.completed", "event: response.incomplete")


def test_models_come_and_go(start: Start) -> None:
    router = start("a", "b")
    router.text("a")
    router.specs[:] = [spec("b"), spec("new", others=("new.gguf",))]
    assert router.text("new.gguf") == "I am new."
    assert router.text("a") == "I am a."  # as long as it is loaded
    router.unreadable = "/models: Permission denied"
    assert router.ask("later").status_code == 404
    router.unreadable = None
    router.call(router.fleet.unload(router.fleet.models["a"]))
    assert router.ask("a").status_code == 404


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


def test_an_unload_waits_for_open_answers(start: Start) -> None:
    router = start("a", "b")
    gate = held(router, "a")
    thread, found = router.in_thread(lambda: router.ask("a"))
    router.wait_for(lambda: router.toys.service("a").running == 1)
    unloading, unloaded = router.in_thread(
        lambda: router.client.post("/models/unload", json={"model": "a"})
    )
    router.wait_for(lambda: router.fleet.models["a"].leaves)
    gate.open()
    for each in (thread, unloading):
        each.join(PATIENCE)
    assert unloaded[0].json() == {"success": True}
    assert found[0].json()["choices"][0]["text"] == "I am a."
    assert router.status("a") == "unloaded"


def test_one_model_needs_no_name(start: Start) -> None:
    router = start(spec("a", any_name=True))
    assert router.ask(None).status_code == 200
    assert router.ask("a").status_code == 200
    refused = router.ask("b")  # as the model's server has it
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


def test_loads_beside_each_other_do_not_block(start: Start) -> None:
    """Another model answers while one is loaded."""
    router = start("a", "b")
    router.text("a")
    router.toys.load_seconds = LONG
    thread, found = router.in_thread(lambda: router.ask("b"))
    router.wait_for(lambda: router.status("b") == "loading")
    assert router.text("a") == "I am a."
    assert router.status("b") == "loading"
    router.toys.load_seconds = 0.0
    thread.join(PATIENCE)
    assert found[0].status_code == 200


def test_an_unload_goes_on_without_its_client(start: Start) -> None:
    router = start("a", "b")
    gate = held(router, "a")
    thread, found = router.in_thread(lambda: router.ask("a"))
    router.wait_for(lambda: router.toys.service("a").running == 1)

    async def unload_and_leave() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.01):
                await router.fleet.unload(router.fleet.models["a"])

    router.call(unload_and_leave())
    assert router.fleet.models["a"].leaves
    gate.open()
    assert router.text("a") == "I am a."  # loaded again, once the first was answered
    thread.join(PATIENCE)
    assert found[0].json()["choices"][0]["text"] == "I am a."
    assert router.toys.started == ["a", "a"]


def test_a_load_that_waits_for_its_turn_can_be_stopped(start: Start) -> None:
    router = start("a", "b", load_seconds=LONG)
    http = router.client
    for name in "ab":
        http.post("/models/load", json={"model": name})
    listed = http.get("/models").json()["data"]
    assert [each["status"]["value"] for each in listed] == ["loading", "loading"]
    http.post("/models/unload", json={"model": "b"})
    assert http.get("/v1/models/b").json()["status"] == {"value": "unloaded"}
    router.toys.load_seconds = 0.0
    router.wait_for(lambda: router.status("a") == "loaded")
    assert router.toys.started == ["a"]


def test_a_failed_load_without_requests_is_no_unhandled_error(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    router = start("a", spec("b", load_on_startup=True))
    router.toys.failing |= {"a": "broken", "b": "broken"}
    router.client.post("/models/load", json={"model": "a"})
    router.wait_for(lambda: router.fleet.models["a"].cause is not None)
    router.server.should_exit = True
    router.wait_for(lambda: not router.fleet._tasks)
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_idle_for_no_time_at_all(start: Start) -> None:
    router = start(spec("a", idle_seconds=0), "b")
    assert router.text("a") == "I am a."
    router.wait_for(lambda: router.status("a") == "unloaded")
    assert router.text("a") == "I am a."


def test_models_take_turns(start: Start) -> None:
    """A model is not evicted before the requests that it was loaded for are answered."""
    router = start("a", "b", "c", loaded=1, load_seconds=LONG, patience_seconds=0.05)
    asked = [router.in_thread(lambda name=name: router.ask(name)) for name in "abcabcabc"]
    router.wait_for(lambda: router.fleet.waiting == 9)
    router.toys.load_seconds = 0.0
    for thread, found in asked:
        thread.join(PATIENCE)
        assert found[0].status_code == 200
    assert sorted(router.toys.started) == ["a", "b", "c"]


def test_responses_in_the_background_are_not_cut_off(start: Start) -> None:
    router = start("a", "b", loaded=1, patience_seconds=0.01)
    gate = held(router, "a")
    body = {"model": "a", "input": "Hi", "background": True, "stream": True}
    with router.client.stream("POST", "/v1/responses", json=body) as response:
        lines = response.iter_lines()
        begun = json.loads(next(line for line in lines if line.startswith("data: "))[6:])
    assert router.status("a") == "loaded"
    thread, found = router.in_thread(lambda: router.ask("b"))
    name = begun["response"]["id"]
    router.wait_for(lambda: router.fleet.waiting == 1)
    with router.client.stream("GET", f"/v1/responses/{name}?stream=true") as response:
        lines = response.iter_lines()
        next(lines)
        gate.open()
        kinds = [line for line in lines if line.startswith("event: ")]
    assert kinds[-1] == "event: response.completed"
    thread.join(PATIENCE)
    assert found[0].status_code == 200
    assert router.status("a") == "unloaded"
    assert router.toys.service("a").cancelled == 0


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


def test_ollamas_clients_unload_a_model(start: Start) -> None:
    router = start("a", "b")
    http = router.client
    for path, said in (
        ("/api/generate", {"response": ""}),
        ("/api/chat", {"message": {"role": "assistant", "content": ""}}),
    ):
        router.text("a")
        answer = http.post(path, json={"model": "a:latest", "keep_alive": 0}).json()
        assert answer.pop("created_at")
        assert answer == {"model": "a", **said, "done": True, "done_reason": "unload"}
        assert router.status("a") == "unloaded"
    http.post("/api/generate", json={"model": "b", "keep_alive": 0, "prompt": ""})
    for spelt in (
        b'{"model": "b", "keep_alive":0, "messages" : [ ] }',
        b'{"model":"b","keep_alive":"0"}',
    ):
        said = http.post("/api/chat", content=spelt, headers={"content-type": "application/json"})
        assert said.json()["done_reason"] == "unload"
    assert "b" not in router.toys.started
    asked = {"model": "a", "prompt": "Hi", "stream": False}
    assert http.post("/api/generate", json={**asked, "keep_alive": "0s"}).json()["response"]
    router.wait_for(lambda: router.status("a") == "unloaded")
    assert http.post("/api/generate", json={"model": "b", "keep_alive": "x"}).status_code == 200
    assert router.status("b") == "loaded"  # a request without a text loads it


@pytest.mark.parametrize(
    ("value", "ends"),
    [
        (0, True), (0.0, True), ("0", True), ("0s", True), ("0h0m0.0s", True), ("-0m", True),
        (-1, False), (300, False), ("10m", False), ("", False), ("s", False), (None, False),
        (False, False), ([0], False), ({"a": 0}, False), ("0x", False),
    ],
)  # fmt: skip
def test_which_keep_alive_is_zero(value: Any, ends: bool) -> None:
    body = json.dumps({"model": "a", "keep_alive": value, "messages": ["x"]}).encode()
    for path in ("/api/chat", "/api/embed"):
        assert (KeepAlive(path, body).ends, KeepAlive(path, body).is_empty) == (ends, False)
    assert not KeepAlive("/v1/completions", body).ends
    assert not KeepAlive("/api/chat", b'{"keep_alive": 0').ends


@contextlib.contextmanager
def watching(router: RunningRouter) -> Iterator[Iterator[dict[str, Any]]]:
    """The events of /models/sse as they come."""
    with router.client.stream("GET", "/models/sse") as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert reply.headers["x-accel-buffering"] == "no"
        lines = (line for line in reply.iter_lines() if line.startswith("data: "))
        router.wait_for(lambda: bool(router.server.server_state.tasks))
        yield (json.loads(line[6:]) for line in lines)


def test_changes_of_models_are_streamed(start: Start) -> None:
    router = start("a", "b", load_seconds=0.05, limits=Limits(pulse_seconds=0.2))
    router.toys.failing["b"] = "it has no tensor 'x'"
    with watching(router) as events:
        thread, answers = router.in_thread(
            lambda: httpx.post(
                f"{router.url}/v1/completions",
                json={"model": "a", "prompt": "Hi", "max_tokens": 9},
                timeout=PATIENCE,
            )
        )
        first, second = next(events), next(events)
        assert first == {"model": "a", "event": "status_change", "data": {"status": "loading"}}
        assert (second["model"], second["data"]["status"]) == ("a", "loaded")
        assert second["data"]["info"] == router.client.get("/v1/models/a").json()
        thread.join(PATIENCE)
        assert answers[0].status_code == 200
        for name in ("b", "a"):
            way = "load" if name == "b" else "unload"
            assert router.client.post(f"/models/{way}", json={"model": name}).is_success
        seen = [next(events) for _ in range(3)]
        assert [(each["model"], each["data"]) for each in seen if each["model"] == "b"] == [
            ("b", {"status": "loading"}),
            ("b", {"status": "unloaded", "failed": True, "cause": "it has no tensor 'x'"}),
        ]
        assert {"model": "a", "event": "status_change", "data": {"status": "unloaded"}} in seen
        router.specs.append(spec("c"))
        assert len(router.client.get("/models").json()["data"]) == 3
        assert next(events) == {"model": "*", "event": "models_reload"}
    router.wait_for(lambda: not router.server.server_state.tasks)  # the client is gone


def test_a_model_may_go_while_its_events_are_sent() -> None:
    """To a client that does not read."""

    async def check() -> None:
        fleet = Fleet(lambda: [spec("a"), spec("b")], RouterSettings(), dict)
        await fleet.refresh()
        events = model_events(fleet, 60)
        first = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        for name in ("a", "b"):
            fleet.models[name].status = "loaded"
        fleet.changes.notify()
        found = [await first]
        fleet.models.clear()
        fleet.changes.notify()
        found += [await anext(events) for _ in range(2)]
        names = [json.loads(event.removeprefix(b"data: "))["model"] for event in found]
        assert names == ["a", "b", "*"]
        await events.aclose()
        await fleet.close(aborts=True)

    asyncio.run(check())


def test_a_stream_of_changes_does_not_hold_up_the_end(start: Start) -> None:
    """It is silent before, which a comment says."""
    router = start("a", limits=Limits(pulse_seconds=0.05))
    with router.client.stream("GET", "/models/sse") as reply:
        lines = reply.iter_lines()
        assert next(lines) == ": still here"
        router.server.should_exit = True
        assert [line for line in lines if line not in ("", ": still here")] == []
