"""/v1/messages, by Anthropic's client where it is installed, and by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from urdir.model.serve.access import Access
from urdir.model.text.answers import AnswerFormat
from urdir.model.text.call_form import GENERIC
from urdir.model.text.reasoning import THINK_TAGS

HI = [{"role": "user", "content": "Hi"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [
    {"name": "weather", "description": "What it is like outside.", "input_schema": CITY},
    {"name": "time", "input_schema": {"type": "object"}},
]
CALLS = (
    '<think>Where?</think>Well.<tool_call>{"name": "weather", "arguments": {"city": "Ur"}}'
    '</tool_call><tool_call>{"name": "time", "arguments": {}}</tool_call>'
)
HERMES = AnswerFormat(replace(GENERIC), THINK_TAGS[0])
PATH = "/v1/messages"


def post(server: Any, **body: Any) -> Any:
    return server.http().post(PATH, json={"model": "toy", "messages": HI, **body})


def events(server: Any, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, whose names are their types."""
    reply = post(server, stream=True, **body)
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["x-accel-buffering"] == "no"
    found = []
    for event in reply.text.strip().split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def prompt_of(server: Any) -> str:
    tokenizer = server.service.model.tokenizer
    return str(tokenizer.decode(server.service.requests[-1].prompt, keep_control=True))


def test_an_answer(server: Any) -> None:
    answer = post(server, max_tokens=99, system="Be brief.", temperature=0.5, top_k=7).json()
    assert answer["id"].startswith("msg_")
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "toy")
    assert answer["content"] == [{"type": "text", "text": "2 plus 3 is 5."}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    [request] = server.service.requests
    assert (request.limit, request.settings.temperature, request.settings.top_k) == (99, 0.5, 7)
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(request.prompt)
    assert usage["output_tokens"] == answer["timings"]["predicted_n"] == 8
    assert "Be brief." in prompt_of(server)


def test_a_streamed_answer(server: Any) -> None:
    found = events(server)
    kinds = [event["type"] for event in found]
    deltas = [event for event in found if event["type"] == "content_block_delta"]
    assert kinds == [
        *("message_start", "content_block_start"),
        *["content_block_delta"] * len(deltas),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert "".join(event["delta"]["text"] for event in deltas) == "2 plus 3 is 5."
    assert len(deltas) == 8
    whole = post(server).json()
    last = found[-2]
    assert last["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert last["usage"] == whole["usage"]
    assert found[0]["message"].keys() | {"timings"} == whole.keys()
    assert found[0]["message"]["usage"]["input_tokens"] == len(server.service.requests[0].prompt)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"max_tokens": 3}, ("max_tokens", None)),
        ({"stop_sequences": ["is"]}, ("stop_sequence", "is")),
    ],
)
def test_why_an_answer_ends(server: Any, body: dict[str, Any], reason: tuple[str, Any]) -> None:
    answer = post(server, **body).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == reason
    delta = events(server, **body)[-2]["delta"]
    assert (delta["stop_reason"], delta["stop_sequence"]) == reason


def test_thinking_and_calls(server: Any) -> None:
    server.service.answer, server.model.answer_format = CALLS, HERMES
    whole = post(server, tools=TOOLS).json()
    *texts, weather, time = whole["content"]
    assert texts == [
        {"type": "thinking", "thinking": "Where?", "signature": ""},
        {"type": "text", "text": "Well."},
    ]
    assert (weather["name"], weather["input"]) == ("weather", {"city": "Ur"})
    assert (time["name"], time["input"], time["type"]) == ("time", {}, "tool_use")
    assert whole["stop_reason"] == "tool_use"
    assert [block["type"] for block in blocks(events(server, tools=TOOLS))] == [
        *("thinking", "text", "tool_use", "tool_use")
    ]
    one = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(post(server, tools=TOOLS, tool_choice=one).json()["content"]) == 3


