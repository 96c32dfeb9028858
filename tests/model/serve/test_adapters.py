"""LoRA adapters over HTTP: as models, by the field of llama-server, and their usual scales."""

from __future__ import annotations

from json import dumps
from typing import Any

import pytest

BODY = {"prompt": "Hi", "max_tokens": 2}


@pytest.fixture
def adapted(server: Any) -> Any:
    server.service.model.adapters = (("poet", 0.5), ("coder", 1.0))
    return server


def ask(server: Any, **more: Any) -> Any:
    return server.http().post("/v1/completions", json={**BODY, **more})


def chosen(server: Any, **more: Any) -> Any:
    assert ask(server, **more).status_code == 200
    return server.service.requests[-1].adapters


def test_a_request_chooses_adapters(adapted: Any) -> None:
    assert chosen(adapted) is None
    assert chosen(adapted, model="toy") is None
    assert chosen(adapted, model="poet") == (("poet", 0.5),)
    assert chosen(adapted, lora=[]) == ()
    both = [{"id": 1, "scale": -2}, {"id": 0, "scale": 0.25}]
    assert chosen(adapted, lora=both) == (("coder", -2.0), ("poet", 0.25))


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"model": "painter"}, "model"),
        ({"model": "poet", "lora": []}, "lora"),
        ({"lora": [{"id": 2, "scale": 1}]}, "lora[0].id"),
        ({"lora": [{"scale": 1}]}, "lora[0].id"),
        ({"lora": [{"id": 0}]}, "lora[0].scale"),
        ({"lora": [{"id": 0, "scale": "1"}]}, "lora[0].scale"),
        ({"lora": {"id": 0}}, "lora"),
    ],
)
def test_bad_choices_are_refused(adapted: Any, more: dict[str, Any], param: str) -> None:
    reply = ask(adapted, **more)
    assert reply.status_code == (404 if param == "model" else 400)
    assert reply.json()["error"]["param"] == param


def test_models_are_listed_with_the_adapters(adapted: Any) -> None:
    found = adapted.http().get("/v1/models").json()["data"]
    assert [model["id"] for model in found] == ["toy", "a/b-GGUF", "poet", "coder"]
    assert adapted.http().get("/v1/models/coder").json()["id"] == "coder"


def test_usual_scales(adapted: Any) -> None:
    http = adapted.http()
    rows = [
        {"id": 0, "path": "poet.gguf", "name": "poet", "scale": 0.0},
        {"id": 1, "path": "coder.gguf", "name": "coder", "scale": 0.0},
    ]
    assert http.get("/lora-adapters").json() == rows
    changed = http.post("/lora-adapters", json=[{"id": 1, "scale": 0.75}])
    assert changed.json() == [rows[0], {**rows[1], "scale": 0.75}]
    assert http.get("/lora-adapters").json() == changed.json()
    assert http.post("/lora-adapters", json=[{"id": 7, "scale": 1}]).status_code == 400
    for body in ({"id": 1}, None):
        json = {"Content-Type": "application/json"}
        reply = http.post("/lora-adapters", content=dumps(body), headers=json)
        assert reply.status_code == 400
    assert http.get("/lora-adapters").json() == changed.json()


def test_a_server_without_adapters(server: Any) -> None:
    assert chosen(server, lora=[]) == ()
    assert ask(server, lora=[{"id": 0, "scale": 1}]).status_code == 400
    assert server.http().get("/lora-adapters").json() == []
