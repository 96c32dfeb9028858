"""Reads streamed text by generators that wait for more of it.

A reader yields "" where it needs more text, anything else as a result, and continues. What it
decides depends on the text alone, never on how it was cut.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeVar

from urdir.model.text.tags import MOST_SPACE

_Result = TypeVar("_Result")

Steps = Generator[str, None, _Result]
"""A reader: yields text, or "" to wait, and returns its result."""


_LONG = 1 << 10


class NotACallError(ValueError):
    """The text is not a call of the expected form."""


class Source:
    """Streamed text, read from position ``at``; ``is_whole`` once nothing follows.

    ``text`` has the end of it: what was read before is put aside, so that more text costs no more
    after a long one.
    """

    def __init__(self, text: str = "", *, is_whole: bool = False) -> None:
        self.text = text
        self.at = 0
        self.is_whole = is_whole
        self._aside: list[str] = []

    @property
    def rest(self) -> str:
        """The text from ``at``."""
        return self.text[self.at :]

    @property
    def whole(self) -> str:
        """All text since the last `cut`."""
        return "".join([*self._aside, self.text])

    def cut(self) -> None:
        """Drop the text before ``at``."""
        self.text, self.at = self.rest, 0
        self._aside.clear()

    def put_aside(self) -> None:
        """Put the text before ``at`` aside, if it is long: positions in it become invalid."""
        if self.at > _LONG and 2 * self.at > len(self.text):
            self._aside.append(self.text[: self.at])
            self.text, self.at = self.rest, 0

    def restart(self) -> None:
        """Go back to the last `cut`."""
        self.text, self.at = self.whole, 0
        self._aside.clear()

    def need(self, count: int = 1) -> Steps[bool]:
        """Wait for ``count`` characters; False if the text ends before."""
        while len(self.text) - self.at < count:
            if self.is_whole:
                return False
            yield ""
        return True

    def space(self) -> Steps[None]:
        """Skip white space. Raises NotACallError for more than a call has."""
        start = self.at
        while (yield from self.need()) and self.text[self.at].isspace():
            self.at += 1
            if self.at - start > MOST_SPACE:
                raise NotACallError("too much white space")

    def peek(self) -> Steps[str]:
        """The next character; "" at the end."""
        return self.text[self.at] if (yield from self.need()) else ""

    def accept(self, literal: str) -> Steps[bool]:
        """Consume ``literal`` if it follows; white space in it, and before it, is optional."""
        start = self.at
        for part in literal.split():
            yield from self.space()
            for char in part:
                if (yield from self.peek()) != char:
                    self.at = start
                    return False
                self.at += 1
        return True

    def expect(self, literal: str) -> Steps[None]:
        """Consume ``literal``, or raise NotACallError."""
        if not (yield from self.accept(literal)):
            raise NotACallError(f"no {literal!r}")

    def until(self, ends: Sequence[str], most: int) -> Steps[str]:
        """The text before the first of ``ends``, which stays; NotACallError after ``most``
        characters."""
        start = self.at
        while True:
            window = self.text[start : start + most]
            found = [i for end in ends if (i := window.find(end)) >= 0]
            if found:
                self.at = start + min(found)
                return window[: min(found)]
            if len(window) >= most or self.is_whole:
                raise NotACallError("no end of a name")
            yield ""
