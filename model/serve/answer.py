"""One answer so far, as all protocols see it: blocks of text, reasoning and calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from urdir.model.engine.requests.request import Ending, Finish, Piece, TokenChoice
from urdir.model.memory.scored_rows import TokenScores
from urdir.model.serve.errors import ApiError
from urdir.model.text.answers import AnswerParser
from urdir.model.text.deltas import Delta, ToolCallDelta


class Kind(Enum):
    """What a block of an answer is."""

    CONTENT = "content"
    REASONING = "reasoning"
    CALL = "call"


class Reason(Enum):
    """Why an answer ended."""

    END = "end"
    STOP = "stop"  # a stop string
    LENGTH = "length"  # the requested number of tokens
    FULL = "full"  # the context
    CALLS = "calls"


_REASONS = {
    Finish.END: Reason.END,
    Finish.STOP: Reason.STOP,
    Finish.LENGTH: Reason.LENGTH,
    Finish.FULL: Reason.FULL,
}


@dataclass(slots=True, eq=False)  # two may be alike
class Block:
    """A run of an answer of one kind: a text, or a call with its arguments as text. A call that
    ``is_broken`` turned out not to be one: its text follows as content."""

    kind: Kind
    parts: list[str] = field(default_factory=list)
    id: str = ""  # of a call, its name, and its number
    name: str = ""
    number: int = 0
    is_broken: bool = False

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.parts)


class Event(NamedTuple):
    """New text of a block; ``begins`` it or goes on. ``ends`` tells that a call is whole."""

    block: Block
    text: str
    begins: bool
    ends: bool = False


@dataclass(slots=True)
class Answer:
    """An answer so far. ``parser`` splits its text (None: all of it is content), after ``echo``,
    which the client wants before it; without ``parallel`` one call is kept."""

    index: int
    prompt: tuple[int, ...]
    parser: AnswerParser | None = None
    echo: str = ""
    parallel: bool = True
    blocks: list[Block] = field(default_factory=list)
    tokens: list[TokenChoice] = field(default_factory=list)
    scores: list[TokenScores] = field(default_factory=list)  # of the prompt's tokens
    reasoning_tokens: int = 0  # with which reasoning began or went on
    stopped_by: str | None = None
    reason: Reason = Reason.END

    def __post_init__(self) -> None:
        if self.echo:
            self.blocks.append(Block(Kind.CONTENT, [self.echo]))

    def push(self, piece: Piece) -> list[Event]:
        """Add a piece; what is new."""
        self.tokens += piece.choices
        self.scores += piece.scores
        if self.parser is None:
            return self._add_text(Kind.CONTENT, piece.text) if piece.text else []
        events = self._add(self.parser.push(piece.text))
        if events and self.blocks[-1].kind is Kind.REASONING:
            self.reasoning_tokens += len(piece.choices)
        return events

    def finish(self, ending: Ending) -> list[Event]:
        """End the answer; the text that was still withheld. ApiError if the server aborted it."""
        reason = _REASONS.get(ending.finish)
        if reason is None:
            raise ApiError("the server is stopping", status=503, kind="server_error")
        events = self._add([] if self.parser is None else self.parser.finish())
        is_cut = reason in (Reason.LENGTH, Reason.FULL)
        self.reason = Reason.CALLS if self.of(Kind.CALL) and not is_cut else reason
        self.stopped_by = ending.stopped_by
        return events

    def of(self, kind: Kind) -> list[Block]:
        """The blocks of a kind."""
        return [block for block in self.blocks if block.kind is kind and not block.is_broken]

    def whole(self) -> list[Block]:
        """The blocks of an answer that has ended: without broken calls, and texts around them
        joined."""
        found: list[Block] = []
        for block in self.blocks:
            if block.is_broken:
                continue
            last = found[-1] if found else None
            if last is not None and last.kind is block.kind is not Kind.CALL:
                found[-1] = Block(block.kind, [*last.parts, *block.parts])
            else:
                found.append(block)
        return found

    def text(self, kind: Kind) -> str:
        """The text of the blocks of a kind, together."""
        return "".join(block.text for block in self.of(kind))

    def _add(self, deltas: Sequence[Delta]) -> list[Event]:
        events: list[Event] = []
        for delta in deltas:
            if delta.tool_call is not None:
                self._add_call(delta.tool_call, events)
            elif delta.reasoning:
                events += self._add_text(Kind.REASONING, delta.reasoning)
            else:
                events += self._add_text(Kind.CONTENT, delta.content)
        return events

    def _add_text(self, kind: Kind, text: str) -> list[Event]:
        begins = not self.blocks or self.blocks[-1].kind is not kind
        if begins:
            self.blocks.append(Block(kind))
        block = self.blocks[-1]
        block.parts.append(text)
        return [Event(block, text, begins)]

    def _add_call(self, call: ToolCallDelta, events: list[Event]) -> None:
        """Add a part of a call; parts that come together are one event."""
        if call.name:
            if not self.parallel and self.of(Kind.CALL):
                return
            block = Block(Kind.CALL, [], call.id, call.name, call.index)
            self.blocks.append(block)
        else:
            calls = (b for b in reversed(self.blocks) if b.kind is Kind.CALL)
            found = next(calls, None)  # parts of calls do not mix
            if found is None or found.number != call.index:  # one too many
                return
            block = found
        block.is_broken = call.is_broken
        ends = call.ends and not call.is_broken
        block.parts.append(call.arguments_piece)
        event = Event(block, call.arguments_piece, bool(call.name), ends)
        if events and events[-1].block is block:
            last = events.pop()
            event = Event(block, last.text + event.text, last.begins, ends)
        if event.begins or event.text or event.ends:
            events.append(event)


def text_of(events: Sequence[Event], kind: Kind) -> str:
    """The new text of a kind."""
    return "".join([event.text for event in events if event.block.kind is kind])
