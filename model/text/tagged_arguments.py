"""Reads arguments between tags (`Tagged`): keys, and values without quotes, as a JSON object."""

from __future__ import annotations

import json
from collections.abc import Mapping

from urdir.model.text.call_form import KEY, Tagged
from urdir.model.text.literals import escaped, read_value
from urdir.model.text.source import NotACallError, Source, Steps
from urdir.model.text.tags import begun
from urdir.model.text.tool_schemas import Schema, type_of, types_of

_LONGEST_KEY = 256


def read_tagged(
    source: Source, form: Tagged, schemas: Mapping[str, Schema], after: str
) -> Steps[None]:
    """Read arguments as a JSON object; ``schemas`` are those of the properties, ``after`` is the
    text at the end of the call. Raises NotACallError."""
    separator = "{"
    while True:
        source.put_aside()
        if (yield from _ends_here(source, after)) or not (yield from source.accept(form.begin)):
            break
        key, kind = yield from _key(source, form)
        yield f"{separator}{json.dumps(key, ensure_ascii=False)}: "
        separator = ", "
        types = types_of(schemas.get(key, {}))
        if kind == "string" or (not kind and types == {"string"}):
            yield '"'
            for piece in _raw(source, form, key, after):
                yield escaped(piece) if piece else ""
            yield '"'
        else:
            pieces = []
            for piece in _raw(source, form, key, after):
                if piece:
                    pieces.append(piece)
                else:
                    yield ""
            yield _as_json("".join(pieces), types)
    yield "{}" if separator == "{" else "}"


def _ends_here(source: Source, after: str) -> Steps[bool]:
    """Whether the call ends: its end may begin like an argument."""
    start = source.at
    found = bool(after.strip()) and (yield from source.accept(after))
    source.at = start
    return found


def _key(source: Source, form: Tagged) -> Steps[tuple[str, str]]:
    """A key and the type of its value, as far as the form says it."""
    if not form.assigns:
        first = form.assign.split()[0]
        key = yield from source.until((first,), _LONGEST_KEY)
        yield from source.expect(form.assign)
        return key.strip(), ""
    assigns = (("string", form.assign), *form.assigns)
    first = _shared([text for _, text in assigns])
    key = yield from source.until((first,), _LONGEST_KEY)
    for kind, assign in sorted(assigns, key=lambda item: -len(item[1])):
        if (yield from source.accept(assign)):
            return key.strip(), kind
    raise NotACallError("no value")


def _raw(source: Source, form: Tagged, key: str, after: str) -> Steps[None]:
    """The text of a value, up to an end tag that is followed by the next key or the end."""
    end = form.end.replace(KEY, key)
    tag = end.strip()
    if form.assign.endswith("\n") and (yield from source.peek()) == "\n":
        source.at += 1
    while True:
        found = source.text.find(tag, source.at)
        if found < 0:
            if source.is_whole:
                raise NotACallError("a value has no end")
            cut = len(source.text) - begun(source.rest, (tag,))
            if source.text[source.at : cut].endswith("\n"):  # may belong to the tag
                cut -= 1
            if cut > source.at:
                piece, source.at = source.text[source.at : cut], cut
                source.put_aside()
                yield piece
            yield ""
            continue
        start = source.at
        source.at = found + len(tag)
        if (yield from _follows(source, form, after)):
            piece = source.text[start:found]
            if end.startswith("\n"):
                piece = piece.removesuffix("\n")
            if piece:
                yield piece
            return
        piece = source.text[start : source.at]
        source.put_aside()
        yield piece


def _follows(source: Source, form: Tagged, after: str) -> Steps[bool]:
    """Whether the next key or the end of the call follows."""
    start = source.at
    for text in (after, form.between + form.begin):
        found = yield from source.accept(text)
        source.at = start
        if found:
            return True
    yield from source.space()
    is_end = (yield from source.peek()) == ""
    source.at = start
    return is_end


def _shared(texts: list[str]) -> str:
    """The common beginning of texts."""
    first, last = min(texts), max(texts)
    count = next((i for i, char in enumerate(first) if char != last[i : i + 1]), len(first))
    return first[:count].strip()


def _as_json(text: str, types: set[str]) -> str:
    """A value written without quotes: a text if the types say so, or if it is not a value."""
    source = Source(text, is_whole=True)
    try:
        written = "".join(read_value(source))
        kind = type_of(json.loads(written))
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    fits = kind in types or (kind == "integer" and "number" in types)
    is_free = "string" not in types
    if source.rest.strip() or not (fits or is_free):
        return json.dumps(text, ensure_ascii=False)
    return written
