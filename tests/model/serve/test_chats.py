"""/v1/chat/completions by the official client."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace
from typing import Any

import openai
import pytest

from tests.model.serve.conftest import Gate
from urdir.driver.errors import DriverError
from urdir.model.engine.requests.device_lost import DeviceLostError
from urdir.model.engine.sampling_settings import SamplingSettings
from urdir.model.errors import BusyError, ContextFullError, ModelError
from urdir.model.serve.interface import Defaults
from urdir.model.text.answers import AnswerFormat
from urdir.model.text.call_form import GENERIC
from urdir.model.text.reasoning import THINK_TAGS

HI = [{"role": "user", "content": "Hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "What it is like outside.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
CALLS = (
    '<think>Where?</think><tool_call>{"name": "weather", "arguments": {"city": "Ur"}}</tool_call>'
    '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
)
HERMES = AnswerFormat(replace(GENERIC), THINK_TAGS[0])


def ask(server: Any, **body: Any) -> Any:
    return server.openai().chat.completions.create(**{"model": "toy", "messages": HI, **body})


# ---- answers -------------------------------------------------------------------------------------


def test_an_answer(server: Any) -> None:
    answer = ask(server)
    [choice] = answer.choices
    assert choice.message.content == "2 plus 3 is 5."
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert choice.message.tool_calls is None
    [request] = server.service.requests
    model = server.service.model
    assert answer.usage.prompt_tokens == len(request.prompt)
    assert answer.usage.completion_tokens == len(model.tokenizer.encode("2 plus 3 is 5."))
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    assert model.tokenizer.decode(request.prompt, keep_control=True) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert request.limit is None


def test_a_streamed_answer_is_the_same(server: Any) -> None:
    chunks = list(ask(server, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [c.choices[0].delta.content or "" for c in chunks]
    assert "".join(texts) == "2 plus 3 is 5."
    assert len([text for text in texts if text]) == 8
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len({c.id for c in chunks}) == 1
    assert {c.object for c in chunks} == {"chat.completion.chunk"}
    assert all(c.usage is None for c in chunks)


def test_streamed_usage_comes_last(server: Any) -> None:
    chunks = list(ask(server, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage == ask(server).usage
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_the_async_client(server: Any) -> None:
    async def talk() -> tuple[str, str]:
        async with server.async_openai() as client:
            whole = await client.chat.completions.create(model="toy", messages=HI)
            parts = await client.chat.completions.create(model="toy", messages=HI, stream=True)
            streamed = [chunk.choices[0].delta.content or "" async for chunk in parts]
            return whole.choices[0].message.content, "".join(streamed)

    assert asyncio.run(talk()) == ("2 plus 3 is 5.",) * 2


@pytest.mark.parametrize("stream", [False, True])
def test_several_answers(server: Any, stream: bool) -> None:
    answer = ask(server, n=3, seed=-1, stream=stream)
    texts = ["", "", ""]
    if stream:
        for chunk in answer:
            choice = chunk.choices[0]
            texts[choice.index] += choice.delta.content or ""
    else:
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        texts = [choice.message.content for choice in answer.choices]
        requests = server.service.requests
        assert answer.usage.prompt_tokens == len(requests[0].prompt)
        assert answer.usage.completion_tokens == 24
    assert texts == ["2 plus 3 is 5."] * 3
    settings = [request.settings for request in server.service.requests]
    assert {s.seed for s in settings} == {2**64 - 1}
    assert sorted(s.nonce for s in settings) == [0, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities(server: Any, stream: bool) -> None:
    answer = ask(server, logprobs=True, top_logprobs=2, stream=stream)
    if stream:
        content = [t for c in answer if (p := c.choices[0].logprobs) for t in p.content]
    else:
        content = answer.choices[0].logprobs.content
    tokenizer = server.service.model.tokenizer
    assert "".join(token.token for token in content) == "2 plus 3 is 5."
    assert [bytes(token.bytes) for token in content] == [
        tokenizer.token_bytes(i) for i in tokenizer.encode("2 plus 3 is 5.")
    ]
    assert all(token.logprob == -0.5 for token in content)
    assert all([top.logprob for top in token.top_logprobs] == [-0.5, -1.5] for token in content)


# ---- parameters ----------------------------------------------------------------------------------


def test_every_parameter_arrives(server: Any) -> None:
    ask(
        server,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        logit_bias={"5": 3, "7": -100},
        seed=11,
        max_tokens=99,
        max_completion_tokens=5.0,  # as JavaScript's forms and sliders may have it
        stop=["x", "yz"],
        user="someone",
        extra_body={
            "top_k": 7,
            "min_p": 0.125,
            "repetition_penalty": 1.5,
            "min_tokens": 2,
            "ignore_eos": True,
            "some_field_of_tomorrow": {"a": 1},
        },
    )
    [request] = server.service.requests
    settings = request.settings
    assert (settings.temperature, settings.top_p, settings.top_k) == (0.5, 0.9, 7)
    assert (settings.min_p, settings.repeat_penalty, settings.repeat_last_n) == (0.125, 1.5, -1)
    assert (settings.presence_penalty, settings.frequency_penalty) == (0.25, -0.5)
    assert (settings.logit_bias, settings.seed) == (((5, 3.0), (7, -100.0)), 11)
    assert settings.logprobs is None
    assert (request.limit, settings.min_tokens, request.stops) == (5, 2, ("x", "yz"))
    assert request.ignore_end


def test_the_defaults_are_openais_and_seeds_are_drawn(server: Any) -> None:
    ask(server)
    ask(server, extra_body={"repeat_penalty": 1.25, "max_tokens": -1, "top_k": -1})
    first, second = server.service.requests
    assert (first.settings.temperature, first.settings.top_p) == (1.0, 1.0)
    assert (first.settings.top_k, first.settings.min_p) == (0, 0.0)
    assert first.settings.seed != second.settings.seed
    assert (second.settings.repeat_penalty, second.settings.repeat_last_n) == (1.25, 64)
    assert (second.limit, second.settings.top_k) == (None, 0)


def test_what_the_server_was_started_with_holds_where_a_request_is_silent(server: Any) -> None:
    settings = SamplingSettings(
        temperature=0.6, top_k=20, top_p=0.95, min_p=0.0, seed=5, logit_bias=((3, 1.0),)
    )
    server.model.defaults = Defaults(settings, limit=3)
    assert ask(server).usage.completion_tokens == 3
    more = {"top_k": -1, "max_tokens": 2}
    ask(server, temperature=1, seed=6, logit_bias={}, extra_body=more)
    server.http().post("/v1/completions", json={"prompt": "Hi"})
    first, second, third = server.service.requests
    assert (first.settings, first.limit) == (settings, 3)
    assert (third.settings, third.limit) == (settings, 3)
    assert second.settings == replace(settings, temperature=1, top_k=0, seed=6, logit_bias=())
    assert second.limit == 2


def test_length_and_stop_strings_end_answers(server: Any) -> None:
    cut = ask(server, max_tokens=3).choices[0]
    assert (cut.message.content, cut.finish_reason) == ("2 plus ", "length")
    stopped = ask(server, stop="is").choices[0]
    assert (stopped.message.content, stopped.finish_reason) == ("2 plus 3 ", "stop")
    assert stopped.stop_reason == "is"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"n": 1.5}, "n"),
        ({"n": 1e300}, "n"),
        ({"seed": 2**64}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"logit_bias": {"one": 1}}, "logit_bias"),
        ({"logit_bias": {"٣": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"functions": [{}]}, "functions"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [{"role": "ghost", "content": "Boo"}]}, "messages[0].role"),
        ({"messages": [{"content": "Boo"}]}, "messages[0].role"),
        ({"messages": [*HI, {"role": "user"}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [{"type": "shell"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [WEATHER] * 129}, "tools"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        (
            {"tools": [TIME], "tool_choice": {"type": "function", "function": {"name": "no"}}},
            "tool_choice.function.name",
        ),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs."),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ],
)
def test_bad_fields_are_refused_by_name(server: Any, body: dict[str, Any], param: str) -> None:
    reply = server.http().post("/v1/chat/completions", json={"messages": HI, **body})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert param in error["message"]
    assert server.service.requests == []


def test_large_schemas_are_refused(server: Any) -> None:
    schema = {"type": "string", "enum": ["x" * 70_000]}
    with pytest.raises(openai.BadRequestError) as caught:
        ask(
            server,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "big", "schema": schema},
            },
        )
    assert caught.value.code == "schema_too_large"


# ---- forms of answers ----------------------------------------------------------------------------


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


# ---- a last message that goes on -----------------------------------------------------------------


def prompt_of(server: Any) -> str:
    """The text of the last request's prompt."""
    model, request = server.service.model, server.service.requests[-1]
    return str(model.tokenizer.decode(request.prompt, keep_control=True))


