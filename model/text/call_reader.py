"""Reads calls of a `CallForm` from streamed text; arguments come as they are written."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping
from typing import Any

from urdir.model.text.call_form import KEY, CallForm, Keys, Pairs, Slot, Tagged
from urdir.model.text.deltas import CallNumbers, Delta
from urdir.model.text.literals import (
    escaped,
    read_key,
    read_pairs,
    read_value,
    read_whole_string,
)
from urdir.model.text.source import NotACallError, Source, Steps

Tools = Mapping[str, Mapping[str, Any]]
"""The JSON schema of the parameters of each function, by its name."""

Deltas = Generator[Delta | None, None, None]
"""What is read; None: more text is needed."""

_NAME = re.compile(r"[^\s<>\[\]{}()\"',:=]+")
_ID = re.compile(r"[^\s<>\[\]{}()\"',]+")
_PREFIX = re.compile(r"[\w.]*$")  # of names: "functions."
_LONGEST_NAME = 256
_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters", "args")
_OUTER = ("function",)  # a call within the object of a call


class CallReader:
    """Reads the calls of an answer from ``source``; its text up to ``done`` has been calls."""

    def __init__(self, form: CallForm, tools: Tools, source: Source, numbers: CallNumbers) -> None:
        self._form = form
        self._tools = tools
        self._source = source
        self._numbers = numbers
        self._strict = False
        self.done = 0

    def section(self, *, strict: bool) -> Deltas:
        """Read calls up to the last one that follows; ``strict``: of known tools. Raises
        NotACallError for anything else."""
        form, source = self._form, self._source
        self._strict = strict
        yield from _waits(self._begin())
        is_list = form.keys is not None or form.is_list
        is_list = is_list and (yield from _waits(source.accept("[")))
        if not is_list and form.is_list and not form.keys and strict:
            raise NotACallError("no list of calls")
        goes_on = True
        while goes_on:
            yield from self._call()
            self.done = source.at
            if is_list:
                goes_on = yield from _waits(source.accept(","))
            elif not (goes_on := (yield from _waits(self._goes_on()))):
                source.at = self.done
        if is_list:
            yield from _waits(self._end("]"))
        yield from _waits(self._end_section())
        self.done = source.at

    def _begin(self) -> Steps[None]:
        """Pass the text before the first call."""
        form, source = self._form, self._source
        for other in form.others:
            if (yield from source.accept(other)):
                return
        yield from source.accept(form.section_begin)

    def _goes_on(self) -> Steps[bool]:
        """Whether another call follows; what is between the two is passed."""
        form, source = self._form, self._source
        between = (form.between or ";").strip()
        passed = yield from source.accept(between)
        if form.begin.strip():
            start = source.at
            follows = yield from source.accept(form.begin)
            source.at = start
            return follows
        yield from source.space()
        char = yield from source.peek()
        if form.keys is not None:
            return char == "{"
        return passed and (char.isalnum() or char == "_")

    def _end_section(self) -> Steps[None]:
        """Pass the end of all calls; models often leave it out."""
        source, end = self._source, self._form.section_end
        if not (yield from source.accept(end)) and source.is_whole and _begins(end, source.rest):
            source.at = len(source.text)

    def _call(self) -> Deltas:
        form, source = self._form, self._source
        if not (yield from _waits(source.accept(form.begin))) and form.keys is None:
            raise NotACallError("no call")
        if form.keys is not None:
            yield from self._object(form.keys)
        else:
            yield from self._parts()
        if form.keys is None or not form.is_list:
            yield from _waits(self._end(form.end))
        yield self._numbers.ended()

    def _end(self, end: str) -> Steps[None]:
        """Pass the end of a call. At the end of the answer it may be left out."""
        if (yield from self._source.accept(end)):
            return
        if not self._source.is_whole or not _begins(end, self._source.rest):
            raise NotACallError(f"no {end!r}")
        self._source.at = len(self._source.text)

    # ---- one JSON object ----

    def _object(self, keys: Keys) -> Deltas:
        """A call as one object, whatever the order of its keys."""
        name, held = yield from self._fields(keys, "", None, _OUTER)
        if not name:
            raise NotACallError("no name")
        if not self._numbers.is_open:
            yield self._announce(name)
            yield self._numbers.more(held or "{}")

    def _fields(
        self, keys: Keys, name: str, held: str | None, outer: tuple[str, ...] = ()
    ) -> Generator[Delta | None, None, tuple[str, str | None]]:
        """Read the fields of an object, and of one under an ``outer`` key; the name, and arguments
        that came before it."""
        source = self._source
        yield from _waits(source.expect("{"))
        is_first = True
        while not (yield from _waits(source.accept("}"))):
            if not is_first:
                yield from _waits(source.expect(","))
            key = yield from _waits(read_key(source))
            yield from _waits(source.expect(":"))
            yield from _waits(source.space())
            if self._strict and is_first and not self._is_known(keys, key):
                raise NotACallError("an object of another kind")
            is_first = False
            if key in (keys.name, *_NAMES):
                if (yield from _waits(source.peek())) not in ('"', "'"):
                    raise NotACallError("a name must be a text")
                name = yield from _waits(read_whole_string(source))
            elif key in (keys.arguments, *_ARGUMENTS):
                if name:
                    yield self._announce(name)
                    yield from self._arguments(self._json_object())
                else:
                    held = yield from _waits(_whole(self._json_object()))
            elif key in outer and (yield from _waits(source.peek())) == "{":
                name, held = yield from self._fields(keys, name, held)
            else:
                yield from _waits(_whole(read_value(source)))
        return name, held

    def _is_known(self, keys: Keys, key: str) -> bool:
        known = (keys.name, keys.arguments, *_NAMES, *_ARGUMENTS, *_OUTER, "type", "id")
        return key in (*known, "tool_call_id")

    def _json_object(self) -> Steps[None]:
        """An object, or the same as JSON within a string."""
        source = self._source
        yield from source.space()
        char = yield from source.peek()
        if char == '"':
            text = yield from read_whole_string(source)
            inner = Source()
            inner.text, inner.is_whole = text, True
            if not text.lstrip().startswith("{"):
                raise NotACallError("arguments must be an object")
            yield from read_value(inner)
            if inner.rest.strip():
                raise NotACallError("text after the arguments")
        elif char == "{":
            yield from read_value(source)
        else:
            raise NotACallError("arguments must be an object")

    # ---- parts ----

    def _parts(self) -> Deltas:
        """A call whose parts have an order."""
        source, start = self._source, self._source.at
        name = call_id = ""
        for part in self._form.parts:
            if isinstance(part, str):
                yield from _waits(source.expect(part))
            elif part is Slot.NAME:
                name = yield from _waits(self._word())
            elif part is Slot.ID:
                call_id = yield from _waits(self._word(_ID))
            elif part is Slot.INDEX:
                yield from _waits(self._word())
                before = _PREFIX.search(self._form.begin)
                call_id = f"{before[0] if before else ''}{source.text[start : source.at].strip()}"
            else:
                yield self._announce(name, call_id)
                yield from self._arguments(self._written(name))

    def _word(self, pattern: re.Pattern[str] = _NAME) -> Steps[str]:
        source = self._source
        yield from source.space()
        while True:
            found = pattern.match(source.text, source.at)
            if found and len(found[0]) > _LONGEST_NAME:
                raise NotACallError("a name is too long")
            if source.is_whole or (found.end() if found else source.at) < len(source.text):
                break
            yield ""
        if found is None:
            raise NotACallError("no name")
        source.at = found.end()
        return found[0]

    def _written(self, name: str) -> Steps[None]:
        """The arguments in their form, as JSON."""
        source = self._source
        match self._form.arguments:
            case None:
                yield from self._json_object()
            case Pairs(opening, assign, _, close, quote):
                yield from source.expect(opening)
                yield "{"
                yield from read_pairs(source, quote if len(quote) > 1 else "", assign, close)
            case Tagged() as form:
                properties = self._tools.get(name, {}).get("properties", {})
                yield from self._tagged(form, properties if isinstance(properties, dict) else {})

    def _tagged(self, form: Tagged, properties: Mapping[str, Any]) -> Steps[None]:
        source, parts = self._source, self._form.parts
        after = "".join(part for part in parts[-1:] if isinstance(part, str)) + self._form.end
        separator = "{"
        while True:
            if (yield from self._ends_here(after)) or not (yield from source.accept(form.begin)):
                break
            key, kind = yield from self._key(form)
            yield f"{separator}{json.dumps(key, ensure_ascii=False)}: "
            separator = ", "
            schema = properties.get(key)
            if kind == "string" or (not kind and types_of(schema) == {"string"}):
                yield '"'
                for piece in self._raw(form, key, after):
                    yield escaped(piece) if piece else ""
                yield '"'
            else:
                pieces = []
                for piece in self._raw(form, key, after):
                    if piece:
                        pieces.append(piece)
                    else:
                        yield ""
                yield _as_json("".join(pieces), types_of(schema))
        yield "{}" if separator == "{" else "}"

    def _ends_here(self, after: str) -> Steps[bool]:
        """Whether the call ends: its end may begin like an argument."""
        start = self._source.at
        found = bool(after.strip()) and (yield from self._source.accept(after))
        self._source.at = start
        return found

    def _key(self, form: Tagged) -> Steps[tuple[str, str]]:
        """A key and the type of its value, as far as the form says it."""
        source = self._source
        if not form.assigns:
            first = form.assign.split()[0]
            key = yield from source.until((first,), _LONGEST_NAME)
            yield from source.expect(form.assign)
            return key.strip(), ""
        assigns = (("string", form.assign), *form.assigns)
        first = _shared([text for _, text in assigns])
        key = yield from source.until((first,), _LONGEST_NAME)
        for kind, assign in sorted(assigns, key=lambda item: -len(item[1])):
            if (yield from source.accept(assign)):
                return key.strip(), kind
        raise NotACallError("no value")

    def _raw(self, form: Tagged, key: str, after: str) -> Steps[None]:
        """The text of a value, up to an end tag that is followed by the next key or the end."""
        source, end = self._source, form.end.replace(KEY, key)
        tag = end.strip()
        if form.assign.endswith("\n") and (yield from source.peek()) == "\n":
            source.at += 1
        while True:
            found = source.text.find(tag, source.at)
            if found < 0:
                if source.is_whole:
                    raise NotACallError("a value has no end")
                cut = len(source.text) - source.held((tag,))
                if cut > source.at:
                    piece, source.at = source.text[source.at : cut], cut
                    yield piece
                yield ""
                continue
            start = source.at
            source.at = found + len(tag)
            if (yield from self._follows(form, after)):
                piece = source.text[start:found]
                if end.startswith("\n"):
                    piece = piece.removesuffix("\n")
                if piece:
                    yield piece
                return
            yield source.text[start : source.at]

    def _follows(self, form: Tagged, after: str) -> Steps[bool]:
        """Whether the next key or the end of the call follows."""
        start = self._source.at
        for text in (after, form.between + form.begin):
            found = yield from self._source.accept(text)
            self._source.at = start
            if found:
                return True
        yield from self._source.space()
        is_end = (yield from self._source.peek()) == ""
        self._source.at = start
        return is_end

    # ---- what comes out ----

    def _announce(self, name: str, call_id: str = "") -> Delta:
        if self._strict and name not in self._tools:
            raise NotACallError(f"no tool {name!r:.40}")
        return self._numbers.begin(name, call_id)

    def _arguments(self, steps: Steps[None]) -> Deltas:
        for piece in steps:
            yield self._numbers.more(piece) if piece else None


def _waits(steps: Steps[Any]) -> Generator[None, None, Any]:
    """Read something beside the arguments."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value
        yield None


