"""Tags in text that comes piece by piece: stop strings, and what parts an answer."""

from __future__ import annotations

from collections.abc import Iterable


def begun(text: str, tags: Iterable[str]) -> int:
    """Length of the longest end of `text` that one of `tags` begins with, short of a whole tag."""
    tags = tuple(tags)
    longest = max((len(tag) for tag in tags), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(tag.startswith(text[-length:]) for tag in tags):
            return length
    return 0


def begun_after_space(text: str, tag: str) -> int:
    """The same with the white space before it, which belongs to the tag if it comes."""
    before = text[: len(text) - begun(text, (tag,))]
    return len(text) - len(before.rstrip())


def shared_length(first: str, second: str) -> int:
    """How many characters two texts begin with together."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