OPEN = [*HI, {"role": "assistant", "content": "2 plus "}]


@pytest.mark.parametrize(
    "body", [{}, {"continue_final_message": True, "add_generation_prompt": False}]
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_last_message_of_the_assistant_is_continued(
    server: Any, body: dict[str, Any], stream: bool
) -> None:
    server.service.answer = "3 is 5."
    answer = ask(server, messages=OPEN, stream=stream, extra_body=body)
    if stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
    else:
        text = answer.choices[0].message.content
    assert text == "3 is 5."
    assert prompt_of(server) == ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n2 plus ")
    http = server.http()
    tokens = http.post("/tokenize", json={"messages": OPEN, **body}).json()["tokens"]
    assert tuple(tokens) == server.service.requests[-1].prompt


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_of_the_message_that_goes_on(server: Any, stream: bool) -> None:
    server.service.answer = "3 is 5."
    for messages, whole in ((OPEN, "2 plus 3 is 5."), (HI, "3 is 5.")):
        answer = ask(server, messages=messages, stream=stream, extra_body={"echo": True})
        if stream:
            text = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
        else:
            text = answer.choices[0].message.content
        assert text == whole


def test_a_last_message_of_the_assistant_that_is_closed(server: Any) -> None:
    closed = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n2 plus <|im_end|>\n"
    ask(server, messages=OPEN, extra_body={"continue_final_message": False})
    assert prompt_of(server) == closed + "<|im_start|>assistant\n"
    ask(server, messages=OPEN, extra_body={"add_generation_prompt": True})
    assert prompt_of(server) == closed + "<|im_start|>assistant\n"
    ask(server, messages=OPEN, extra_body={"add_generation_prompt": False})
    assert prompt_of(server) == closed


def test_what_was_begun_is_parsed_with_the_rest(server: Any) -> None:
    """A call whose beginning was written for the model."""
    server.service.model.answer_format = HERMES
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Ur"}}</tool_call>'
    for cut in (5, 11, 30, len(call) - 3):
        begun = {"role": "assistant", "content": "I look." + call[:cut]}
        server.service.answer = call[cut:]
        message = ask(server, messages=[*HI, begun], tools=[WEATHER]).choices[0].message
        assert message.content is None
        assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Ur"}
    server.service.answer = " hm.</think>Yes"
    begun = {"role": "assistant", "content": "<think>Let me"}
    message = ask(server, messages=[*HI, begun]).choices[0].message
    assert (message.reasoning_content, message.content) == (" hm.", "Yes")


def test_thoughts_go_on(server: Any) -> None:
    template = server.service.model.template
    source = (
        "{% for m in messages %}{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n"
        "</think>{% endif %}{{ m.content }}{% endfor %}"
    )
    original, template.source = template.source, source
    try:
        server.service.model.answer_format = template.form
        server.service.answer = " see.</think>Yes"
        for name in ("reasoning", "reasoning_content"):
            thought = {"role": "assistant", name: "Let me"}
            message = ask(server, messages=[*HI, thought]).choices[0].message
            assert prompt_of(server) == "Hi<think>\nLet me"
            assert (message.reasoning_content, message.content) == (" see.", "Yes")
        both = {"role": "assistant", "content": "So", "reasoning_content": "Hm"}
        ask(server, messages=[*HI, both])
        assert prompt_of(server) == "Hi<think>\nHm\n</think>So"
        ask(
            server,
            messages=[*HI, both],
            extra_body={"continue_final_message": "reasoning_content"},
        )
        assert prompt_of(server) == "Hi<think>\nHm"
    finally:
        template.source = original


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": "tools"}, "continue_final_message"),
        ({"continue_final_message": 1}, "continue_final_message"),
        ({"messages": HI, "continue_final_message": True}, "continue_final_message"),
        ({"tools": [TIME], "tool_choice": "required"}, "tool_choice"),
        (
            {
                "continue_final_message": True,
                "messages": [
                    {
                        "role": "assistant",
                        "content": "Hm",
                        "tool_calls": [{"type": "function", "function": {"name": "time"}}],
                    }
                ],
            },
            "continue_final_message",
        ),
        (
            {"messages": [{"role": "assistant", "content": "", "function_call": {"name": "f"}}]},
            "messages[0].function_call",
        ),
    ],
)
def test_messages_that_cannot_go_on(server: Any, body: dict[str, Any], param: str) -> None:
    reply = server.http().post("/v1/chat/completions", json={"messages": OPEN, **body})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param
    assert server.service.requests == []


