"""/v1/chat/completions: fields of a request and their bounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import openai
import pytest

from tests.model.serve.chats import HI, TIME, WEATHER, ask
from urdir.model.engine.sampling_settings import SamplingSettings
from urdir.model.serve.interface import Defaults


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