def _whole(steps: Steps[None]) -> Steps[str]:
    """Wait for all of a value."""
    pieces = []
    for piece in steps:
        if piece:
            pieces.append(piece)
        else:
            yield ""
    return "".join(pieces)


def _begins(text: str, start: str) -> bool:
    """Whether a text begins so, white space apart."""
    return "".join(text.split()).startswith("".join(start.split()))


def _shared(texts: list[str]) -> str:
    """The common beginning of texts."""
    first, last = min(texts), max(texts)
    count = next((i for i, char in enumerate(first) if char != last[i : i + 1]), len(first))
    return first[:count].strip()


_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object"}


def types_of(schema: Any) -> set[str]:
    """The JSON types that a schema names; empty: any."""
    if not isinstance(schema, Mapping):
        return set()
    if isinstance(options := schema.get("enum"), list):
        return {_type_of(option) for option in options}
    wanted = schema.get("type")
    if isinstance(wanted, str):
        return {wanted}
    if isinstance(wanted, list):
        return {kind for kind in wanted if isinstance(kind, str)}
    for name in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(name), list):
            found = [types_of(option) for option in options]
            return set().union(*found) if all(found) else set()
    return set()


def _type_of(value: Any) -> str:
    return "null" if value is None else _TYPES.get(type(value), "array")


def _as_json(text: str, types: set[str]) -> str:
    """A value written without quotes: a text if the types say so, or if it is not a value."""
    source = Source()
    source.text, source.is_whole = text, True
    try:
        written = "".join(read_value(source))
        kind = _type_of(json.loads(written))
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    fits = kind in types or (kind == "integer" and "number" in types)
    is_free = "string" not in types and (types or kind in ("object", "array"))
    if source.rest.strip() or not (fits or is_free):
        return json.dumps(text, ensure_ascii=False)
    return written