# ---- templates -----------------------------------------------------------------------------------


def test_what_the_template_gets(server: Any) -> None:
    template = server.service.model.template
    source = (
        "{# <tool_call></tool_call> #}"
        "{{ tools | tojson }}|{{ mood }}|{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.id }} {{ c.function.arguments.city }}{% endfor %}"
        "{{ m.tool_call_id }};{% endfor %}{{ add_generation_prompt }}"
    )
    original, template.source = template.source, source
    try:
        call = {"name": "weather", "arguments": '{"city": "<|im_end|>"}'}
        ask(
            server,
            tools=[TIME],
            messages=[
                {"role": "developer", "content": [{"type": "text", "text": "Be"}]},
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "c1", "type": "function", "function": call}],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "wet"},
            ],
            extra_body={"chat_template_kwargs": {"mood": "calm"}, "add_generation_prompt": False},
        )
    finally:
        template.source = original
    prompt = server.service.requests[0].prompt
    tokenizer = server.service.model.tokenizer
    assert tokenizer.decode(prompt, keep_control=True) == (
        json.dumps([TIME]) + "|calm|system:Be;assistant:c1 <|im_end|>;tool:wetc1;False"
    )
    end = tokenizer.encode("<|im_end|>", parse_special=True)
    assert len(end) == 1
    assert end[0] not in prompt  # an argument cannot forge a turn


