"""What the server needs of the engine and of the model: protocols, so that tests can have a toy."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Literal, Protocol

from urdir.model.engine.request import Ending, Piece, Request
from urdir.model.engine.service import Metrics
from urdir.model.text.chat import ChatTemplate
from urdir.model.text.constraints import Constraint
from urdir.model.text.tokenizer import Tokenizer

Json = dict[str, Any]
"""A JSON object."""

ToolSchemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of the parameters of each function, by its name."""

ConstraintKind = Literal["json_object", "json_schema", "regex", "grammar", "choice"]


class Call(Protocol):
    """A call that the model made, whole; ``arguments_piece`` is a JSON object as text."""

    @property
    def id(self) -> str:
        """By which the result will refer to it."""

    @property
    def name(self) -> str:
        """Of the function."""

    @property
    def arguments_piece(self) -> str:
        """All of its arguments."""


class Delta(Protocol):
    """What a stretch of an answer adds to one of its three parts."""

    @property
    def content(self) -> str:
        """What is for the user."""

    @property
    def reasoning(self) -> str:
        """What the model thought before."""

    @property
    def tool_call(self) -> Call | None:
        """A call."""


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

    @property
    def shown(self) -> frozenset[str]:
        """Texts of the control tokens that the parser of answers must see."""

    def answer_parser(self, prompt: str, tools: ToolSchemas) -> AnswerParser:
        """For one answer to a rendered conversation, which may end within the model's thoughts."""

    def constraint(self, kind: ConstraintKind, source: Any, prompt: str) -> Constraint:
        """A `Request.constraint` of what follows the model's thoughts.

        ``source`` is a schema, a pattern, a grammar or a list of texts. Any thread may call this.
        Raises ModelError for a bad source.
        """

    def required_call(
        self, tools: ToolSchemas, prompt: str, name: str | None, many: bool
    ) -> Constraint:
        """A `Request.constraint` of answers that call a tool, or the one with this ``name``.

        With ``many`` several times. Any thread may call this. Raises ModelError where the model has
        no known way to call.
        """


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
