"""Tool calls cut out of an answer that comes in pieces; the formats are in `call_formats`.

A call is held back until it is whole, and comes out as one: what turns out to be none is text
again, as it was written.
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
    """The text ends within a value: what was taken for its end is a part of it."""


@dataclass(frozen=True, slots=True)
class CallTags:
    """Where calls stand in an answer, and how they are read."""

    begin: str
    end: str | None  # None: they go on to the end of the answer
    read: Callable[[str, Tools], list[ToolCall]]  # what stands between; ValueError for no calls
    may_be_bare: Callable[[str], bool | None] | None = None
    """Whether an answer that begins so is nothing but calls, without tags; None: not known yet."""


_MAX_ENDS = 16  # of one call, found within its values


class CallSplitter(Splitter):
    """Parts text that comes in pieces into content and calls.

    White space around calls belongs to their tags. Calls that cannot be read are content.
    """

    def __init__(self, tags: CallTags, tools: Tools, numbers: CallNumbers) -> None:
        super().__init__()
        self._tags = tags
        self._tools = tools
        self._numbers = numbers
        self._space = ""  # between the content and a call that may come
        self._begin = ""  # the tag of the calls that `_held` begins with
        self._is_call = False
        self._is_start = tags.may_be_bare is not None
        self._after_call = False
        self._searched = 0  # there is no end of the calls before
        self._ends = 0  # that were found within values

    def finish(self) -> list[Delta]:
        """The rest: what was held back."""
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
        """What the next part of the held text is; None where more must come."""
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
        """The calls that stand between tags, none where it cannot be read."""
        try:
            return self._tags.read(inner, self._tools)
        except UnfinishedError:
            raise
        except (ValueError, RecursionError):
            return []

    def _give(self, calls: list[ToolCall], count: int) -> list[Delta]:
        """`calls` for the next `count` characters; without calls the tag was text after all."""
        self._is_call, self._after_call = False, bool(calls)
        if not calls:
            count = len(self._begin) or count
        taken, self._held = self._held[:count], self._held[count:]
        return [self._numbers.delta(call) for call in calls] or as_content(self._space + taken)