def blocks(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The content blocks that a stream's events make."""
    made: list[dict[str, Any]] = []
    for event in found:
        if event["type"] == "content_block_start":
            assert event["index"] == len(made)
            made.append(event["content_block"] | {"all": ""})
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(made) - 1
            delta = event["delta"]
            made[-1]["all"] += delta.get("text", delta.get("thinking", delta.get("partial_json")))
    return made


def test_the_whole_conversation_reaches_the_template(server: Any) -> None:
    server.model.answer_format = HERMES
    call = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Ur"}}
    talk = [
        {"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "T"}, call]},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "And now?"},
                {"type": "tool_result", "tool_use_id": "c1", "content": "wet"},
            ],
        },
    ]
    answer = post(server, messages=talk, tools=TOOLS, system=[{"type": "text", "text": "S"}])
    assert answer.status_code == 200, answer.text
    prompt = prompt_of(server)
    places = [prompt.index(text) for text in ("S", "A\nB", '"city": "Ur"', "wet", "And now?")]
    assert places == sorted(places)
    counted = server.http().post(
        f"{PATH}/count_tokens",
        json={"messages": talk, "tools": TOOLS, "system": [{"type": "text", "text": "S"}]},
    )
    assert counted.json() == {"input_tokens": len(server.service.requests[-1].prompt)}


def test_a_last_message_of_the_assistants_goes_on(server: Any) -> None:
    post(server, messages=[*HI, {"role": "assistant", "content": "2 plus"}])
    assert prompt_of(server).endswith("assistant\n2 plus")


@pytest.mark.parametrize(
    ("choice", "required"),
    [
        ({"type": "any"}, (None, True)),
        ({"type": "any", "disable_parallel_tool_use": True}, (None, False)),
        ({"type": "tool", "name": "time"}, ("time", True)),
        ({"type": "auto"}, None),
        ({"type": "none"}, None),
    ],
)
def test_tool_choice(server: Any, choice: Any, required: Any) -> None:
    assert post(server, tools=TOOLS, tool_choice=choice).status_code == 200
    [request] = server.service.requests
    schemas = {"weather": CITY, "time": {"type": "object"}}
    assert request.constraint == (required and (schemas, *required))


def test_structured_output_and_thinking(server: Any) -> None:
    form = {"format": {"type": "json_schema", "schema": CITY}, "effort": "high"}
    post(server, output_config=form, thinking={"type": "enabled", "budget_tokens": 1024})
    server.model.answer_format = HERMES
    post(server, thinking={"type": "enabled", "budget_tokens": 1024})
    first, second = server.service.requests
    assert first.constraint == ("json_schema", CITY, True)
    assert (second.thoughts.tokens, second.thoughts.ending) == (1024, "</think>")


def test_arguments_come_as_they_are_written(server: Any) -> None:
    server.service.answer, server.model.answer_format = CALLS, HERMES
    reply = post(server, tools=TOOLS, stream=True)
    lines = [line for line in reply.text.splitlines() if line.startswith("data: ")]
    deltas = [json.loads(line[6:]).get("delta", {}) for line in lines]
    pieces = [d["partial_json"] for d in deltas if d.get("type") == "input_json_delta"]
    assert len(pieces) > 4
    assert "".join(pieces) == '{"city": "Ur"}{}'


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "ghost", "content": "Boo"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": ""}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"n": 2}, "n"),
        ({"system": 5}, "system"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "no"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "some"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "yaml"}}}, "output_config.format.type"),
    ],
)
def test_refusals_have_anthropics_shape(server: Any, body: Any, named: str) -> None:
    reply = post(server, **body)
    assert reply.status_code == 400
    error = reply.json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert f"'{named}'" in error["error"]["message"]
    assert server.service.requests == []


def test_an_unknown_model_and_path(server: Any) -> None:
    assert post(server, model="other").json()["error"]["type"] == "not_found_error"
    count = server.http().post(f"{PATH}/count_tokens", json={"model": "other", "messages": HI})
    assert (count.status_code, count.json()["error"]["type"]) == (404, "not_found_error")
    reply = server.http().post(f"{PATH}/batches", json={})
    assert (reply.status_code, reply.json()["error"]["type"]) == (404, "not_found_error")


