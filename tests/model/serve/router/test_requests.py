"""Several models behind one server: who answers, what is passed on, what the router says."""

from __future__ import annotations

import json

import openai

from tests.model.serve.router.toys import Start, held, spec, streamed
from urdir.model.serve.access import Access


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


def test_one_model_needs_no_name(start: Start) -> None:
    router = start(spec("a", any_name=True))
    assert router.ask(None).status_code == 200
    assert router.ask("a").status_code == 200
    refused = router.ask("b")  # as the model's server has it
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
