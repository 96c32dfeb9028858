"""/v1/chat/completions: forms of answers, calls of tools, reasoning."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import openai
import pytest

from tests.model.serve.chats import CALLS, HERMES, HI, TIME, WEATHER, ask
from urdir.model.text.answers import AnswerFormat


def test_response_formats(server: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    server.service.answer = '{"a": 5}'
    ask(server, response_format={"type": "text"})
    ask(server, response_format={"type": "json_object"})
    named = {"name": "thing", "schema": schema, "strict": True}
    ask(server, response_format={"type": "json_schema", "json_schema": named})
    for structured in ({"regex": "[0-9]+"}, {"choice": ["a", "b"]}, {"json": schema}):
        ask(server, extra_body={"structured_outputs": structured})
    server.openai().completions.create(
        model="toy", prompt="Hi", extra_body={"structured_outputs": {"grammar": 'start: "x"'}}
    )
    thinks_first = True
    assert [request.constraint for request in server.service.requests] == [
        None,
        ("json_object", None, thinks_first),
        ("json_schema", schema, thinks_first),
        ("regex", "[0-9]+", thinks_first),
        ("choice", ["a", "b"], thinks_first),
        ("json_schema", schema, thinks_first),
        ("grammar", 'start: "x"', not thinks_first),
    ]


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/completions"])
def test_other_names_of_forms(server: Any, endpoint: str) -> None:
    """vLLM's old ones and llama-server's."""
    is_chat = endpoint == "/v1/chat/completions"
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    asked: list[tuple[dict[str, Any], object]] = [
        ({"guided_json": schema}, ("json_schema", schema)),
        ({"guided_json": json.dumps(schema)}, ("json_schema", schema)),
        ({"guided_regex": "[0-9]+"}, ("regex", "[0-9]+")),
        ({"guided_choice": ["a", "b"]}, ("choice", ["a", "b"])),
        ({"guided_grammar": 'start: "x"'}, ("grammar", 'start: "x"')),
        ({"json_schema": schema}, ("json_schema", schema)),
        ({"json_schema": {}}, ("json_schema", {})),
        ({"grammar": 'root ::= "x"'}, ("grammar", 'root ::= "x"')),
        ({"structured_outputs": {"json": json.dumps(schema)}}, ("json_schema", schema)),
        (
            {"response_format": {"type": "json_object", "schema": schema}},
            ("json_schema", schema),
        ),
        (
            {"response_format": {"type": "json_schema", "schema": schema}},
            ("json_schema", schema),
        ),
        (
            {"guided_json": schema, "guided_whitespace_pattern": "[ ]?"},
            ("json_schema", {**schema, "x-guidance": {"whitespace_pattern": "[ ]?"}}),
        ),
        (
            {"structured_outputs": {"json_object": True, "whitespace_pattern": ""}},
            ("json_schema", {"type": "object", "x-guidance": {"whitespace_pattern": ""}}),
        ),
        ({"grammar": "", "guided_json": None, "response_format": {"type": "text"}}, None),
    ]
    start = {"messages": HI} if is_chat else {"prompt": "Hi"}
    for body, wanted in asked:
        reply = server.http().post(endpoint, json={**start, **body})
        assert reply.status_code == 200, reply.text
        constraint = server.service.requests[-1].constraint
        assert constraint == (wanted and (*wanted, is_chat)), body


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"grammar": 'root ::= "x"', "guided_regex": "a"}, "grammar"),
        ({"response_format": {"type": "text"}, "json_schema": {}}, "json_schema"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[" * 5000}, "guided_json"),
        ({"guided_json": "5"}, "guided_json"),
        ({"json_schema": [1]}, "json_schema"),
        ({"guided_choice": [""]}, "guided_choice"),
        ({"guided_regex": "a", "guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        (
            {
                "structured_outputs": {
                    "json": {},
                    "whitespace_pattern": " ",
                    "disable_any_whitespace": True,
                }
            },
            "structured_outputs.disable_any_whitespace",
        ),
        ({"grammar": "x" * 70_000}, "grammar"),
        ({"guided_json": {"enum": ["x" * 70_000]}}, "guided_json"),
        ({"response_format": {"type": "json_object", "schema": 5}}, "response_format.schema"),
        (
            {"tools": [TIME], "tool_choice": "required", "grammar": 'root ::= "x"'},
            "grammar",
        ),
    ],
)
def test_forms_that_are_refused(server: Any, body: dict[str, Any], param: str) -> None:
    reply = server.http().post("/v1/chat/completions", json={"messages": HI, **body})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param
    assert server.service.requests == []


def test_a_constraint_that_does_not_compile(server: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="the expression has no end") as caught:
        ask(server, extra_body={"structured_outputs": {"regex": "("}})
    assert caught.value.code == "invalid_constraint"


@pytest.mark.parametrize("stream", [False, True])
def test_calls_and_reasoning_are_kept_apart(server: Any, stream: bool) -> None:
    server.service.answer = CALLS
    server.service.model.answer_format = HERMES
    answer = ask(server, tools=[WEATHER, TIME], stream=stream)
    if stream:
        deltas = [(c.choices[0].delta, c.choices[0].finish_reason) for c in answer]
        reasoning = "".join(getattr(d, "reasoning_content", None) or "" for d, _ in deltas)
        assert not any(d.content for d, _ in deltas)
        parts = [call for d, _ in deltas for call in d.tool_calls or []]
        calls = [part for part in parts if part.id]
        assert [call.index for call in calls] == [0, 1]
        assert len(parts) > 6  # arguments come as they are written
        for part in parts:
            if not part.id:
                calls[part.index].function.arguments += part.function.arguments
        finish = deltas[-1][1]
    else:
        message = answer.choices[0].message
        assert message.content is None
        reasoning, calls = message.reasoning_content, message.tool_calls
        finish = answer.choices[0].finish_reason
    assert reasoning == "Where?"
    assert server.service.requests[0].shown == HERMES.shown
    assert [(c.function.name, json.loads(c.function.arguments)) for c in calls] == [
        ("weather", {"city": "Ur"}),
        ("time", {}),
    ]
    assert finish == "tool_calls"


def test_tokens_of_reasoning_are_counted(server: Any) -> None:
    """The same in each protocol; models that do not reason have no such count."""
    tokens = server.model.tokenizer.encode(CALLS)
    server.service.answer = CALLS
    assert ask(server).usage.completion_tokens_details is None
    server.model.answer_format = HERMES
    usage = ask(server).usage
    found = usage.completion_tokens_details.reasoning_tokens
    assert 0 < found < usage.completion_tokens == len(tokens)
    [*_, last] = ask(server, stream=True, stream_options={"include_usage": True})
    assert last.usage == usage
    two = ask(server, n=2).usage
    assert two.completion_tokens_details.reasoning_tokens == 2 * found
    told = {"max_tokens": 99, "messages": [{"role": "user", "content": "Hi"}]}
    for stream in (False, True):
        reply = server.http().post("/v1/messages", json={**told, "stream": stream}).text
        assert f'"output_tokens_details":{{"thinking_tokens":{found}}}' in reply
    responses = server.openai().responses.create(model="toy", input="Hi")
    assert responses.usage.output_tokens_details.reasoning_tokens == found


def test_one_call_at_a_time(server: Any) -> None:
    server.service.answer = CALLS
    server.service.model.answer_format = HERMES
    message = ask(server, tools=[WEATHER, TIME], parallel_tool_calls=False).choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["weather"]


def test_calls_that_are_required(server: Any) -> None:
    nothing = {"type": "object", "properties": {}}
    schemas = {"weather": WEATHER["function"]["parameters"], "time": nothing}
    named = {"type": "function", "function": {"name": "weather"}}
    for more in ({}, {"parallel_tool_calls": False}):
        for choice in ("required", named, "auto", "none"):
            ask(server, tools=[WEATHER, TIME], tool_choice=choice, **more)
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": 1}}}
    ask(server, tools=[WEATHER, TIME], tool_choice="required", response_format=form)
    many, one = True, False
    assert [request.constraint for request in server.service.requests] == [
        (schemas, None, many),
        (schemas, "weather", many),
        None,
        None,
        (schemas, None, one),
        (schemas, "weather", one),
        None,
        None,
        (schemas, None, many),  # a form is that of a text, which there is none of
    ]


def test_reasoning_is_limited(server: Any) -> None:
    """By any of the names, or by the server's own limit."""
    model = server.service.model
    model.answer_format, usual = HERMES, model.defaults
    try:
        for name in ("thinking_budget_tokens", "reasoning_budget_tokens", "thinking_token_budget"):
            for tokens in (0, 7, -1):
                ask(server, extra_body={name: tokens})
                thoughts = server.service.requests[-1].thoughts
                assert (None if thoughts is None else thoughts.tokens) == (
                    None if tokens < 0 else tokens
                )
        model.defaults = replace(usual, thinking=5)
        ask(server)
        thoughts = server.service.requests[-1].thoughts
        assert thoughts is not None
        assert (thoughts.tokens, thoughts.ending, thoughts.is_open) == (5, "</think>", False)
        with pytest.raises(openai.BadRequestError, match="thinking_budget_tokens"):
            ask(server, extra_body={"thinking_budget_tokens": -2})
        model.answer_format = AnswerFormat()
        ask(server)
        assert server.service.requests[-1].thoughts is None
    finally:
        model.defaults = usual
