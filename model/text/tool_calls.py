"""Extracts tool calls from a streamed answer; the formats are in `call_formats`.

A call is withheld until complete and reported as a whole; text that turns out not to be a call is
released unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from urdir.model.text.deltas import CallNumbers, Delta, Splitter, ToolCall, as_content
from urdir.model.text.tags import begun_after_space

Tools = Mapping[str, Mapping[str, Any]]
"""The JSON schema of the parameters of each function, by its name."""


class UnfinishedError(ValueError):
    """The text ends within a value: the supposed end tag is part of it."""


@dataclass(frozen=True, slots=True)
class CallTags:
    """The tags around calls, and the parser of the text between them."""

    begin: str
    end: str | None  # None: calls extend to the end of the answer
    read: Callable[[str, Tools], list[ToolCall]]  # the text between; ValueError if it is not a call
    may_be_bare: Callable[[str], bool | None] | None = None
    """Whether an answer with this start consists of calls without tags; None: not known yet."""


_MAX_ENDS = 16  # end tags within the values of one call


class CallSplitter(Splitter):
    """Splits streamed text into content and calls.

    White space around calls belongs to their tags. Calls that do not parse are content.
    """

    def __init__(self, tags: CallTags, tools: Tools, numbers: CallNumbers) -> None:
        super().__init__()
        self._tags = tags
        self._tools = tools
        self._numbers = numbers
        self._space = ""  # between the content and a possible call
        self._begin = ""  # the start tag of the calls at the start of `_held`
        self._is_call = False
        self._is_start = tags.may_be_bare is not None
        self._after_call = False
        self._searched = 0  # no end tag before this position
        self._ends = 0  # end tags found within values

    def finish(self) -> list[Delta]:
        """End the answer; the text that was still withheld."""
        deltas = self.push("")
        while self._is_call:
            try:
                calls = self._read(self._held[len(self._begin) :])
            except UnfinishedError:
                calls = []
            deltas += self._give(calls, len(self._held)) + self.push("")
        rest, self._held = self._held, ""
        return [*deltas, *as_content(rest)]

    def _step(self) -> list[Delta] | None:
        """Consume the next part of the withheld text; None if more is needed."""
        if self._is_call:
            return self._find_end()
        if self._is_start:
            assert self._tags.may_be_bare is not None
            is_bare = self._tags.may_be_bare(self._held)
            if is_bare is None:
                return None
            self._is_start = False
            self._is_call, self._begin = is_bare, ""
            return []
        return self._find_begin()

    def _find_begin(self) -> list[Delta] | None:
        begin = self._tags.begin
        if self._after_call:
            self._held = self._held.lstrip()
        if (found := self._held.find(begin)) >= 0:
            content = self._held[:found].rstrip()
            self._space = self._held[len(content) : found]
            self._held = self._held[found:]
            self._is_call, self._begin = True, begin
            self._searched, self._ends = len(begin), 0
            return as_content(content)
        cut = len(self._held) - begun_after_space(self._held, begin)
        if not cut:
            return None
        content, self._held = self._held[:cut], self._held[cut:]
        self._after_call = False
        return as_content(content)

    def _find_end(self) -> list[Delta] | None:
        end = self._tags.end
        if end is None or not self._begin:
            return None
        found = self._held.find(end, self._searched)
        if found < 0:
            self._searched = max(len(self._begin), len(self._held) - len(end) + 1)
            return None
        try:
            calls = self._read(self._held[len(self._begin) : found])
        except UnfinishedError:
            if self._ends < _MAX_ENDS:
                self._searched, self._ends = found + 1, self._ends + 1
                return []
            calls = []
        return self._give(calls, found + len(end))

    def _read(self, inner: str) -> list[ToolCall]:
        """The calls in the text between tags; empty if it does not parse."""
        try:
            return self._tags.read(inner, self._tools)
        except UnfinishedError:
            raise
        except (ValueError, RecursionError):
            return []

    def _give(self, calls: list[ToolCall], count: int) -> list[Delta]:
        """Report `calls` for the next `count` characters; without calls the tag was plain text."""
        self._is_call, self._after_call = False, bool(calls)
        if not calls:
            count = len(self._begin) or count
        taken, self._held = self._held[:count], self._held[count:]
        return [self._numbers.delta(call) for call in calls] or as_content(self._space + taken)
