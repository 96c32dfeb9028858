"""Excerpts of a PTX text around the lines named in a log, for error messages."""

from __future__ import annotations

import re
from collections.abc import Iterator

from urdir.ptxgen.ptx.origin import origin


def excerpt(text: str, log: str, around: int = 2) -> Iterator[str]:
    """The lines of ``text`` that ``log`` names ("line 51"), each marked and with its number.

    ``around`` lines before and after each are shown too; "..." marks omissions. A line of a
    template has its place there after it.
    """
    lines = text.split("\n")
    named = {int(n) for n in re.findall(r"\bline (\d+)", log)} & set(range(1, len(lines) + 1))
    near = {n + d for n in named for d in range(-around, around + 1)}
    shown = near & set(range(1, len(lines) + 1))
    for number in sorted(shown):
        if number - 1 not in shown:
            yield "  ..."
        at = origin(text, number) if number in named else ""
        mark, place = (">" if number in named else " "), f"  <- {at}" if at else ""
        yield f"{mark}{number:5d} | {lines[number - 1]}{place}"
