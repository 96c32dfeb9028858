"""The part of an answer in which a model thinks, found while the answer streams."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

#: What begins a thought, and what ends it.
TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))


def begins_inside(prompt: str) -> str:
    """The tag that ends the thought which a rendered prompt has opened, "" where it has none."""
    return next((end for start, end in TAGS if prompt.rstrip().endswith(start)), "")


def split_reasoning(pieces: Iterable[str], until: str = "") -> Iterator[tuple[str, bool]]:
    """(text, whether it is thought) of an answer's pieces; tags belong to the thought.

    ``until`` is the tag that ends a thought which the answer begins with. Text that may turn out to
    be the beginning of a tag waits for the next piece.
    """
    rest = ""
    for piece in pieces:
        rest += piece
        while found := _first(rest, until):
            at, tag, after = found
            end = at + len(tag) if until else at
            yield from _part(rest[:end], bool(until))
            rest = rest[end:]
            if not until:
                yield tag, True
                rest = rest[len(tag) :]
            until = after
        safe = len(rest) - _unfinished(rest, until)
        yield from _part(rest[:safe], bool(until))
        rest = rest[safe:]
    yield from _part(rest, bool(until))


def _part(text: str, is_thought: bool) -> Iterator[tuple[str, bool]]:
    if text:
        yield text, is_thought


def _first(text: str, until: str) -> tuple[int, str, str] | None:
    """Where the next tag is, the tag, and what ends the thought after it."""
    tags = [(until, "")] if until else list(TAGS)
    found = [(text.find(tag), tag, after) for tag, after in tags if tag in text]
    return min(found, default=None)


def _unfinished(text: str, until: str) -> int:
    """How many characters at the end may belong to a tag."""
    tags = [until] if until else [start for start, _ in TAGS]
    sizes = (n for tag in tags for n in range(1, len(tag)) if text.endswith(tag[:n]))
    return max(sizes, default=0)
