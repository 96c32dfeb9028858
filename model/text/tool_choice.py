"""Constraints in a model's own answer format: required tool calls, answers after reasoning."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from urdir.model.errors import ConstraintError
from urdir.model.text import harmony
from urdir.model.text.answers import AnswerFormat
from urdir.model.text.call_form import KEY, CallForm, Pairs, Part, Slot, Tagged
from urdir.model.text.constraints import Constraint, embedded
from urdir.model.text.reasoning import ThinkTags, is_thinking
from urdir.model.text.tags import cut
from urdir.model.text.tool_schemas import Schema, Tools, options_of, properties, required, types_of


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
        answer = _content(rules, form, begun)
        if offered:
            answer = f"({answer} | {_calls(rules, form, offered, many)})"
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
            return f"{_until_answer(rules, form.thinks)} {_SPACE}"
        case False:
            return ""
        case None:
            begin = rules.literal(form.thinks.begin, form.thinks.controls)
            return f"({begin} {_until_answer(rules, form.thinks)} {_SPACE})?"


def _until_answer(rules: _Rules, thinks: ThinkTags) -> str:
    """The rest of the reasoning."""
    return rules.until(thinks.end)


def _content(rules: _Rules, form: AnswerFormat, begun: str) -> str:
    """`@answer` as content, perhaps between its tags."""
    tags = form.content
    if tags is None or begun.strip():
        return "@answer"
    begin, end = (rules.literal(text, tags.controls) for text in (tags.begin, tags.end))
    return f"({begin})? @answer" + (f" ({end})?" if end else "")


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

    def literal(self, text: str, controls: Iterable[str]) -> str:
        """A text in which some tags may be control tokens; "" for none."""
        pieces = cut(text, controls)
        return " ".join(self.marker(p) if is_tag else _text(p) for p, is_tag in pieces)

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
    """A call in the model's form; `many` allows several, where it can write them."""
    if form.calls is None:
        raise ConstraintError("a call cannot be required without a chat template")
    return _Writer(rules, form.calls).calls(tools, many)


class _Writer:
    """Writes the grammar of a form of calls."""

    def __init__(self, rules: _Rules, form: CallForm) -> None:
        self._rules = rules
        self._form = form
        self._free: dict[str, str] = {}

    def calls(self, tools: Tools, many: bool) -> str:
        """One of the calls, or several."""
        form, text = self._form, self._text
        calls = [self._call(name, schema) for name, schema in tools.items()]
        self._rules.add("call", " | ".join(calls))
        opening, closing = ("[", "]") if form.is_list else ("", "")
        begin = (form.section_begin + opening + form.begin).lstrip()
        parts = [text(begin), "call"]
        if many and form.between is not None:
            parts.append(f"({text(form.between + form.begin)} call)*")
        if form.is_list and form.begin.startswith("\n"):
            closing = f"\n{closing}"
        return " ".join(filter(None, [*parts, text(closing + form.section_end)]))

    def _call(self, name: str, schema: Schema) -> str:
        slots = {
            Slot.NAME: self._text(name),
            Slot.ID: "/[a-zA-Z0-9]{9}/",
            Slot.INDEX: "/[0-9]{1,3}/",
            Slot.ARGUMENTS: self._arguments(schema),
        }
        parts = [self._text(p) if isinstance(p, str) else slots[p] for p in self._form.parts]
        if self._form.is_bare and self._form.keys is not None:
            parts = [_json_tokens(self._form.parts, name), slots[Slot.ARGUMENTS], _text("}")]
        return " ".join(filter(None, [*parts, self._text(self._form.end)]))

    def _arguments(self, schema: Schema) -> str:
        match self._form.arguments:
            case None:
                return embedded(_object(schema))
            case Tagged() as form:
                return " ".join(
                    rule if is_needed else f"({rule})?"
                    for rule, is_needed in self._tagged(form, schema)
                )
            case Pairs() as form:
                return self._pairs(form, schema)

    def _tagged(self, form: Tagged, schema: Schema) -> Iterator[tuple[str, bool]]:
        """Keys and values in the order of the schema, and whether they are needed. Strings are free
        text, all else is JSON."""
        needed = required(schema)
        for key, value in properties(schema).items():
            types = types_of(value)
            is_text = types == {"string"}
            kind = min(types - {"string"}, default="object")
            assign = form.assign if is_text else dict(form.assigns).get(kind, form.assign)
            end = form.end.replace(KEY, key)
            if not is_text:
                rest = f"{embedded(value)} {self._text(end)}"
            elif (options := options_of(value)) is not None:
                rest = f"({' | '.join(map(_text, options))}) {self._text(end)}"
            else:
                rest = self._until(end)
            yield f"{self._text(form.begin + key + assign)} {rest}", key in needed

    def _pairs(self, form: Pairs, schema: Schema) -> str:
        """Keys and values in the order of the schema, separated by commas: for each place in it
        there is a rule after others, and one where none came before."""
        name, comma = f"args_{len(self._free)}", self._text(form.comma)
        self._free[name] = name
        needed = required(schema)
        pairs = [
            (f"{self._text(key + form.assign)} {self._value(form, value)}", key in needed)
            for key, value in properties(schema).items()
        ]
        self._rules.add(f"{name}_{len(pairs)}", '""')
        self._rules.add(f"{name}_{len(pairs)}_more", '""')
        for place, (pair, is_needed) in reversed([*enumerate(pairs)]):
            after = f"{name}_{place + 1}"
            first, more = f"{pair} {after}_more", f"{comma} {pair} {after}_more"
            if not is_needed:
                first, more = f"{first} | {after}", f"{more} | {after}_more"
            self._rules.add(f"{name}_{place}", first)
            self._rules.add(f"{name}_{place}_more", more)
        return f"{self._text(form.open)} {name}_0 {self._text(form.close)}"

    def _value(self, form: Pairs, schema: Schema) -> str:
        if form.quote in "\"'" or types_of(schema) != {"string"}:
            return embedded(schema)
        quote = self._text(form.quote)
        if (options := options_of(schema)) is not None:
            return f"{quote} ({' | '.join(map(_text, options))}) {quote}"
        return f"{quote} {self._until(form.quote)}"

    def _until(self, end: str) -> str:
        """Any text up to a literal."""
        return self._rules.until(end)

    def _text(self, text: str) -> str:
        return self._rules.literal(text, self._form.controls)


def _json_tokens(parts: Sequence[Part], name: str) -> str:
    """The beginning of an object, cut where JSON is: an answer in JSON may begin like a call."""
    text = "".join(p if isinstance(p, str) else name for p in parts[: parts.index(Slot.ARGUMENTS)])
    tokens = re.findall(r'"[^"]*"|[^\s"]', text)
    spaced = {":": "/: ?/", ",": "/, ?/"}
    return " ".join(spaced.get(token) or _text(token) for token in tokens)


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
    return f"{channel} ({' | '.join(calls)})"
