"""Constraints in a model's own answer format: required tool calls, answers after reasoning."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from urdir.model.errors import ConstraintError
from urdir.model.text import harmony
from urdir.model.text.answers import AnswerFormat
from urdir.model.text.call_formats import MISTRAL_CALLS
from urdir.model.text.constraints import Constraint, embedded
from urdir.model.text.reasoning import is_thinking
from urdir.model.text.tool_calls import Tools

Schema = Mapping[str, Any]


def required_call(
    form: AnswerFormat,
    tools: Tools,
    prompt: str = "",
    *,
    name: str | None = None,
    many: bool = False,
) -> Constraint:
    """Constrain an answer to a call of one of `tools`, of `name` if given; `many` allows several.

    The call is written in the model's format, with arguments that match the function's schema, and
    may follow reasoning; `prompt` is the rendered conversation. gpt-oss makes one call per answer.
    Raises ConstraintError: no such tool, no tools, or a schema that `Constraint.json_schema`
    refuses.
    """
    if name is not None and name not in tools:
        raise ConstraintError(f"a call of {name!r} is required, but there is no such tool")
    if not tools:
        raise ConstraintError("a call is required, but no tools are given")
    chosen = tools if name is None else {name: tools[name]}
    rules = _Rules()
    if form.is_harmony:
        return rules.constraint(f"({_analysis(rules)})? {_harmony_calls(rules, chosen)}")
    calls = rules.constraint(_calls(rules, form, chosen, many))
    return after_thoughts(calls, form, prompt)


def after_thoughts(
    constraint: Constraint,
    form: AnswerFormat,
    prompt: str,
    begun: str = "",
    *,
    tools: Tools | None = None,
    many: bool = False,
) -> Constraint:
    """Apply `constraint` after a model's unconstrained reasoning. Not for `required_call`.

    `prompt` is the rendered conversation, which may begin or end the reasoning, `begun` the start
    of the answer. Unless the answer has begun, a call of one of `tools` may replace it; `many`
    allows several.
    """
    rules = _Rules(constraint.markers)
    offered = {} if begun.strip() or tools is None else tools
    if form.is_harmony:
        start = _harmony_start(rules, prompt, begun, offered)
    else:
        answer = f"(@answer | {_calls(rules, form, offered, many)})" if offered else "@answer"
        start = f"{_thoughts(rules, form, prompt, begun)} {answer}".strip()
    if start == "@answer":
        return constraint
    framed = rules.constraint(start)
    return replace(constraint, frame=framed.grammar, markers=framed.markers)


def _thoughts(rules: _Rules, form: AnswerFormat, prompt: str, begun: str) -> str:
    """The rest of the reasoning, or optional reasoning; "" for none."""
    if form.thinks is None:
        return ""
    match is_thinking(form.thinks, prompt, begun):
        case True:
            return f"{rules.until(form.thinks.end)} {_SPACE}"
        case False:
            return ""
        case None:
            begin, rest = rules.marker(form.thinks.begin), rules.until(form.thinks.end)
            return f"({begin} {rest} {_SPACE})?"


def _harmony_start(rules: _Rules, prompt: str, begun: str, tools: Tools) -> str:
    """gpt-oss's reasoning, then `@answer` in the final channel or a tool call."""
    final = f"{rules.marker(harmony.CHANNEL)} {_text('final')} {rules.marker(harmony.MESSAGE)}"
    if not begun.strip():
        calls = f" | {_harmony_calls(rules, tools)}" if tools else ""
        return f"({_analysis(rules)})? ({final} @answer{calls})"
    if "analysis" in harmony.header(prompt):
        return f"{_analysis_end(rules)} {final} @answer"
    return "@answer"


_SPACE = r"/[ \n]{0,4}/"


class _Rules:
    """Markers of a grammar under construction, and its rules besides `start`."""

    def __init__(self, markers: tuple[str, ...] = ()) -> None:
        self._markers = list(markers)
        self._others: list[str] = []

    def marker(self, text: str) -> str:
        """The name of a rule that matches a tag."""
        return f"marker_{self._index(text)}"

    def until(self, text: str) -> str:
        """The name of a rule that matches text up to and including a tag."""
        return f"until_{self._index(text)}"

    def add(self, name: str, rule: str) -> None:
        """Add a rule; `name` may have attributes."""
        self._others.append(f"{name}: {rule}")

    def constraint(self, start: str) -> Constraint:
        """The grammar with this rule `start`."""
        return Constraint(
            "\n".join([f"start: {start}", *self._others]), markers=tuple(self._markers)
        )

    def _index(self, text: str) -> int:
        if text not in self._markers:
            self._markers.append(text)
        return self._markers.index(text)


def _text(text: str) -> str:
    return json.dumps(text)


def _object(schema: Schema) -> Schema:
    return {"type": "object", **schema}


def _calls(rules: _Rules, form: AnswerFormat, tools: Tools, many: bool) -> str:
    """A call in the model's format; `many` allows several."""
    if form.calls is None:
        raise ConstraintError("a call cannot be required without a chat template")
    return _WRITERS[form.calls.name](rules, tools, many)


def _either(calls: list[str], between: str = "", many: bool = False) -> str:
    """One of `calls`; `many` allows more after it, with `between` before each."""
    one = "(" + " | ".join(calls) + ")"
    return f"{one} ({between} {one})*" if many else one


