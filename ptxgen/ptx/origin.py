"""Template lines behind the lines of rendered PTX texts, for messages.

Rendering registers a function that finds them, which is called when a message needs it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence

#: From a text to its template lines: "scale.ptx.j2:12", or "" for lines of the frame. The text is
#: an argument, so that none is kept in memory.
Lines = Callable[[str], Sequence[str]]

#: By digest of the text, the oldest first.
_known: dict[str, Lines] = {}
_MOST = 4096


def digest(text: str) -> str:
    """The name of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def remember(name: str, lines: Lines) -> None:
    """Keep ``lines`` for the text with this `digest`; the oldest of many are forgotten."""
    _known.pop(name, None)
    _known[name] = lines
    while len(_known) > _MOST:
        _known.pop(next(iter(_known)), None)


def origins(text: str) -> Sequence[str]:
    """The template line of every line of ``text``; empty if unknown."""
    name = digest(text)
    lines = _known.pop(name, None)  # also ends a search that comes back to the same text
    found = lines(text) if lines is not None else ()
    if found:
        remember(name, lambda _: found)
    return found


def origin(text: str, line: int) -> str:
    """The template line of line ``line`` (from 1) of ``text``; "" if unknown."""
    found = origins(text)
    return found[line - 1] if 0 < line <= len(found) else ""


_PTX_LINE = re.compile(r"PTX line (\d+)")


def with_origins(message: str, text: str) -> str:
    """``message`` with the template line after each "PTX line N" of ``text``."""

    def beside(m: re.Match[str]) -> str:
        at = origin(text, int(m[1]))
        return f"{m[0]}, {at}" if at else m[0]

    return _PTX_LINE.sub(beside, message)
