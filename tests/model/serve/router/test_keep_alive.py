"""Ollama's clients unload models by `keep_alive`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.model.serve.router.toys import Start
from urdir.model.serve.router.keep_alive import KeepAlive


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
