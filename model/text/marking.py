"""Marks users' texts so that no control token begins in them, whatever a template does.

Every character that can begin a control token is replaced by a stand-in from Unicode's private use
area before a template sees it. A template may trim, cut, join or delete: no remaining character can
begin a control token. Afterwards the stand-ins are replaced back.

Templates search contents for some tags themselves, as "</think>". Tags that a template names may be
kept; the caller must then compare the results.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from urdir.model.errors import TemplateError

_PRIVATE_USE = range(0xE000, 0xF900)
_BLOCK = re.compile(r"\{[{%].*?[%}]\}", re.DOTALL)
_LITERAL = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"", re.DOTALL)
_USED_UP = "the conversation uses up Unicode's private use area"
_MOST_TAGS, _LONGEST_TAG = 256, 64
_MOST_LEVELS = 100


class Marker:
    """Marks texts for a template and the control tokens of a vocabulary, given as texts."""

    def __init__(self, source: str, control: Collection[str]) -> None:
        first = "".join({text[0] for text in control if not text[0].isalnum()})
        # "striptags" turns "&lt;" into "<"
        self._starts = frozenset(first.lower() + first.upper() + "&")
        # Letters begin ordinary words, which templates compare. Such tokens must match in full.
        words = (text for text in control if text[0].isalnum())
        self._words = sorted({w for text in words for w in (text, text.lower(), text.upper())})
        self._tags = _tags(source, self._starts, control)

    def has_tags(self, value: Any) -> bool:
        """Whether a string of a JSON value contains a tag that the template names."""
        return any(self._tags.search(text) for text in texts_of(value))

    def marked(self, value: Any, source: str, keeps_tags: bool) -> tuple[Any, dict[str, str]]:
        """A JSON value with stand-ins in all strings, and the character that each replaces.

        A stand-in occurs neither in the value nor in ``source``. Raises TemplateError if there are
        too few.
        """
        texts = set(texts_of(value))
        places = {text: self._places(text, keeps_tags) for text in texts}
        characters = {text[i] for text, found in places.items() for i in found}
        stand_ins = _stand_ins(characters, [source, *texts])

        def changed(text: str) -> str:
            found = places[text]
            return "".join(stand_ins[char] if i in found else char for i, char in enumerate(text))

        return _map_texts(value, changed), {new: old for old, new in stand_ins.items()}

    def _places(self, text: str, keeps_tags: bool) -> set[int]:
        found = {i for i, char in enumerate(text) if char in self._starts}
        for word in self._words:
            at = text.find(word)
            while at >= 0:
                found.add(at)
                at = text.find(word, at + 1)
        if keeps_tags:
            for tag in self._tags.finditer(text):
                found.difference_update(range(*tag.span()))
        return found


def texts_of(value: Any, levels: int = _MOST_LEVELS) -> Iterator[str]:
    """All strings of a JSON value, keys included. Raises TemplateError beyond ``levels`` of
    nesting, before later recursion overflows Python's stack."""
    if isinstance(value, str):
        yield value
        return
    if not isinstance(value, Mapping | Sequence):
        return
    if not levels:
        raise TemplateError(f"the conversation nests deeper than {_MOST_LEVELS} levels")
    if isinstance(value, Mapping):
        yield from value
        value = value.values()
    for item in value:
        yield from texts_of(item, levels - 1)


def unused_character(texts: Iterable[str]) -> str:
    """A character of Unicode's private use area that occurs in none of ``texts``; TemplateError if
    all are used."""
    for character in _unused(texts):
        return character
    raise TemplateError(_USED_UP)


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with each of its strings changed. Keys and roles that are words stay: templates
    compare them."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            key if key.isidentifier() else change(key): item
            if key == "role" and str(item).isidentifier()
            else _map_texts(item, change)
            for key, item in value.items()
        }
    if isinstance(value, Sequence):
        return [_map_texts(item, change) for item in value]
    return value


def _tags(source: str, starts: Collection[str], control: Iterable[str]) -> re.Pattern[str]:
    """Strings in a template's expressions that begin like control tokens but are none."""
    literals = (a or b for block in _BLOCK.findall(source) for a, b in _LITERAL.findall(block))
    tags = {text.strip() for text in literals if text.strip()[:1] in starts}
    tags = {tag for tag in tags if 1 < len(tag) <= _LONGEST_TAG}
    ordered = sorted(text.lower() for text in control)
    known = set(ordered)

    def is_control(tag: str) -> bool:
        at = bisect_left(ordered, tag)
        begins_one = at < len(ordered) and ordered[at].startswith(tag)
        return begins_one or any(tag[:n] in known for n in range(1, len(tag)))

    usable = sorted(tag for tag in tags if not is_control(tag.lower()))[:_MOST_TAGS]
    return re.compile("|".join(map(re.escape, usable)) or "(?!)")


def _stand_ins(characters: Iterable[str], texts: Sequence[str]) -> dict[str, str]:
    """A private use character for each of `characters` that occurs in none of `texts`."""
    chosen = dict(zip(sorted(characters), _unused(texts), strict=False))
    if len(chosen) < len(set(characters)):
        raise TemplateError(_USED_UP)
    return chosen


def _unused(texts: Iterable[str]) -> Iterator[str]:
    """Characters of the private use area that occur in none of `texts`."""
    used = set().union(*texts)
    return (chr(code) for code in _PRIVATE_USE if chr(code) not in used)
