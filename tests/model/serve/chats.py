"""Requests of /v1/chat/completions to a toy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

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


def prompt_of(server: Any) -> str:
    """The text of the last request's prompt."""
    model, request = server.service.model, server.service.requests[-1]
    return str(model.tokenizer.decode(request.prompt, keep_control=True))


@contextlib.contextmanager
def template(server: Any, source: str) -> Iterator[None]:
    """Another text of the model's chat template."""
    own = server.service.model.template
    original, own.source = own.source, source
    try:
        yield
    finally:
        own.source = original
