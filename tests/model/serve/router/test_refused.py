"""Requests that a router refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.model.serve.router.toys import RunningRouter, Start, Toys, running_router, spec
from urdir.model.serve.limits import Limits
from urdir.model.serve.router.spec import RouterSettings


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
