"""What the server needs of the engine and of the model: protocols, so that tests can have a toy."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from urdir.model.engine.requests.metrics import Metrics
from urdir.model.engine.requests.request import Ending, Piece, Request
from urdir.model.engine.sampling_settings import OPENAI, SamplingSettings
from urdir.model.text.answers import AnswerParser
from urdir.model.text.chat import ChatTemplate
from urdir.model.text.constraints import Constraint
from urdir.model.text.tokenizer import Tokenizer
from urdir.model.text.tool_calls import Tools

Json = dict[str, Any]
"""A JSON object."""

ConstraintKind = Literal["json_object", "json_schema", "regex", "grammar", "choice"]


@dataclass(frozen=True, slots=True)
class Defaults:
    """What holds where a request does not say it: of OpenAI's, temperature 1 and nothing filtered.

    ``limit`` is the most tokens of an answer, ``variables`` are the chat template's.
    """

    settings: SamplingSettings = OPENAI
    limit: int | None = None
    variables: Json = field(default_factory=dict)


class ServedModel(Protocol):
    """The model behind a service."""

    @property
    def names(self) -> tuple[str, ...]:
        """What clients may call it; answers have the first one."""

    @property
    def created(self) -> int:
        """When the model was made or opened, in seconds since 1970."""

    @property
    def context(self) -> int:
        """Tokens of a prompt and its answer together, at most."""

    @property
    def defaults(self) -> Defaults:
        """Of its requests."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Of the model's vocabulary."""

    @property
    def template(self) -> ChatTemplate | None:
        """None where the file has none: then there is no chat."""

    @property
    def shown(self) -> frozenset[str]:
        """Texts of the control tokens that the parser of answers must see."""

    def answer_parser(self, prompt: str, tools: Tools) -> AnswerParser:
        """For one answer to a rendered conversation, which may end within the model's thoughts."""

    def constraint(self, kind: ConstraintKind, source: Any, prompt: str | None) -> Constraint:
        """A `Request.constraint` of what follows the model's thoughts, after a rendered
        conversation; of all that comes where ``prompt`` is None.

        ``source`` is a schema, a pattern, a grammar or a list of texts. Any thread may call this.
        Raises ModelError for a bad source.
        """

    def required_call(self, tools: Tools, prompt: str, name: str | None, many: bool) -> Constraint:
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

    @property
    def lost(self) -> Exception | None:
        """Why nothing is answered any more: `DeviceLostError`. None while requests are."""

    def metrics(self) -> Metrics:
        """Where it stands now."""

    async def drain(self) -> None:
        """Wait until all that was asked for is answered."""

    async def close(self) -> None:
        """End what runs, free the device."""