def _json_calls(tools: Tools, arguments: str) -> list[str]:
    """{"name": ..., ARGUMENTS: ...} for each function, spaced as json.dumps does."""
    calls = []
    for name, schema in tools.items():
        begin = _text(f'{{"name": {json.dumps(name)}, "{arguments}": ')
        calls.append(f"{begin} {embedded(_object(schema))} {_text('}')}")
    return calls


def _hermes(rules: _Rules, tools: Tools, many: bool) -> str:
    begin, end = rules.marker("<tool_call>"), rules.marker("</tool_call>")
    line = _text("\n")
    calls = [f"{begin} {line} {call} {line} {end}" for call in _json_calls(tools, "arguments")]
    return _either(calls, line, many)


def _llama(rules: _Rules, tools: Tools, many: bool) -> str:
    """Calls without tags. The cut follows JSON: an answer in JSON may begin like a call."""
    calls = []
    for name, schema in tools.items():
        key, value, arguments = map(_text, ('"name"', json.dumps(name), '"parameters"'))
        begin = f"{_text('{')} {key} /: ?/ {value} /, ?/ {arguments} /: ?/"
        calls.append(f"{begin} {embedded(_object(schema))} {_text('}')}")
    return _either(calls, _text("; "), many)


def _mistral(rules: _Rules, tools: Tools, many: bool) -> str:
    calls = _either(_json_calls(tools, "arguments"), _text(", "), many)
    return f"{rules.marker(MISTRAL_CALLS)} {_text(' [')} {calls} {_text(']')}"


def _mistral_named(rules: _Rules, tools: Tools, many: bool) -> str:
    begin, arguments = rules.marker(MISTRAL_CALLS), rules.marker("[ARGS]")
    calls = [
        f"{begin} {_text(name)} {arguments} {embedded(_object(schema))}"
        for name, schema in tools.items()
    ]
    return _either(calls, "", many)


def _deepseek(before: str, after_name: str, after: str, between: str) -> _Writer:
    def write(rules: _Rules, tools: Tools, many: bool) -> str:
        begin, end = (rules.marker(f"<｜tool▁call▁{edge}｜>") for edge in ("begin", "end"))
        separator = rules.marker("<｜tool▁sep｜>")
        calls = []
        for name, schema in tools.items():
            named = f"{separator} {_text(name)}" if before else f"{_text(name)} {separator}"
            parts = [begin, before and _text(before), named, after_name and _text(after_name),
                     embedded(_object(schema)), after and _text(after), end]  # fmt: skip
            calls.append(" ".join(filter(None, parts)))
        inner = _either(calls, between and _text(between), many)
        first, last = (rules.marker(f"<｜tool▁calls▁{edge}｜>") for edge in ("begin", "end"))
        return f"{first} {inner} {last}"

    return write


def _xml(rules: _Rules, tools: Tools, many: bool) -> str:
    begin, end = rules.marker("<tool_call>"), rules.marker("</tool_call>")
    close = _text("</function>\n")
    rules.add("free[lazy]", r'/(?s:.*)/ "\n</parameter>\n"')
    calls = []
    for name, schema in tools.items():
        parameters = " ".join(_parameters(schema))
        function = _text(f"\n<function={name}>\n")
        calls.append(f"{begin} {function} {parameters} {close} {end}")
    return _either(calls, _text("\n"), many)


def _parameters(schema: Schema) -> list[str]:
    """The parameters of a function in schema order; strings are free text, all else is JSON."""
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    written = []
    for key, value in schema.get("properties", {}).items():
        value = value if isinstance(value, Mapping) else {}
        begin, close = _text(f"<parameter={key}>\n"), _text("\n</parameter>\n")
        if isinstance(value.get("enum"), list) and all(isinstance(v, str) for v in value["enum"]):
            rule = f"{begin} ({' | '.join(map(_text, value['enum']))}) {close}"
        elif value.get("type") == "string":
            rule = f"{begin} free"
        else:
            rule = f"{begin} {embedded({**value, **shared})} {close}"
        written.append(rule if key in schema.get("required", ()) else f"({rule})?")
    return written


def _analysis(rules: _Rules) -> str:
    """gpt-oss's reasoning and the start of its next message."""
    channel, message = rules.marker(harmony.CHANNEL), rules.marker(harmony.MESSAGE)
    return f"{channel} {_text('analysis')} {message} {_analysis_end(rules)}"


def _analysis_end(rules: _Rules) -> str:
    """The rest of gpt-oss's reasoning and the start of its next message."""
    return f"{rules.until(harmony.END)} {rules.marker(harmony.START)} {_text('assistant')}"


def _harmony_calls(rules: _Rules, tools: Tools) -> str:
    """One call, which ends the answer."""
    channel, message = rules.marker(harmony.CHANNEL), rules.marker(harmony.MESSAGE)
    json_follows = f"{rules.marker('<|constrain|>')} {_text('json')} {message}"
    calls = [
        f"{_text(f'commentary to=functions.{name} ')} {json_follows} {embedded(_object(schema))}"
        for name, schema in tools.items()
    ]
    return f"{channel} {_either(calls)}"


_Writer = Callable[[_Rules, Tools, bool], str]

_WRITERS: dict[str, _Writer] = {
    "generic": _hermes,
    "deepseek-v3": _deepseek("function", "\n```json\n", "\n```", "\n"),
    "deepseek-v3.1": _deepseek("", "", "", ""),
    "hermes": _hermes,
    "llama-3": _llama,
    "mistral": _mistral,
    "mistral-named": _mistral_named,
    "qwen3-coder": _xml,
}
