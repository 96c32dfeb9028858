"""Tools that a request offers, and calls that it forces."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from urdir.model.serve.fields import Fields
from urdir.model.serve.interface import AnswerParser, Delta, Json, ToolCall
from urdir.model.serve.limits import Limits

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class ForcedCall:
    """The answer must be calls: of the tool ``name``, or where that is None of some tools."""

    name: str | None
    schema: Json


@dataclass(frozen=True, slots=True)
class Tools:
    """``offered`` are descriptions as the template takes them."""

    offered: tuple[Json, ...] = ()
    forced: ForcedCall | None = None
    parallel: bool = True  # whether an answer may have several calls


def read_tools(fields: Fields, limits: Limits) -> Tools:
    """tools, tool_choice and parallel_tool_calls; ApiError where they do not fit together."""
    fields.refuse({"functions": "use 'tools'", "function_call": "use 'tool_choice'"})
    offered = tuple(_read_tool(tool) for tool in fields.objects("tools", limits.tools))
    parallel = fields.raw("parallel_tool_calls") is None or fields.flag("parallel_tool_calls")
    choice = fields.raw("tool_choice")
    if not offered:
        if choice not in (None, "none", "auto"):
            fields.fail("tool_choice", "needs 'tools'")
        return Tools()
    if choice == "none":
        return Tools()
    if choice in (None, "auto"):
        return Tools(offered, None, parallel)
    if choice == "required":
        return Tools(offered, ForcedCall(None, _schema_of_calls(offered, parallel)), parallel)
    return Tools(offered, _forced(fields, offered), parallel)


def _read_tool(tool: Fields) -> Json:
    if tool.needed_text("type") != "function":
        tool.fail("type", "must be 'function'", "unsupported_parameter")
    function = tool.needed_object("function")
    if not _NAME.fullmatch(function.needed_text("name")):
        function.fail("name", "must be 1 to 64 letters, digits, '_', '-' or '.'")
    function.text("description")
    function.object("parameters")
    return dict(tool.values)


def _forced(fields: Fields, offered: Sequence[Json]) -> ForcedCall:
    """{"type": "function", "function": {"name": ...}}."""
    if not isinstance(fields.raw("tool_choice"), dict):
        fields.fail("tool_choice", "must be none, auto, required, or name a function")
    choice = fields.needed_object("tool_choice")
    if choice.needed_text("type") != "function":
        choice.fail("type", "must be 'function'", "unsupported_parameter")
    function = choice.needed_object("function")
    name = function.needed_text("name")
    for tool in offered:
        if tool["function"]["name"] == name:
            return ForcedCall(name, _arguments(tool))
    function.fail("name", "is not among the tools")


def _schema_of_calls(offered: Sequence[Json], parallel: bool) -> Json:
    """A list of at least one call, each {"name": ..., "arguments": {...}}."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["function"]["name"]},
                "arguments": _arguments(tool),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in offered
    ]
    schema: Json = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    return schema if parallel else schema | {"maxItems": 1}


def _arguments(tool: Json) -> Any:
    return tool["function"].get("parameters") or {"type": "object"}


class ForcedCallParser(AnswerParser):
    """Reads an answer that a schema has forced to be calls. They are known when it is complete."""

    def __init__(self, forced: ForcedCall) -> None:
        self._forced = forced
        self._text: list[str] = []

    def push(self, text: str) -> Sequence[Delta]:
        """Nothing yet."""
        self._text.append(text)
        return ()

    def finish(self) -> Sequence[Delta]:
        """The calls; the text itself where it was cut off."""
        text = "".join(self._text).strip()
        if self._forced.name is not None:
            return [Delta(tool_call=_call(self._forced.name, text))]
        try:
            calls = [
                _call(call["name"], json.dumps(call["arguments"])) for call in json.loads(text)
            ]
        except (ValueError, TypeError, KeyError):
            return [Delta(content=text)]
        return [Delta(tool_call=call) for call in calls]


class PlainParser(AnswerParser):
    """All is content: for answers that are forced to have another form than the model's own."""

    def push(self, text: str) -> Sequence[Delta]:
        """The text."""
        return [Delta(content=text)]

    def finish(self) -> Sequence[Delta]:
        """Nothing is held back."""
        return ()


def _call(name: str, arguments: str) -> ToolCall:
    return ToolCall(f"call_{uuid.uuid4().hex}", name, arguments)
