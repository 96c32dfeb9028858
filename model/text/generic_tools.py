"""Tool use for chat templates without tool support: tools, calls and results as plain text.

Tools are described in the system text, as in llama.cpp's generic handler. Calls use Hermes tags,
which most models have seen: `call_form.GENERIC` describes them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

Turn = dict[str, Any]

_DESCRIPTION = """\
You can call tools. To call one, answer with its name and its arguments, a JSON object that fits \
the tool's parameters, between these tags:
<tool_call>
{"name": NAME, "arguments": ARGUMENTS}
</tool_call>
Several calls follow each other, each between tags of its own. The next message has their results, \
between <tool_response> tags. Where no tool helps, answer in plain text.

The tools, with the JSON schemas of their parameters:
"""


def as_text(turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]] | None) -> list[Turn]:
    """A conversation with tools, calls and results converted to text.

    ``turns`` are those for the template, ``tools`` descriptions in OpenAI's form. Adjacent results
    and the user text after them become one user turn: templates often require alternating roles.
    """
    names: dict[str, str] = {}
    told: list[Turn] = []
    after_result = False
    for turn in turns:
        is_result = turn["role"] == "tool"
        if is_result:
            turn = {"role": "user", "content": _result(turn, names)}
        elif turn.get("tool_calls"):
            names |= {call.get("id", ""): call["function"]["name"] for call in turn["tool_calls"]}
            turn = _with_calls(turn)
        if after_result and turn["role"] == "user":
            told[-1] = {**told[-1], "content": f"{told[-1]['content']}\n{turn['content']}"}
        else:
            told.append(turn)
        after_result = is_result
    return _described(told, tools) if tools else told


def _described(turns: list[Turn], tools: Sequence[Mapping[str, Any]]) -> list[Turn]:
    text = _DESCRIPTION + "\n".join(_json(tool.get("function", tool)) for tool in tools)
    if turns and turns[0]["role"] == "system":
        first, *others = turns
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *others]
    return [{"role": "system", "content": text}, *turns]


def _with_calls(turn: Turn) -> Turn:
    """An assistant's turn as the model would have written it."""
    calls = [f"<tool_call>\n{_call(call['function'])}\n</tool_call>" for call in turn["tool_calls"]]
    more = {key: value for key, value in turn.items() if key != "tool_calls"}
    return {**more, "content": "\n".join(filter(None, [turn["content"], *calls]))}


def _call(function: Mapping[str, Any]) -> str:
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):  # JSON, if it parses
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return _json({"name": function["name"], "arguments": arguments})


def _result(turn: Turn, names: Mapping[str, str]) -> str:
    name = turn.get("name") or names.get(turn.get("tool_call_id", ""))
    told = {"name": name} if name else {}
    return f"<tool_response>\n{_json({**told, 'content': turn['content']})}\n</tool_response>"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
