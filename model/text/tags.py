"""Tags in streamed text: stop strings, and the tags that divide an answer."""

from __future__ import annotations

import re
from collections.abc import Iterable

MOST_SPACE = 1000
"""Characters of white space that belong to a tag; what is before them is text."""


def begun(text: str, tags: Iterable[str]) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of one of `tags`."""
    tags = tuple(tags)
    longest = max((len(tag) for tag in tags), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(tag.startswith(text[-length:]) for tag in tags):
            return length
    return 0


def begun_after_space(text: str, tags: Iterable[str]) -> int:
    """As `begun`, including preceding white space, which belongs to the tag."""
    before = text[: len(text) - begun(text, tags)]
    return len(text) - len(without_space(before))


def without_space(text: str) -> str:
    """A text without the white space at its end that belongs to a tag after it."""
    return text[: max(len(text.rstrip()), len(text) - MOST_SPACE)]


def shared_length(first: str, second: str) -> int:
    """Length of the common prefix of two texts."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def cut(text: str, tags: Iterable[str]) -> list[tuple[str, bool]]:
    """The pieces of a text, and whether each is one of the tags."""
    found = sorted((tag for tag in tags if tag in text), key=len, reverse=True)
    pieces = re.split(f"({'|'.join(map(re.escape, found))})", text) if found else [text]
    return [(piece, piece in found) for piece in pieces if piece]
