"""Messages of a request, converted for the chat template."""

from __future__ import annotations

from typing import Any

from urdir.model.serve.fields import Fields
from urdir.model.serve.interface import Json
from urdir.model.serve.json_reader import JsonReader, JsonTooLargeError
from urdir.model.serve.limits import Limits
from urdir.model.text.chat import ROLES, Message, role_in

#: Text fields of a message, and their names in templates.
_TEXTS = {
    "name": "name",
    "tool_call_id": "tool_call_id",
    "reasoning": "reasoning_content",  # vLLM
    "reasoning_content": "reasoning_content",
    "thinking": "reasoning_content",  # ollama
    "tool_name": "name",
}
_UNSUPPORTED = {
    "function_call": "use 'tool_calls'",
    "audio": "only text is supported",
    "images": "only text is supported",
}
#: Types of parts, and the field of their text.
_TEXT_PARTS = {
    **dict.fromkeys(("text", "input_text", "output_text"), "text"),
    **dict.fromkeys(("reasoning_text", "summary_text"), "text"),
    "refusal": "refusal",
}


def read_messages(fields: Fields, template: str, limits: Limits) -> list[Message]:
    """Read the conversation in ``fields`` for a template given as source.

    A developer's message becomes a system message if the template lacks that role. Raises ApiError
    for content other than text, and if the JSON in tool calls exceeds ``limits`` in total.
    """
    messages = fields.objects("messages")
    if not messages:
        fields.fail("messages", "must be a list with at least one message")
    reader = JsonReader(limits)
    return [_read_message(message, template, reader) for message in messages]


def _read_message(message: Fields, template: str, reader: JsonReader) -> Message:
    role = message.choice("role", ROLES)
    if role is None:
        message.fail("role", "is missing")
    for name, why in _UNSUPPORTED.items():
        if message.raw(name) not in (None, []):
            message.fail(name, f"is not supported: {why}", "unsupported_parameter")
    more: Json = {}
    for name, called in _TEXTS.items():
        text = message.text(name)
        if text is not None:
            more[called] = text
    calls = [_read_call(call, reader) for call in message.objects("tool_calls")]
    if calls:
        more["tool_calls"] = calls
    needs_content = not calls and "reasoning_content" not in more
    return Message(role_in(template, role), _read_content(message, needs_content), more)


def _read_content(message: Fields, needed: bool) -> str:
    """A text, or text parts; optional in a message with calls or reasoning."""
    content = message.raw("content")
    if content is None:
        if needed and message.raw("refusal") is None:
            message.fail("content", "is missing")
        return message.text("refusal") or ""
    return read_texts(message, "content")


def read_texts(fields: Fields, name: str) -> str:
    """A text, or the texts of a list of parts; by default empty."""
    if isinstance(value := fields.raw(name), str):
        return value
    texts = []
    for part in fields.objects(name):
        kind = part.needed_text("type")
        if kind not in _TEXT_PARTS:
            part.fail("type", f"is {kind!r}: only text is supported", "unsupported_content")
        texts.append(part.needed_text(_TEXT_PARTS[kind]))
    return "\n".join(texts)


def _read_call(call: Fields, reader: JsonReader) -> Json:
    """A call of an earlier answer, with its arguments as the object that templates read."""
    function = call.needed_object("function")
    called: Json = {
        "type": "function",
        "function": {
            "name": function.needed_text("name"),
            "arguments": read_arguments(function, reader),
        },
    }
    identity = call.text("id")
    return called if identity is None else {"id": identity, **called}


def read_arguments(function: Fields, reader: JsonReader) -> Any:
    """Arguments as an object, or unchanged if an answer had something else."""
    if isinstance(given := function.raw("arguments"), dict):  # ollama
        return given
    arguments = function.text("arguments") or "{}"
    try:
        value = reader.read(arguments.encode())
    except JsonTooLargeError as error:
        function.fail("arguments", str(error), "invalid_json")
    except ValueError:  # not JSON, or a lone surrogate
        return arguments
    return value if isinstance(value, dict) else arguments
