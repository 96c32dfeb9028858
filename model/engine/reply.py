"""Answers to conversations, whole or as they come: text, reasoning and tool calls apart."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing, suppress
from dataclasses import dataclass, field
from typing import Any

from urdir.model.engine.answer_options import (
    ChatOptions,
    ToolDescriptions,
    check_options,
    make_request,
)
from urdir.model.engine.generate import Generation, Statistics
from urdir.model.engine.requests.request import Ending, Piece, Request, TokenChoice
from urdir.model.engine.sampling_settings import SamplingSettings
from urdir.model.errors import ConstraintError, SettingsError, TemplateError
from urdir.model.owner import Owner
from urdir.model.text.answers import AnswerFormat, AnswerParser
from urdir.model.text.chat import ChatTemplate, Message, Prompt, conversation
from urdir.model.text.constraints import Constraint
from urdir.model.text.deltas import Delta, ToolCall, whole_calls
from urdir.model.text.formats import Format
from urdir.model.text.tool_choice import after_thoughts, required_call

Messages = Sequence[Message | Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Reply:
    """What a model answered; as text, its ``content``.

    ``choices`` are its tokens, those of reasoning and calls too, with log-probabilities if the
    settings have ``logprobs``.
    """

    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    statistics: Statistics
    choices: tuple[TokenChoice, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        return self.content

    @property
    def message(self) -> Message:
        """The reply as a turn, to go on with."""
        calls = [
            {"type": "function", "id": call.id, "function": {"name": call.name,
             "arguments": call.arguments}}
            for call in self.tool_calls
        ]  # fmt: skip
        return Message("assistant", self.content, {"tool_calls": calls} if calls else {})


class ReplyParts:
    """Collects what an answer consists of while its text comes."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser
        self._deltas: list[Delta] = []
        self._choices: list[TokenChoice] = []

    def push(self, piece: Piece) -> list[Delta]:
        """More tokens and text; the deltas that it completes."""
        self._choices += piece.choices
        return self._add(self._parser.push(piece.text)) if piece.text else []

    def finish(self) -> list[Delta]:
        """The end of the text; the deltas that were withheld."""
        return self._add(self._parser.finish())

    def _add(self, deltas: list[Delta]) -> list[Delta]:
        self._deltas += deltas
        return deltas

    def reply(self, statistics: Statistics) -> Reply:
        """What has come so far."""
        return Reply(
            content="".join(delta.content for delta in self._deltas),
            reasoning="".join(delta.reasoning for delta in self._deltas),
            tool_calls=tuple(whole_calls(self._deltas)),
            statistics=statistics,
            choices=tuple(self._choices),
        )


class ReplyStream(Owner):
    """A reply as it comes: iterate over its `Delta` objects, each new content, reasoning or part of
    a call; ``reply`` is all that has come. Closing it ends the answer."""

    def __init__(self, generation: Generation, parser: AnswerParser) -> None:
        self._generation = generation
        self._parts = ReplyParts(parser)
        self._deltas = _deltas(generation, self._parts)

    def __iter__(self) -> Iterator[Delta]:
        return self._deltas

    @property
    def reply(self) -> Reply:
        """What has come so far; the whole reply after the last delta."""
        return self._parts.reply(self._generation.statistics)

    def whole(self) -> Reply:
        """The whole reply, once it has come."""
        for _ in self._deltas:
            pass
        return self.reply

    def cancel(self) -> None:
        """See `Generation.cancel`."""
        self._generation.cancel()

    def close(self) -> None:
        """End the answer. Idempotent; not while another thread iterates: see `cancel`."""
        self._deltas.close()


def _deltas(generation: Generation, parts: ReplyParts) -> Generator[Delta, None, None]:
    """The deltas of an answer. A generator of the stream's own method would refer to the stream:
    the answer of a stream that was dropped would stay open until the garbage collector ran."""
    with closing(generation.pieces()) as pieces:
        for piece in pieces:
            yield from parts.push(piece)
    yield from parts.finish()


class AsyncReply:
    """A reply for asyncio: ``await`` it whole, or iterate over its `Delta` objects, after which
    ``reply`` has it. Once: an answer is computed while it is read."""

    def __init__(
        self, request: Request, items: AsyncGenerator[Piece | Ending, None], parser: AnswerParser
    ) -> None:
        self._statistics = Statistics.of(request)
        self._parts = ReplyParts(parser)
        self._deltas = _async_deltas(items, self._parts, self._statistics)

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self._deltas

    def __await__(self) -> Generator[Any, None, Reply]:
        return self._whole().__await__()

    async def _whole(self) -> Reply:
        async with aclosing(self._deltas) as deltas:
            async for _ in deltas:
                pass
        return self.reply

    @property
    def reply(self) -> Reply:
        """What has come so far; the whole reply after the last delta."""
        return self._parts.reply(self._statistics)

    async def aclose(self) -> None:
        """Cancel what is left. Idempotent."""
        await self._deltas.aclose()


