"""Ollama's /api, by its client where it is installed, and by hand."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import replace
from typing import Any

import pytest

from urdir.model.text.answers import AnswerFormat
from urdir.model.text.call_form import GENERIC
from urdir.model.text.fill import FillTokens
from urdir.model.text.reasoning import THINK_TAGS

HI = [{"role": "user", "content": "Hi"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Rain?", "parameters": CITY},
    }
]
CALL = (
    '<think>Where?</think>Well.<tool_call>{"name": "weather", "arguments": {"city": "Ur"}}'
    "</tool_call>"
)
HERMES = AnswerFormat(replace(GENERIC), THINK_TAGS[0])


def post(server: Any, path: str = "/api/chat", **body: Any) -> Any:
    first = {"messages": HI} if path == "/api/chat" else {"prompt": "Hi"}
    return server.http().post(path, json={"model": "toy:latest", **first, **body})


def lines(server: Any, path: str = "/api/chat", **body: Any) -> list[dict[str, Any]]:
    reply = post(server, path, **body)
    assert reply.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in reply.text.splitlines()]


def prompt_of(server: Any) -> str:
    tokenizer = server.service.model.tokenizer
    return str(tokenizer.decode(server.service.requests[-1].prompt, keep_control=True))


def test_a_chat_comes_in_lines(server: Any) -> None:
    found = lines(server)
    assert [line["done"] for line in found] == [False] * 8 + [True]
    assert "".join(line["message"]["content"] for line in found) == "2 plus 3 is 5."
    *_, last = found
    assert (last["model"], last["done_reason"], last["eval_count"]) == ("toy", "stop", 8)
    assert last["prompt_eval_count"] == len(server.service.requests[0].prompt)
    assert last["total_duration"] == pytest.approx(
        last["prompt_eval_duration"] + last["eval_duration"], abs=2
    )
    assert last["eval_duration"] > 0
    whole = post(server, stream=False).json()
    assert whole["message"] == {"role": "assistant", "content": "2 plus 3 is 5."}
    assert whole.keys() == last.keys()


def test_options(server: Any) -> None:
    options = {"temperature": 0.5, "top_k": 7, "num_predict": 3, "seed": 5, "num_ctx": 2048}
    *_, last = lines(server, options=options)
    assert (last["done_reason"], last["eval_count"]) == ("length", 3)
    [request] = server.service.requests
    settings = request.settings
    assert (settings.temperature, settings.top_k, settings.seed) == (0.5, 7, 5)
    for unlimited in (-1, -2, 0):
        whole = post(server, options={"num_predict": unlimited}, stream=False).json()
        assert (whole["message"]["content"], whole["done_reason"]) == ("2 plus 3 is 5.", "stop")
    stopped = post(server, options={"stop": ["is"]}, stream=False).json()
    assert (stopped["message"]["content"], stopped["done_reason"]) == ("2 plus 3 ", "stop")


def test_a_conversation_goes_on_from_its_tokens(server: Any) -> None:
    first = post(server, "/api/generate", system="Be brief.", stream=False).json()
    assert first["response"] == "2 plus 3 is 5."
    tokenizer = server.service.model.tokenizer
    prompt = list(server.service.requests[0].prompt)
    assert "Be brief." in prompt_of(server)
    assert first["context"] == prompt + tokenizer.encode("2 plus 3 is 5.")
    *_, last = lines(server, "/api/generate", prompt="And?", context=first["context"])
    second = server.service.requests[1].prompt
    assert list(second[: len(first["context"])]) == first["context"]
    assert last["context"][: len(second)] == list(second)
    post(server, "/api/generate", prompt="2 plus", raw=True)
    assert server.service.requests[-1].prompt == tuple(tokenizer.encode("2 plus", add_bos=True))
    server.service.model.template = None
    post(server, "/api/generate", prompt="3 plus")
    assert server.service.requests[-1].prompt == tuple(tokenizer.encode("3 plus", add_bos=True))
    refused = post(server, "/api/generate", system="Be brief.")
    assert "no chat template" in refused.json()["error"]


def test_a_gap_is_filled(server: Any) -> None:
    given = {"prompt": "def f(", "suffix": "):", "stream": False}
    refused = post(server, "/api/generate", **given)
    assert (refused.status_code, "no tokens" in refused.json()["error"]) == (400, True)
    server.model.fill = FillTokens(10, 11, 12)
    assert post(server, "/api/generate", **given).json()["response"] == "2 plus 3 is 5."
    encode = server.model.tokenizer.encode
    parts = (10, *encode("def f("), 11, *encode("):"), 12)
    assert server.service.requests[-1].prompt == (*encode("", add_bos=True), *parts)
    shown = server.http().post("/api/show", json={"model": "toy"}).json()
    assert "insert" in shown["capabilities"]


def test_thinking_and_calls(server: Any) -> None:
    server.service.answer, server.model.answer_format = CALL, HERMES
    whole = post(server, tools=TOOLS, stream=False).json()["message"]
    assert (whole["thinking"], whole["content"]) == ("Where?", "Well.")
    [call] = whole["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": {"city": "Ur"}}
    found = [line["message"] for line in lines(server, tools=TOOLS)]
    assert "".join(message.get("thinking", "") for message in found) == "Where?"
    assert [m["tool_calls"][0]["function"] for m in found if "tool_calls" in m] == [
        call["function"]
    ]
    talk = [*HI, whole, {"role": "tool", "tool_name": "weather", "content": "wet"}]
    assert post(server, messages=talk, tools=TOOLS).status_code == 200
    prompt = prompt_of(server)
    places = [prompt.index(text) for text in ("Hi", "Well.", '"city": "Ur"', "wet")]
    assert places == sorted(places)


def test_forms(server: Any) -> None:
    post(server, format="json")
    post(server, "/api/generate", format=CITY)
    assert [request.constraint for request in server.service.requests] == [
        ("json_object", None, True),
        ("json_schema", CITY, True),
    ]


def test_log_probabilities(server: Any) -> None:
    *parts, _ = lines(server, logprobs=True, top_logprobs=2)
    tokens = [token for part in parts for token in part["logprobs"]]
    assert "".join(token["token"] for token in tokens) == "2 plus 3 is 5."
    assert all(len(token["top_logprobs"]) == 2 for token in tokens)


def test_models(server: Any) -> None:
    http = server.http()
    models = http.get("/api/tags").json()["models"]
    assert [model["name"] for model in models] == ["toy", "a/b-GGUF"]
    assert models[0]["details"]["parameter_size"] == "2.0B"
    digests = [model["digest"] for model in models]
    assert all(re.fullmatch("[0-9a-f]{64}", each) for each in digests)
    assert len(set(digests)) == 2
    assert http.get("/api/ps").json()["models"][1]["digest"] == digests[1]
    assert http.get("/api/ps").json()["models"][0]["size_vram"] == models[0]["size"]
    assert http.get("/api/version").json()["version"].count(".") == 2
    shown = http.post("/api/show", json={"model": "toy"}).json()
    assert shown["model_info"]["llama.context_length"] == 512
    assert shown["capabilities"] == ["completion", "tools"]
    assert http.post("/api/show", json={"model": "no"}).status_code == 404
    loaded = post(server, "/api/generate", prompt="").json()
    assert (loaded["done"], loaded["done_reason"]) == (True, "load")
    assert server.service.requests == []


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"messages": [{"role": "ghost", "content": "Boo"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": "Look", "images": ["aa"]}]},
            "messages[0].images",
        ),
        ({"options": {"temperature": -1}}, "options.temperature"),
        ({"options": {"mirostat": 1}}, "options.mirostat"),
        ({"options": {"num_predict": -3}}, "options.num_predict"),
        ({"format": "yaml"}, "format"),
        ({"think": "much"}, "think"),
    ],
)
def test_refusals_have_ollamas_shape(server: Any, body: Any, named: str) -> None:
    reply = post(server, **body)
    assert reply.status_code == 400
    assert f"'{named}'" in reply.json()["error"]
    missing = server.http().post("/api/embed", json={"model": "toy", "input": "Hi"})
    assert (missing.status_code, "no embeddings" in missing.json()["error"]) == (400, True)
    assert server.service.requests == []


def test_a_stream_that_fails_ends_with_an_error(server: Any) -> None:
    server.service.error, server.service.good = RuntimeError("secret"), 3
    *_, last = lines(server)
    assert last == {"error": "internal error; see the server's log"}


def test_the_official_client(server: Any) -> None:
    ollama = pytest.importorskip("ollama")
    client = ollama.Client(host=server.url, trust_env=False)
    with contextlib.closing(client._client):
        talk(server, client, ollama.ResponseError)


def talk(server: Any, client: Any, refused: type[Exception]) -> None:
    assert [model.model for model in client.list().models] == ["toy", "a/b-GGUF"]
    assert client.show("toy").details.quantization_level == "Q4_K_M"
    assert client.ps().models[0].model == "toy"
    text = "".join(
        part.message.content for part in client.chat(model="toy", messages=HI, stream=True)
    )
    assert text == "2 plus 3 is 5."
    first = client.generate(model="toy", prompt="Hi")
    assert first.response == text
    assert client.generate(model="toy", prompt="And?", context=first.context).response == text
    server.service.answer, server.model.answer_format = CALL, HERMES
    answer = client.chat(model="toy", messages=HI, tools=TOOLS, think=True)
    assert answer.message.thinking == "Where?"
    assert answer.message.tool_calls[0].function.arguments == {"city": "Ur"}
    with pytest.raises(refused, match="there is no model 'no'"):
        client.chat(model="no", messages=HI)


def test_an_adapter_is_a_model(server: Any) -> None:
    server.service.model.adapters = (("poet", 0.5),)
    assert post(server, model="poet:latest").status_code == 200
    assert post(server, "/api/generate", model="poet", raw=True).status_code == 200
    assert [request.adapters for request in server.service.requests] == [(("poet", 0.5),)] * 2
    found = server.http().get("/api/tags").json()["models"]
    assert [model["name"] for model in found] == ["toy", "a/b-GGUF", "poet"]


@pytest.mark.parametrize("name", ["n", "n_cmpl", "best_of"])
def test_there_is_one_answer(server: Any, name: str) -> None:
    for is_streamed in (False, True):
        refused = post(server, stream=is_streamed, options={name: 2})
        assert (refused.status_code, refused.json()) == (
            400,
            {"error": f"'options.{name}' is not supported: there is one answer"},
        )
    assert post(server, stream=False, options={name: 1}).status_code == 200
