"""Finds known calls in the text that a chat template makes of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

from urdir.model.text.call_form import KEY, Keys, Pairs, Part, Slot, Tagged, tags
from urdir.model.text.template_probe import shared_end, shared_start

Arguments = dict[str, Any]

#: The arguments of two calls, a text and a number each.
ARGUMENTS: tuple[Arguments, Arguments] = (
    {"key_one": "val uno", "key_two": 4711},
    {"key_one": "due val", "key_two": 8192},
)
_DECODER = json.JSONDecoder()
_MOST_BRACES = 500  # places of a text where an object may begin


@dataclass(frozen=True, slots=True)
class Known:
    """A call that was rendered."""

    name: str
    id: str
    arguments: Arguments

    def turn(self, *, as_text: bool) -> dict[str, Any]:
        """The call in OpenAI's form."""
        arguments = json.dumps(self.arguments) if as_text else self.arguments
        function = {"name": self.name, "arguments": arguments}
        return {"type": "function", "id": self.id, "function": function}


@dataclass(frozen=True, slots=True)
class Found:
    """Where a call is in a text, and how it is written."""

    start: int
    end: int
    parts: tuple[Part, ...]
    keys: Keys | None = None
    arguments: Pairs | Tagged | None = None


def find_call(text: str, call: Known) -> Found | None:
    """Find a call in a text; None where it is in no known form."""
    return _as_object(text, call) or _named(text, call)


# ---- one JSON object ----


def _as_object(text: str, call: Known) -> Found | None:
    """A call that is an object in JSON."""
    for start, end, value in _objects(text):
        outer = value.get("function")
        inner = outer if isinstance(outer, dict) else value
        if inner.get(call.name) == call.arguments:
            keys = None
        elif (keys := _keys(inner, call)) is None:
            continue
        name = text.find(f'"{call.name}"', start, end)
        at, written = _written(text, start, call)
        if name < 0 or at < 0:  # written with escapes that models do not use
            return None
        places = [(name + 1, call.name, Slot.NAME), (at, written, Slot.ARGUMENTS)]
        for known in (call.id, call.id[-9:]):
            if (at := text.find(f'"{known}"', start, end)) >= 0:
                places.append((at + 1, known, Slot.ID))
                break
        return Found(start, end, _parts(text, start, end, places), keys)
    return None


def _keys(value: Arguments, call: Known) -> Keys | None:
    name = next((key for key, each in value.items() if each == call.name), None)
    for key, each in value.items():
        if name is not None and (each == call.arguments or _loaded(each) == call.arguments):
            return Keys(name, key)
    return None


def _loaded(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else None
    except ValueError:
        return None


def _written(text: str, start: int, call: Known) -> tuple[int, str]:
    """Where the arguments are, and their text; -1 if they are not as json.dumps writes them."""
    for at, end, value in _objects(text, start):
        if value == call.arguments:
            return at, text[at:end]
    encoded = json.dumps(json.dumps(call.arguments))
    return text.find(encoded, start), encoded


def _objects(text: str, start: int = 0) -> Iterator[tuple[int, int, Arguments]]:
    """The objects in JSON that a text has."""
    for found in islice(re.finditer(r"\{", text[start:]), _MOST_BRACES):
        at = start + found.start()
        try:
            value, end = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            yield at, end, value


def _parts(
    text: str, start: int, end: int, places: list[tuple[int, str, Slot]]
) -> tuple[Part, ...]:
    """A part of a text with slots in these places."""
    parts: list[Part] = []
    for at, written, slot in sorted(places):
        parts += [text[start:at], slot]
        start = at + len(written)
    return tuple(part for part in (*parts, text[start:end]) if part)


# ---- a name, then arguments ----


def _named(text: str, call: Known) -> Found | None:
    """A call that has its name in front of the arguments."""
    at = text.find(call.name)
    if at < 0:
        return None
    first = text.find("key_one", at)
    names = [found.start() for found in re.finditer(re.escape(call.name), text[: max(first, 0)])]
    if not names:
        return None
    places = [(at, call.name, Slot.NAME) for at in names]
    after = names[-1] + len(call.name)
    for begin, end, value in _objects(text, after):
        if value == call.arguments:
            places.append((begin, text[begin:end], Slot.ARGUMENTS))
            return _with_id(text, call, end, places, None)
    if (found := _pairs(text, call, after)) is None:
        return None
    begin, end, arguments = found
    places.append((begin, text[begin:end], Slot.ARGUMENTS))
    return _with_id(text, call, end, places, arguments)


def _with_id(
    text: str,
    call: Known,
    end: int,
    places: list[tuple[int, str, Slot]],
    arguments: Pairs | Tagged | None,
) -> Found:
    at = text.find(call.id)
    if 0 <= at < end and call.name not in call.id:
        places.append((at, call.id, Slot.ID))
    start = min(at for at, *_ in places)
    return Found(start, end, _parts(text, start, end, places), None, arguments)


def _pairs(text: str, call: Known, after: int) -> tuple[int, int, Pairs | Tagged] | None:
    """Arguments that are no JSON: their begin, their end, their form."""
    (one, text_value), (two, number) = call.arguments.items()
    spans = []
    at = after
    for word in (one, text_value, two, str(number)):
        at = text.find(word, at)
        if at < 0:
            return None
        spans.append((at, at + len(word)))
        at += len(word)
    opening = text[after : spans[0][0]]
    assign, gap, assign_two = (text[a[1] : b[0]] for a, b in pairwise(spans))
    if opening.endswith(("'", '"')) and assign.startswith(opening[-1]) and opening[-2:] != '="':
        return None  # keys of a dictionary in Python
    quote = _quote(assign, gap)
    rest = text[spans[3][1] :]
    if quote:
        bare = assign.removesuffix(quote)
        close = next((tag for tag in tags(rest) if tag.strip()), "")
        if bare.strip() != assign_two.strip() or not close:
            return None
        end = spans[3][1] + rest.index(close) + len(close)
        comma = gap.removeprefix(quote)
        return after, end, Pairs(opening, bare, comma, close, quote)
    gap, rest = gap.replace(one, KEY), rest.replace(two, KEY)
    begin = shared_end(opening, gap)
    gap = gap.removesuffix(begin)
    value_end = shared_start(rest, gap)
    if not begin.strip() or not assign.strip() or not value_end.strip():
        return None
    assigns = () if assign == assign_two else (("integer", assign_two),)
    form = Tagged(begin, assign, value_end, gap[len(value_end) :], assigns)
    end = spans[3][1] + len(value_end.replace(KEY, two))
    return spans[0][0] - len(begin), end, form


def _quote(assign: str, gap: str) -> str:
    """The tag around a text, which is the same on both sides."""
    before, after = tags(assign)[-1:], tags(gap)[:1]
    return before[0] if before and before == after and before[0].strip() else ""