@pytest.mark.parametrize("words", [600, 3000])
def test_a_prompt_that_does_not_fit(server: Any, words: int) -> None:
    """Claude Code, LangChain and LiteLLM look for these words."""
    reply = post(server, messages=[{"role": "user", "content": "one " * words}])
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")
    assert reply.json()["error"]["message"].startswith("prompt is too long: ")


def test_a_stream_that_fails_ends_with_an_error(server: Any) -> None:
    server.service.error, server.service.good = RuntimeError("secret"), 3
    *_, last = events(server)
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    assert "secret" not in json.dumps(last)


def test_the_key_of_anthropics_clients(start: Any) -> None:
    server = start(Access(api_keys=("k",)))
    assert post(server).json()["error"]["type"] == "authentication_error"
    body = {"messages": HI}
    for key, status in (("k", 200), ("no", 401)):
        reply = server.http().post(PATH, json=body, headers={"x-api-key": key})
        assert reply.status_code == status


def test_a_client_that_leaves_ends_its_answer(server: Any) -> None:
    server.service.delay, server.service.repeat = 0.01, 10_000
    body = {"model": "toy", "messages": HI, "stream": True}
    with server.http().stream("POST", PATH, json=body) as reply:
        next(reply.iter_lines())
    server.wait_for(lambda: server.service.cancelled == 1)


# ---- the official client ----


@pytest.fixture
def client(server: Any) -> Iterator[Any]:
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def test_the_official_client(server: Any, client: Any) -> None:
    answer = client.messages.create(model="toy", max_tokens=200, messages=HI)
    assert answer.content[0].text == "2 plus 3 is 5."
    assert answer._request_id
    assert [model.id for model in client.models.list()] == ["toy", "a/b-GGUF"]
    server.service.answer, server.model.answer_format = CALLS, HERMES
    with client.messages.stream(model="toy", max_tokens=200, messages=HI, tools=TOOLS) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    whole = client.messages.create(model="toy", max_tokens=200, messages=HI, tools=TOOLS)
    drop = {"id": True, "content": {"__all__": {"id"}}, "timings": True}
    assert message.model_dump(exclude=drop) == whole.model_dump(exclude=drop)
    assert message.stop_reason == "tool_use"
    assert message.content[2].input == {"city": "Ur"}
    result = [{"type": "tool_result", "tool_use_id": message.content[2].id, "content": "wet"}]
    talk = [*HI, {"role": "assistant", "content": message.content},
            {"role": "user", "content": result}]  # fmt: skip
    count = client.messages.count_tokens(model="toy", messages=talk, tools=TOOLS)
    client.messages.create(model="toy", max_tokens=200, messages=talk, tools=TOOLS)
    assert count.input_tokens == len(server.service.requests[-1].prompt)


def test_a_stop_string_after_a_call_is_not_the_reason(server: Any) -> None:
    server.service.answer, server.model.answer_format = CALLS + " Bye.", HERMES
    body = {"tools": TOOLS, "stop_sequences": ["Bye"]}
    reason = {"stop_reason": "tool_use", "stop_sequence": None}
    assert post(server, **body).json().items() >= reason.items()
    assert events(server, **body)[-2]["delta"] == reason


def test_a_call_that_breaks_off_is_not_the_reason(server: Any) -> None:
    server.model.answer_format = HERMES
    server.service.answer = '<tool_call>{"name": "weather", "arguments": {"city": "Ur" oops'
    whole = post(server, tools=TOOLS).json()
    assert whole["content"] == [{"type": "text", "text": server.service.answer}]
    assert whole["stop_reason"] == "end_turn"
    found = events(server, tools=TOOLS)
    assert [block["type"] for block in blocks(found)] == ["tool_use", "text"]
    assert found[-2]["delta"]["stop_reason"] == "end_turn"


def test_the_prompt_is_as_long_at_the_start_as_at_the_end(server: Any) -> None:
    found = events(server)
    usages = [found[0]["message"]["usage"], found[-2]["usage"]]
    assert usages[0].keys() == usages[1].keys()
    inputs = [sum(n for name, n in usage.items() if "input" in name) for usage in usages]
    assert inputs == [len(server.service.requests[0].prompt)] * 2
