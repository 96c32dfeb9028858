"""Tools offered in a request, and whether a call is required."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from urdir.model.serve.fields import Fields
from urdir.model.serve.formats import check_size
from urdir.model.serve.interface import Json
from urdir.model.serve.limits import Limits

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class Tools:
    """Tool descriptions, ``offered``, in the form of the template.

    If a call ``is_required``, it must be of the tool ``name``, or of any if that is None.
    """

    offered: tuple[Json, ...] = ()
    is_required: bool = False
    name: str | None = None
    parallel: bool = True  # several calls per answer allowed

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """The schema of each tool's parameters, by its name."""
        functions = [tool["function"] for tool in self.offered]
        return {function["name"]: function.get("parameters") or {} for function in functions}


def read_tools(fields: Fields, limits: Limits) -> Tools:
    """Read tools, tool_choice and parallel_tool_calls; ApiError if they are inconsistent."""
    offered = tuple(_read_tool(tool, limits) for tool in fields.objects("tools", limits.tools))
    if len({tool["function"]["name"] for tool in offered}) < len(offered):
        fields.fail("tools", "has two functions of the same name")
    parallel = fields.raw("parallel_tool_calls") is None or fields.flag("parallel_tool_calls")
    choice = fields.raw("tool_choice")
    if not offered:
        if choice not in (None, "none", "auto"):
            fields.fail("tool_choice", "needs 'tools'")
        return Tools()
    if choice == "none":
        return Tools()
    if choice in (None, "auto"):
        return Tools(offered, parallel=parallel)
    name = None if choice == "required" else _required_name(fields, offered)
    return Tools(offered, is_required=True, name=name, parallel=parallel)


def _read_tool(tool: Fields, limits: Limits) -> Json:
    if tool.needed_text("type") != "function":
        tool.fail("type", "must be 'function'", "unsupported_parameter")
    function = tool.needed_object("function")
    if not _NAME.fullmatch(function.needed_text("name")):
        function.fail("name", "must be 1 to 64 letters, digits, '_', '-' or '.'")
    function.text("description")
    if (parameters := function.object("parameters")) is not None:
        check_size(function, "parameters", parameters.values, limits)
    return dict(tool.values)


def _required_name(fields: Fields, offered: Sequence[Json]) -> str:
    """The name in {"type": "function", "function": {"name": ...}}."""
    if not isinstance(fields.raw("tool_choice"), dict):
        fields.fail("tool_choice", "must be none, auto, required, or name a function")
    choice = fields.needed_object("tool_choice")
    if choice.needed_text("type") != "function":
        choice.fail("type", "must be 'function'", "unsupported_parameter")
    function = choice.needed_object("function")
    name = function.needed_text("name")
    if name not in (tool["function"]["name"] for tool in offered):
        function.fail("name", "is not among the tools")
    return name
