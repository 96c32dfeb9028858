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

_FUNCTION = "function"  # the type of a tool, and of a choice
_NO_PARAMETERS: Json = {"type": "object", "properties": {}}
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


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
        """The schema of each tool's parameters, by its name; one without a schema takes none."""
        functions = [tool["function"] for tool in self.offered]
        return {each["name"]: each.get("parameters") or _NO_PARAMETERS for each in functions}


def read_tools(fields: Fields, limits: Limits, *, functions_alone: bool = False) -> Tools:
    """Read tools, tool_choice and parallel_tool_calls; ApiError if they are inconsistent. With
    ``functions_alone`` tools of other types beside functions are left out, not refused."""
    given = fields.objects("tools", limits.tools)
    functions = [tool for tool in given if tool.needed_text("type") == _FUNCTION]
    chosen = functions if functions and functions_alone else given
    offered = [_read_tool(tool, limits) for tool in chosen]
    choice, holder = fields.raw("tool_choice"), None
    if isinstance(choice, dict):
        named = fields.needed_object("tool_choice")
        if named.needed_text("type") != _FUNCTION:
            named.fail("type", "must be 'function'", "unsupported_parameter")
        holder = named if named.raw("name") is not None else named.needed_object("function")
    elif choice not in (None, "none", "auto", "required"):
        fields.fail("tool_choice", "must be none, auto, required, or name a function")
    parallel = fields.raw("parallel_tool_calls") is None or fields.flag("parallel_tool_calls")
    is_required = holder is not None or choice == "required"
    return make_tools(
        fields, [] if choice == "none" else offered, is_required, holder, parallel=parallel
    )


def make_tools(
    fields: Fields,
    offered: Sequence[Json],
    is_required: bool,
    holder: Fields | None,
    *,
    parallel: bool,
) -> Tools:
    """Tools of which a call may be required: of the one whose "name" ``holder`` has, or of any.

    Raises ApiError for two tools of a name, and for a call of none.
    """
    names = {tool["function"]["name"] for tool in offered}
    if len(names) < len(offered):
        fields.fail("tools", "has two functions of the same name")
    if not offered:
        if is_required:
            fields.fail("tool_choice", "needs 'tools'")
        return Tools()
    name = None if holder is None else holder.needed_text("name")
    if holder is not None and name not in names:
        holder.fail("name", "is not among the tools")
    return Tools(tuple(offered), is_required, name, parallel)


def flat_tool(tool: Fields, schema: str, limits: Limits) -> Json:
    """A tool for the template, of an object with the name, the description and the ``schema``."""
    _check_function(tool, schema, limits)
    function = {"name": tool.raw("name"), "description": tool.raw("description")}
    function["parameters"] = tool.raw(schema)
    given = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": given}


def _read_tool(tool: Fields, limits: Limits) -> Json:
    if tool.needed_text("type") != _FUNCTION:
        tool.fail("type", "must be 'function'", "unsupported_parameter")
    if tool.raw("name") is not None:  # as /v1/responses has them
        return flat_tool(tool, "parameters", limits)
    _check_function(tool.needed_object("function"), "parameters", limits)
    return dict(tool.values)


def _check_function(function: Fields, schema: str, limits: Limits) -> None:
    if not _NAME.fullmatch(function.needed_text("name")):
        function.fail("name", "must be 1 to 128 letters, digits, '_', '-' or '.'")
    function.text("description")
    if (parameters := function.object(schema)) is not None:
        check_size(function, schema, parameters.values, limits)
