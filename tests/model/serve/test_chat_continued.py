"""/v1/chat/completions: a last message that goes on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.model.serve.chats import HERMES, HI, TIME, WEATHER, ask, prompt_of, template

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
    source = (
        "{% for m in messages %}{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n"
        "</think>{% endif %}{{ m.content }}{% endfor %}"
    )
    with template(server, source):
        server.service.model.answer_format = server.service.model.template.form
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