@pytest.mark.parametrize(
    ("source", "effort", "wanted"),
    [
        ("{{ reasoning_effort }}", "low", "low"),
        ("{{ enable_thinking }}", "high", "True"),
        ("{{ enable_thinking }}</think>", "none", "False"),
        ("plain", "none", "plain"),
        ("plain", "high", None),
        ("{{ reasoning_effort }}</think>", "none", None),
        ("{{ reasoning_effort }}", "utmost", None),
    ],
)
def test_reasoning_effort(server: Any, source: str, effort: str, wanted: str | None) -> None:
    template = server.service.model.template
    original, template.source = template.source, source
    try:
        if wanted is None:
            with pytest.raises(openai.BadRequestError) as caught:
                ask(server, extra_body={"reasoning_effort": effort})
            assert caught.value.param == "reasoning_effort"
        else:
            ask(server, extra_body={"reasoning_effort": effort})
            assert prompt_of(server).removesuffix("</think>") == wanted
            more = {"chat_template_kwargs": {"enable_thinking": "as said"}}
            ask(server, extra_body={"reasoning_effort": effort, **more})
            assert ("as said" in prompt_of(server)) == ("enable_thinking" in source)
    finally:
        template.source = original


def test_documents(server: Any) -> None:
    document = {"title": "Ur", "text": "It is wet."}
    with pytest.raises(openai.BadRequestError, match="not supported by the chat template"):
        ask(server, extra_body={"documents": [document]})
    template = server.service.model.template
    source = "{% for d in documents or [] %}{{ d.title }}: {{ d.text }}{% endfor %}."
    original, template.source = template.source, source
    try:
        ask(server, extra_body={"documents": [document]})
        assert prompt_of(server) == "Ur: It is wet.."
    finally:
        template.source = original