async def _async_deltas(
    items: AsyncGenerator[Piece | Ending, None], parts: ReplyParts, statistics: Statistics
) -> AsyncGenerator[Delta, None]:
    """The same for asyncio."""
    start = time.perf_counter()
    async with aclosing(items):
        async for item in items:
            statistics.note(item, time.perf_counter() - start)
            if isinstance(item, Piece):
                for delta in parts.push(item):
                    yield delta
    for delta in parts.finish():
        yield delta


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation as the model reads it, and how its answer is written and read.

    ``schemas`` are the parameters of each tool by its name; ``tool_choice`` is "auto", "none",
    "required" or the name of a tool.
    """

    rendered: Prompt
    tokens: tuple[int, ...]
    form: AnswerFormat
    schemas: dict[str, Mapping[str, Any]] | None
    tool_choice: str

    @classmethod
    def of(
        cls,
        template: ChatTemplate,
        messages: Messages,
        options: ChatOptions,
    ) -> ChatPrompt:
        """See `Engine.chat`. Raises TemplateError."""
        check_options(options, ChatOptions)
        tool_choice = _name_of(options.get("tool_choice", "auto"))
        tools = None if tool_choice == "none" else options.get("tools")
        schemas = _schemas(tools)
        turns = conversation(messages, template.source)
        given = options.get("variables") or {}
        if not isinstance(given, Mapping):
            raise TemplateError(f"variables are {given!r:.80}: expected names with values")
        variables = dict(given)
        if options.get("reasoning_budget") == 0:
            variables.setdefault("enable_thinking", False)
        rendered = template.render(turns, tools, variables)
        tokens = tuple(template.tokens(rendered))
        return cls(rendered, tokens, template.form, schemas, tool_choice)

    def request(self, default_settings: SamplingSettings, options: ChatOptions) -> Request:
        """The request of an answer. Raises as `make_request`."""
        budget = options.get("reasoning_budget")
        if budget is not None and not (isinstance(budget, int) and budget >= 0):
            raise SettingsError(f"a reasoning_budget of {budget!r} tokens: expected 0 or more")
        return make_request(
            self.tokens,
            default_settings,
            options,
            thoughts=self.form.limit(budget, self.rendered.text, begun=self.rendered.begun),
            shown=self.form.shown,
            constrain=self.constraint,
        )

    @property
    def parser(self) -> AnswerParser:
        """A new parser of one answer."""
        rendered = self.rendered
        return AnswerParser(
            self.form, prompt=rendered.before, begun=rendered.begun, tools=self.schemas
        )

    def constraint(self, form: Format | None) -> Constraint | None:
        """The constraint of an answer of a format, which its reasoning precedes and a call may
        replace, or of one that must be a call; None: free text. Raises ConstraintError."""
        rendered, tools = self.rendered, self.schemas or {}
        if self.tool_choice not in ("auto", "none"):
            if form is not None:
                raise ConstraintError(
                    f"tool_choice {self.tool_choice!r} requires a call: an answer of a format is "
                    "none; leave one of them out"
                )
            name = None if self.tool_choice == "required" else self.tool_choice
            return required_call(self.form, tools, rendered.text, name=name, many=True)
        if form is None:
            return None
        constraint, before, begun = form.constraint(), rendered.before, rendered.begun
        return after_thoughts(constraint, self.form, before, begun, tools=tools, many=True)


def _name_of(tool_choice: str | Mapping[str, Any]) -> str:
    """A choice of tools as a text; it may be OpenAI's object. Raises TemplateError."""
    if isinstance(tool_choice, str):
        return tool_choice
    with suppress(LookupError, TypeError):
        if isinstance(name := tool_choice["function"]["name"], str):
            return name
    raise TemplateError(
        f"tool_choice {tool_choice!r:.80}: expected 'auto', 'none', 'required' or a tool's name"
    )


def _schemas(tools: ToolDescriptions | None) -> dict[str, Mapping[str, Any]] | None:
    """The parameters of each tool, by its name. Raises TemplateError."""
    try:
        functions = [tool["function"] for tool in tools or ()]
        return {function["name"]: function.get("parameters", {}) for function in functions} or None
    except (TypeError, LookupError, AttributeError):
        raise TemplateError(
            f"{tools!r:.80} are no tools: give a list of descriptions, such as "
            "[{'type': 'function', 'function': {'name': 'add', 'parameters': {...}}}]"
        ) from None
