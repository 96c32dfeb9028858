"""Deltas of a streamed answer, and the base of parsers that split it."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that a model asks to call; `arguments` is a JSON object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A part of the call with number `index`; always a whole call here."""

    index: int
    id: str
    name: str
    arguments_piece: str


@dataclass(frozen=True, slots=True)
class Delta:
    """New content, reasoning or call of an answer: exactly one of the three."""

    content: str = ""
    reasoning: str = ""
    tool_call: ToolCallDelta | None = None


def as_content(text: str) -> list[Delta]:
    """The text as content; an empty list if it is empty."""
    return [Delta(content=text)] if text else []


def new_call_id() -> str:
    """A random id in OpenAI's style."""
    return f"call_{secrets.token_hex(12)}"


class CallNumbers:
    """Numbers the calls of an answer, and gives ids to those without one."""

    def __init__(self, new_id: Callable[[], str] = new_call_id) -> None:
        self._new_id = new_id
        self._count = 0

    def delta(self, call: ToolCall) -> Delta:
        """The call as a part of the answer."""
        index, self._count = self._count, self._count + 1
        call_id = call.id or self._new_id()
        return Delta(tool_call=ToolCallDelta(index, call_id, call.name, call.arguments))


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
