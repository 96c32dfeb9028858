"""Interfaces of the engine and model that the server needs; tests implement them with toys."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from urdir.model.engine.adapters import AdapterScale
from urdir.model.engine.requests.metrics import Metrics
from urdir.model.engine.requests.request import Ending, Piece, Request
from urdir.model.engine.requests.slots import SlotAction, SlotDone
from urdir.model.engine.sampling_settings import OPENAI, SamplingSettings

if TYPE_CHECKING:
    from urdir.model.text.answers import AnswerParser
    from urdir.model.text.chat import ChatTemplate, Prompt
    from urdir.model.text.constraints import Constraint
    from urdir.model.text.fill import FillTokens
    from urdir.model.text.formats import Format
    from urdir.model.text.thought_limit import ThoughtLimit
    from urdir.model.text.tokenizer import Tokenizer
    from urdir.model.text.tool_schemas import Tools

Json = dict[str, Any]
"""A JSON object."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """Defaults for requests; as in OpenAI's API temperature is 1 and nothing is filtered.

    ``limit`` is the maximum number of answer tokens, ``thinking`` that of reasoning, which then
    ends with ``thinking_message``; ``variables`` are the chat template's.
    """

    settings: SamplingSettings = OPENAI
    limit: int | None = None
    variables: Json = field(default_factory=dict)
    thinking: int | None = None
    thinking_message: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a model: its weights' bytes and number, their usual type, whether it is
    served for embeddings or scores, in place of answers; the name of its file or folder, the
    context that it was trained for, and the width of its embeddings, 0 if unknown."""

    architecture: str = ""
    bytes: int = 0
    parameters: int = 0
    type: str = ""
    embeds: bool = False
    file: str = ""
    trained_context: int = 0
    width: int = 0


class ServedModel(Protocol):
    """The model behind a service."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names that clients may use; answers carry the first one."""

    @property
    def adapters(self) -> tuple[tuple[str, float], ...]:
        """Names of LoRA adapters, which clients may use as models, with their scales."""

    @property
    def created(self) -> int:
        """When the model was made or opened, in seconds since 1970."""

    @property
    def context(self) -> int:
        """Maximum number of tokens of a prompt and its answer together."""

    @property
    def defaults(self) -> Defaults:
        """Default settings of requests."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokeniser of the model."""

    @property
    def template(self) -> ChatTemplate | None:
        """Chat template; None: the model cannot chat."""

    @property
    def facts(self) -> Facts:
        """Of the model."""

    @property
    def fill(self) -> FillTokens | None:
        """Tokens to fill in the middle; None: the model cannot."""

    @property
    def shown(self) -> frozenset[str]:
        """Texts of the control tokens that the answer parser must see."""

    def answer_parser(self, prompt: Prompt, tools: Tools) -> AnswerParser:
        """The parser of one answer to a rendered conversation, which may end within reasoning."""

    def constraint(
        self,
        form: Format,
        prompt: Prompt | None,
        tools: Tools | None = None,
        many: bool = False,
    ) -> Constraint:
        """A `Request.constraint` on the text after the model's reasoning, given a rendered
        conversation; on the whole answer if ``prompt`` is None. A call of one of ``tools`` may
        replace it; ``many`` allows several.

        Thread-safe. Raises ModelError for a bad source; `AsyncService.check` compiles it.
        """

    def thought_limit(self, tokens: int | None, prompt: Prompt) -> ThoughtLimit | None:
        """A `Request.thoughts` of this many tokens after a rendered conversation; None where the
        model does not reason."""

    def required_call(
        self, tools: Tools, prompt: Prompt, name: str | None, many: bool
    ) -> Constraint:
        """A `Request.constraint` that requires a tool call, of the tool ``name`` if given.

        ``many`` allows several calls. Thread-safe. Raises ModelError for a bad schema.
        """


class AsyncService(Protocol):
    """Answers requests concurrently."""

    @property
    def model(self) -> ServedModel:
        """The served model."""

    def generate(self, request: Request) -> AsyncGenerator[Piece | Ending, None]:
        """Stream pieces, then an ending; closing the generator cancels the request.

        Raises at the first item: BusyError (the queue is full), ContextFullError, ModelError.
        """

    @property
    def lost(self) -> Exception | None:
        """The `DeviceLostError` after which nothing is answered any more, or None."""

    async def check(self, constraint: Constraint) -> None:
        """Compile a constraint before requests have it. Raises ModelError for a bad one."""

    async def act_on_slot(self, action: SlotAction) -> SlotDone:
        """Save, restore or erase the prefix of a slot. Raises PrefixFileError, and
        what `lost` has."""

    async def adapters(self, scales: Mapping[int, float] | None) -> tuple[AdapterScale, ...]:
        """The LoRA adapters, after their scales in requests that name none are set, if given: by
        place, 0 of the others. Raises SettingsError."""

    async def metrics(self) -> Metrics:
        """Current metrics. Raises what `lost` has."""

    async def drain(self) -> None:
        """Wait until all open requests are answered."""

    async def close(self) -> None:
        """Abort open requests and free the device."""
