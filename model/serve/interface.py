"""What the server answers with: a model's text, and a service that answers requests."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from urdir.model.engine.request import Ending, Piece, Request
from urdir.model.engine.service import Metrics
from urdir.model.text.answers import AnswerFormat, find_answer_format
from urdir.model.text.chat import ChatTemplate
from urdir.model.text.tokenizer import Tokenizer

Json = dict[str, Any]
"""A JSON object."""


@dataclass
class ServedModel:
    """The model behind a service, as its clients see it.

    ``context`` is what a prompt and its answer have together, in tokens. Without a ``template``
    there is no chat. ``created`` is in seconds since 1970.
    """

    name: str
    context: int
    tokenizer: Tokenizer
    template: ChatTemplate | None
    created: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def answer_format(self) -> AnswerFormat:
        """How it writes thoughts and calls."""
        return find_answer_format(self.template.source) if self.template else AnswerFormat()

    @cached_property
    def most_text(self) -> int:
        """Characters that no text exceeds which fits: of tokens that are all the longest one."""
        tokens = range(self.tokenizer.vocab_size)
        return self.context * max(len(self.tokenizer.token_bytes(token)) for token in tokens)


class AsyncService(Protocol):
    """Answers requests, many at once."""

    @property
    def model(self) -> ServedModel:
        """What is served."""

    def generate(self, request: Request) -> AsyncGenerator[Piece | Ending, None]:
        """Pieces, and an ending last; closing it cancels the request.

        At the first item: BusyError (the queue is full), ContextFullError, ConstraintError, or
        another ModelError.
        """

    def metrics(self) -> Metrics:
        """Where it stands now."""

    async def drain(self) -> None:
        """Wait until all that was asked for is answered."""

    async def close(self) -> None:
        """End what runs, free the device."""
