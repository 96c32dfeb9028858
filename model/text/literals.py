"""Values that models write in calls, as JSON: JSON itself, Python's literals, and strings between
tags (`<|"|>`), which stay as they are.

The readers yield JSON text piece by piece, spaced as json.dumps does, and are lenient: each form
may occur in any call.
"""

from __future__ import annotations

import json
import math
import re

from urdir.model.text.source import NotACallError, Source, Steps
from urdir.model.text.tags import begun

_MOST_LEVELS = 64
_LONGEST_WORD = 400
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?")
_WORD = re.compile(r"[-+.\w]*")
_KEY = re.compile(r"[-.\w$]*")
_RUNS = {quote: re.compile(rf"[^\\{quote}]+") for quote in "\"'"}
_HEX = {"x": 2, "u": 4, "U": 8}
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0"} | {
    char: char for char in "\"'\\/\n"
}


def escaped(text: str) -> str:
    """A part of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def read_value(source: Source, quote: str = "", level: int = 0) -> Steps[None]:
    """Read a value as JSON; ``quote`` is the tag around strings, if there is one. Raises
    NotACallError."""
    if level > _MOST_LEVELS:
        raise NotACallError("a value nests too deeply")
    yield from source.space()
    char = yield from source.peek()
    if char in _RUNS or (quote and char == quote[0] and (yield from _follows(source, quote))):
        yield '"'
        yield from read_string(source, quote)
        yield '"'
    elif char == "[":
        source.at += 1
        yield "["
        yield from _read_items(source, quote, level)
    elif char == "{":
        source.at += 1
        yield "{"
        yield from read_pairs(source, quote, ":", "}", level)
    else:
        yield _as_json((yield from _read_run(source, _WORD)))


def read_pairs(source: Source, quote: str, assign: str, close: str, level: int = 0) -> Steps[None]:
    """Read keys and values up to ``close`` as the rest of a JSON object."""
    is_first = True
    while not (yield from source.accept(close)):
        source.put_aside()
        if not is_first:
            yield from source.expect(",")
            if (yield from source.accept(close)):  # Python permits a last comma
                break
            yield ", "
        key = yield from read_key(source, quote)
        yield from source.expect(assign)
        yield f"{json.dumps(key, ensure_ascii=False)}: "
        yield from read_value(source, quote, level + 1)
        is_first = False
    yield "}"


def _read_items(source: Source, quote: str, level: int) -> Steps[None]:
    is_first = True
    while not (yield from source.accept("]")):
        source.put_aside()
        if not is_first:
            yield from source.expect(",")
            yield ", "
        yield from read_value(source, quote, level + 1)
        is_first = False
    yield "]"


def read_key(source: Source, quote: str = "") -> Steps[str]:
    """Read a key: a string or a word."""
    yield from source.space()
    char = yield from source.peek()
    if char in _RUNS or (quote and char == quote[0] and (yield from _follows(source, quote))):
        return (yield from read_whole_string(source, quote))
    if not (key := (yield from _read_run(source, _KEY))):
        raise NotACallError("no key")
    return key


def read_whole_string(source: Source, quote: str = "") -> Steps[str]:
    """Read a string and wait for all of it."""
    parts = []
    for piece in read_string(source, quote):
        if piece:
            parts.append(piece)
        else:
            yield ""
    text: str = json.loads(f'"{"".join(parts)}"')
    return text


def read_string(source: Source, quote: str = "") -> Steps[None]:
    """Read a string, whose first quote follows, as the inside of a JSON string."""
    if quote and (yield from _follows(source, quote)):
        source.at += len(quote)
        yield from _read_tagged(source, quote)
        return
    opening = source.text[source.at]
    source.at += 1
    while (char := (yield from source.peek())) != opening:
        if char == "":
            raise NotACallError("a string has no end")
        if char == "\\":
            yield from _read_escape(source)
        elif found := _RUNS[opening].match(source.text, source.at):
            source.at = found.end()
            source.put_aside()
            yield escaped(found[0])
    source.at += 1


def _read_tagged(source: Source, quote: str) -> Steps[None]:
    while (end := source.text.find(quote, source.at)) < 0:
        cut = len(source.text) - begun(source.rest, (quote,))
        if cut > source.at:
            piece, source.at = source.text[source.at : cut], cut
            source.put_aside()
            yield escaped(piece)
        if source.is_whole:
            raise NotACallError("a string has no end")
        yield ""
    piece, source.at = source.text[source.at : end], end + len(quote)
    if piece:
        yield escaped(piece)


def _read_escape(source: Source) -> Steps[None]:
    code = yield from _read_code(source)
    if isinstance(code, str):
        yield escaped(code)
        return
    if 0xD800 <= code < 0xDC00:  # JSON writes two
        yield from source.need(2)
        following = (yield from _read_code(source)) if source.rest[:2] == "\\u" else 0
        if not isinstance(following, int) or not 0xDC00 <= following < 0xE000:
            raise NotACallError("a string has half a character")
        code = 0x10000 + ((code - 0xD800) << 10) + following - 0xDC00
    elif 0xDC00 <= code < 0xE000 or code > 0x10FFFF:
        raise NotACallError("a string has half a character")
    yield escaped(chr(code))


def _read_code(source: Source) -> Steps[str | int]:
    """The character of an escape sequence, or its number."""
    if not (yield from source.need(2)):
        raise NotACallError("a string has no end")
    kind = source.text[source.at + 1]
    if kind in _ESCAPED:
        source.at += 2
        return _ESCAPED[kind]
    digits = _HEX.get(kind, 0)
    yield from source.need(2 + digits)
    number = source.rest[2 : 2 + digits]
    if len(number) < max(digits, 1) or not all(d in "0123456789abcdefABCDEF" for d in number):
        raise NotACallError("a string has an unknown escape")
    source.at += 2 + digits
    return int(number, 16)


def _read_run(source: Source, pattern: re.Pattern[str]) -> Steps[str]:
    """The longest text that fits."""
    while True:
        found = pattern.match(source.text, source.at)
        assert found is not None
        if len(found[0]) > _LONGEST_WORD:
            raise NotACallError("a word is too long")
        if found.end() < len(source.text) or source.is_whole:
            source.at = found.end()
            return found[0]
        yield ""


def _as_json(word: str) -> str:
    if (known := _WORDS.get(word.lower())) is not None:
        return known
    if _NUMBER.fullmatch(word) and json.loads(word) not in (math.inf, -math.inf):
        return word
    raise NotACallError(f"{word!r:.40} is not a value")


def _follows(source: Source, literal: str) -> Steps[bool]:
    """Whether a text follows."""
    start = source.at
    found = yield from source.accept(literal)
    source.at = start
    return found
