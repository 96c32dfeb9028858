"""Messages of a request, as the chat template takes them."""

from __future__ import annotations

import json
from typing import Any

from urdir.model.serve.fields import Fields
from urdir.model.serve.interface import Json
from urdir.model.text.chat import ROLES, Message, role_in

_TEXT_PARTS = {"text": "text", "input_text": "text", "refusal": "refusal"}


def read_messages(fields: Fields, template: str) -> list[Message]:
    """The conversation in ``fields``, for the template with this source.

    A developer's message becomes a system message where the template does not know the role.
    Raises ApiError for anything but text.
    """
    messages = fields.objects("messages")
    if not messages:
        fields.fail("messages", "must be a list with at least one message")
    return [_read_message(message, template) for message in messages]


def _read_message(message: Fields, template: str) -> Message:
    role = message.choice("role", ROLES)
    if role is None:
        message.fail("role", "is missing")
    more: Json = {}
    for name in ("name", "tool_call_id", "reasoning_content"):
        text = message.text(name)
        if text is not None:
            more[name] = text
    calls = [_read_call(call) for call in message.objects("tool_calls")]
    if calls:
        more["tool_calls"] = calls
    return Message(role_in(template, role), _read_content(message, needed=not calls), more)


def _read_content(message: Fields, needed: bool) -> str:
    """A text, or parts of one; a message that only calls tools needs none."""
    content = message.raw("content")
    if content is None:
        if needed and message.raw("refusal") is None:
            message.fail("content", "is missing")
        return message.text("refusal") or ""
    if isinstance(content, str):
        return content
    texts = []
    for part in message.objects("content"):
        kind = part.needed_text("type")
        if kind not in _TEXT_PARTS:
            part.fail("type", f"is {kind!r}: this server takes text only", "unsupported_content")
        texts.append(part.needed_text(_TEXT_PARTS[kind]))
    return "\n".join(texts)


def _read_call(call: Fields) -> Json:
    """A call of an earlier answer; templates read its arguments as an object."""
    function = call.needed_object("function")
    arguments = function.text("arguments") or "{}"
    called: Json = {
        "type": "function",
        "function": {"name": function.needed_text("name"), "arguments": _object(arguments)},
    }
    identity = call.text("id")
    return called if identity is None else {"id": identity, **called}


def _object(arguments: str) -> Any:
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
