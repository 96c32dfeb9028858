"""`ServedModel` of a file's texts."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from urdir.model.errors import ModelError, TemplateError
from urdir.model.files.file_type import file_type
from urdir.model.serve.interface import Defaults, Facts
from urdir.model.serve.tokens import longest_token
from urdir.model.text.answers import AnswerFormat, AnswerParser
from urdir.model.text.chat import ChatTemplate, Message, Prompt
from urdir.model.text.constraints import Constraint
from urdir.model.text.fill import FillTokens
from urdir.model.text.formats import Format
from urdir.model.text.thought_limit import ThoughtLimit
from urdir.model.text.tokenizer import Tokenizer
from urdir.model.text.tool_choice import after_thoughts, required_call
from urdir.model.text.tool_schemas import Tools

if TYPE_CHECKING:
    from urdir.model.files.model_file import ModelFile


class NamedTexts(Protocol):
    """What is read of a model's file; an `Engine` has it."""

    @property
    def name(self) -> str:
        """The model's name."""

    @property
    def file(self) -> ModelFile:
        """The file."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The file's tokeniser."""

    @property
    def template(self) -> ChatTemplate:
        """The chat template. Raises TemplateError without one."""


class EngineModel:
    """See `ServedModel`. ``names`` are the model's names for clients, by default the file's name.
    ``defaults`` apply to its requests; ``adapters`` are names, with scales. It ``embeds`` where its
    service makes embeddings or scores, in place of answers.
    """

    def __init__(
        self,
        texts: NamedTexts,
        names: Iterable[str],
        context: int,
        defaults: Defaults,
        adapters: Iterable[tuple[str, float]] = (),
        *,
        embeds: bool = False,
    ) -> None:
        self.adapters = tuple(adapters)
        self._embeds = embeds
        self._texts = texts
        self.names = tuple(dict.fromkeys(names)) or (texts.name,)
        self.defaults = defaults
        self.created = int(time.time())
        self.context = context
        self.tokenizer = texts.tokenizer
        self.template = _template(texts)
        self._format = self.template.form if self.template else AnswerFormat()

    @cached_property
    def facts(self) -> Facts:
        """See `ServedModel`."""
        file = self._texts.file
        tensors, metadata = file.tensors.values(), file.metadata
        context, width = (
            metadata.optional(f"{file.architecture}.{name}", int, 0)
            for name in ("context_length", "embedding_length")
        )
        return Facts(
            file.architecture,
            sum(tensor.nbytes for tensor in tensors),
            sum(math.prod(tensor.shape) for tensor in tensors),
            file_type(file) or "",
            self._embeds,
            Path(file.path).name,
            context,
            width,
        )

    @cached_property
    def fill(self) -> FillTokens | None:
        """See `ServedModel`."""
        tokenizer = self.tokenizer
        metadata = self._texts.file.metadata
        return FillTokens.find(metadata, tokenizer.control_id, tokenizer.vocab_size)

    @property
    def shown(self) -> frozenset[str]:
        """Texts of the control tokens that the answer parser must see."""
        return self._format.shown

    def answer_parser(self, prompt: Prompt, tools: Tools) -> AnswerParser:
        """See `ServedModel`."""
        return AnswerParser(self._format, prompt=prompt.before, begun=prompt.begun, tools=tools)

    def constraint(
        self,
        form: Format,
        prompt: Prompt | None,
        tools: Tools | None = None,
        many: bool = False,
    ) -> Constraint:
        """See `ServedModel`."""
        constraint = form.constraint()
        if prompt is not None:
            constraint = after_thoughts(
                constraint, self._format, prompt.before, prompt.begun, tools=tools, many=many
            )
        return constraint

    def thought_limit(self, tokens: int | None, prompt: Prompt) -> ThoughtLimit | None:
        """See `ServedModel`."""
        message = self.defaults.thinking_message
        return self._format.limit(tokens, prompt.before, message, prompt.begun)

    def required_call(
        self, tools: Tools, prompt: Prompt, name: str | None, many: bool
    ) -> Constraint:
        """See `ServedModel`."""
        return required_call(self._format, tools, prompt.text, name=name, many=many)


def warm_up(texts: NamedTexts) -> None:
    """Do for the first time what every request does: with a large vocabulary it takes 0.3 s."""
    longest_token(texts.tokenizer)
    template = _template(texts)
    with suppress(ModelError):  # requests report it
        texts.tokenizer.encode("Hi", parse_special=True)
        if template is not None:
            template.tokens(template.render([Message("user", "Hi")]))


def _template(texts: NamedTexts) -> ChatTemplate | None:
    try:
        return texts.template
    except TemplateError:
        return None
