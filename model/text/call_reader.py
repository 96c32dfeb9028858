"""Reads calls of a `CallForm` from streamed text; arguments come as they are written."""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import Any

from urdir.model.text.call_form import CallForm, Keys, Pairs, Slot, Tagged
from urdir.model.text.deltas import CallNumbers, Delta
from urdir.model.text.literals import read_key, read_pairs, read_value, read_whole_string
from urdir.model.text.source import NotACallError, Source, Steps
from urdir.model.text.tagged_arguments import read_tagged
from urdir.model.text.tool_schemas import Tools, properties

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
    """Reads the calls of an answer from ``source``, and cuts each that is whole.

    ``has_calls``: there has been one.
    """

    def __init__(self, form: CallForm, tools: Tools, source: Source, numbers: CallNumbers) -> None:
        self._form = form
        self._tools = tools
        self._source = source
        self._numbers = numbers
        self._strict = False
        self.has_calls = False

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
            self.has_calls = True
            source.cut()
            if is_list:
                goes_on = yield from _waits(source.accept(","))
            elif not (goes_on := (yield from _waits(self._goes_on()))):
                source.at = 0
        if is_list:
            yield from _waits(self._end("]"))
        yield from _waits(self._end_section())
        source.cut()

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
            source.put_aside()
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
            elif key in (keys.arguments, *_ARGUMENTS) and not self._numbers.is_open:
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
            inner = Source(text, is_whole=True)
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
                last = "".join(part for part in self._form.parts[-1:] if isinstance(part, str))
                schemas = properties(self._tools.get(name, {}))
                yield from read_tagged(source, form, schemas, last + self._form.end)

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