@pytest.mark.parametrize(
    "source", ["{{ raise_exception('roles must alternate') }}", "{% for %}", "{{ 1 // 0 }}"]
)
def test_a_template_that_fails_is_a_bad_request(server: Any, source: str) -> None:
    template = server.service.model.template
    original, template.source = template.source, source
    try:
        with pytest.raises(openai.BadRequestError) as caught:
            ask(server)
        assert caught.value.code == "template_error"
    finally:
        template.source = original
    assert ask(server).choices[0].message.content == "2 plus 3 is 5."


def test_a_model_without_a_template_has_no_chat(server: Any) -> None:
    server.service.model.template = None
    with pytest.raises(openai.BadRequestError, match="/v1/completions"):
        ask(server)


# ---- errors of the service -----------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_429(server: Any, stream: bool) -> None:
    server.service.error = BusyError("64 requests wait, no more are taken", retry_after=2.5)
    with pytest.raises(openai.RateLimitError) as caught:
        ask(server, stream=stream)
    assert caught.value.response.headers["retry-after"] == "3"
    assert caught.value.body["message"] == "64 requests wait, no more are taken"


def test_a_prompt_that_does_not_fit(server: Any) -> None:
    for times in (500, 100_000):  # more than a template is given
        with pytest.raises(openai.BadRequestError) as caught:
            ask(server, messages=[{"role": "user", "content": "one two three " * times}])
        assert caught.value.code == "context_length_exceeded"
        is_of_context = "this model's maximum context length is 512 tokens: " in str(caught.value)
        assert is_of_context == (times == 500)
    server.service.error = ContextFullError("600 tokens exceed the context of 512 by 88")
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("kind", [ModelError, DriverError])
def test_a_failure_after_some_tokens_ends_the_stream(server: Any, kind: type[Exception]) -> None:
    server.service.error = kind("the device is lost")
    server.service.good = 3
    chunks: list[Any] = []
    with pytest.raises(openai.APIError, match="the device is lost"):
        chunks.extend(ask(server, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "2 plus "
    with pytest.raises(openai.InternalServerError, match="the device is lost"):
        ask(server)


def test_a_lost_device_is_one_line_of_the_log(
    server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """All open answers end by it: a traceback of each would say nothing more."""
    server.service.error, server.service.good = DeviceLostError("the device is gone"), 1
    with pytest.raises(openai.APIError, match="the device is gone"):
        list(ask(server, stream=True))
    [record] = [each for each in caplog.records if "the device is gone" in each.getMessage()]
    assert record.exc_info is None


def test_refusals_of_streams_are_no_errors_of_the_log(
    server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a request that waited too long, whose stream has begun with comments."""
    server.service.error, server.service.good = BusyError("it waited", 1.0), 1
    with caplog.at_level(logging.INFO), pytest.raises(openai.APIError, match="it waited"):
        list(ask(server, stream=True))
    [record] = [each for each in caplog.records if "it waited" in each.getMessage()]
    assert (record.levelno, record.exc_info) == (logging.INFO, None)


def test_what_nobody_expected_is_told_to_the_log_only(
    server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    server.service.error = ValueError("secret")
    with pytest.raises(openai.InternalServerError) as caught:
        ask(server)
    assert "secret" not in str(caught.value)
    server.wait_for(lambda: "secret" in caplog.text)


def test_one_of_several_answers_fails_and_the_others_are_cancelled(server: Any) -> None:
    service = server.service
    service.gate = Gate()
    original = service.generate

    def generate(request: Any) -> Any:
        if service.requests:
            return fails()
        return original(request)

    async def fails() -> Any:
        raise BusyError("full", 1.0)
        yield

    service.generate = generate
    with pytest.raises(openai.RateLimitError):
        ask(server, n=2)
    server.wait_for(lambda: service.running == 0)
    assert service.cancelled == 1


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
