"""Deltas of a streamed answer, and the base of parsers that split it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that a model asks to call; `arguments` is a JSON object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A part of the call with number `index`. The first has the `id` and the `name`, the last one
    `ends` it. With `is_broken` the call turned out not to be one: its text follows as content."""

    index: int
    id: str = ""
    name: str = ""
    arguments_piece: str = ""
    ends: bool = False
    is_broken: bool = False


@dataclass(frozen=True, slots=True)
class Delta:
    """New content, reasoning or part of a call of an answer: exactly one of the three."""

    content: str = ""
    reasoning: str = ""
    tool_call: ToolCallDelta | None = None


def as_content(text: str) -> list[Delta]:
    """The text as content; an empty list if it is empty."""
    return [Delta(content=text)] if text else []


def whole_calls(deltas: Iterable[Delta]) -> list[ToolCall]:
    """The calls in all deltas of an answer."""
    parts: dict[int, list[ToolCallDelta]] = {}
    for delta in deltas:
        if (part := delta.tool_call) is not None:
            parts.setdefault(part.index, []).append(part)
    return [
        ToolCall(first.id, first.name, "".join(part.arguments_piece for part in (first, *rest)))
        for first, *rest in parts.values()
        if not any(part.is_broken for part in rest)
    ]


def new_call_id() -> str:
    """A random id in OpenAI's style."""
    return f"call_{secrets.token_hex(12)}"


def short_call_id() -> str:
    """A random id of nine letters and digits, as Mistral's templates want them."""
    return f"c{secrets.token_hex(4)}"


class CallNumbers:
    """Numbers the calls of an answer, and gives ids to those without one."""

    def __init__(self, new_id: Callable[[], str] = new_call_id) -> None:
        self._new_id = new_id
        self.index = -1
        self.is_open = False

    def begin(self, name: str, call_id: str = "") -> Delta:
        """The next call begins."""
        self.index += 1
        self.is_open = True
        return Delta(tool_call=ToolCallDelta(self.index, call_id or self._new_id(), name))

    def more(self, arguments: str) -> Delta:
        """More arguments of the open call."""
        return Delta(tool_call=ToolCallDelta(self.index, arguments_piece=arguments))

    def ended(self, *, broken: bool = False) -> Delta:
        """The open call ends."""
        self.is_open = False
        return Delta(tool_call=ToolCallDelta(self.index, ends=True, is_broken=broken))


class Splitter:
    """Base class: splits streamed text, and withholds text that may begin a tag."""

    def __init__(self) -> None:
        self._held = ""

    @property
    def held(self) -> str:
        """Text that may still be part of something else."""
        return self._held

    def push(self, text: str) -> list[Delta]:
        """Process more text; what it reveals."""
        self._held += text
        deltas: list[Delta] = []
        while (found := self._step()) is not None:
            deltas += found
        return deltas

    def _step(self) -> list[Delta] | None:
        """Consume the next part of the withheld text; None if more is needed."""
        raise NotImplementedError
