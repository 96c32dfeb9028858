"""What the server needs of the engine and of the model: protocols, so that tests can have a toy."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from urdir.model.engine.request import Ending, Piece, Request
from urdir.model.text.chat import ChatTemplate
from urdir.model.text.tokenizer import Tokenizer

Json = dict[str, Any]
"""A JSON object."""

ConstraintKind = Literal["json_object", "json_schema", "regex", "grammar", "choice"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model made; ``arguments`` is JSON as text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Delta:
    """What a stretch of an answer adds to one of its parts; the others are None."""

    content: str | None = None
    reasoning: str | None = None
    tool_call: ToolCall | None = None


class AnswerParser(Protocol):
    """Splits the text of one answer, as it comes, into content, reasoning and tool calls."""

    def push(self, text: str) -> Sequence[Delta]:
        """What ``text`` completes."""

    def finish(self) -> Sequence[Delta]:
        """What was held back: no text comes any more."""


class ServedModel(Protocol):
    """The model behind a service."""

    @property
    def name(self) -> str:
        """What clients call it."""

    @property
    def created(self) -> int:
        """When the model was made or opened, in seconds since 1970."""

    @property
    def context(self) -> int:
        """Tokens of a prompt and its answer together, at most."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Of the model's vocabulary."""

    @property
    def template(self) -> ChatTemplate | None:
        """None where the file has none: then there is no chat."""

    def answer_parser(self, prompt: str, tools: Sequence[Mapping[str, Any]]) -> AnswerParser:
        """For one answer to a rendered conversation, which may end inside a reasoning block."""

    def constraint(self, kind: ConstraintKind, source: Any) -> object:
        """A `Request.constraint`: ``source`` is a schema, a pattern, a grammar or a list of texts.

        Takes as long as compiling does, in any thread. Raises ModelError for a bad source.
        """


@dataclass(frozen=True, slots=True)
class Metrics:
    """Where a service stands. Counts are since it was opened; ``running`` and the like are now."""

    queued: int = 0
    running: int = 0
    pages_used: int = 0
    pages_total: int = 0
    prefix_queries: int = 0  # prompt tokens that were looked up
    prefix_hits: int = 0  # of these, tokens that were found
    prompt_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    preemptions: int = 0


class AsyncService(Protocol):
    """Answers requests, many at once."""

    @property
    def model(self) -> ServedModel:
        """What is served."""

    def generate(self, request: Request) -> AsyncGenerator[Piece | Ending, None]:
        """Pieces, and an ending last; closing it cancels the request.

        At the first item: BusyError (the queue is full), ContextFullError, ModelError.
        """

    def metrics(self) -> Metrics:
        """Where it stands now."""

    async def drain(self) -> None:
        """Wait until all that was asked for is answered."""

    async def close(self) -> None:
        """End what runs, free the device."""
