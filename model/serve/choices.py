"""What OpenAI's two oldest protocols have in common: answers are "choices" of an object."""

from __future__ import annotations

import time
import uuid
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from urdir.model.engine.requests.request import Piece
from urdir.model.serve.answer import Answer, Event, Reason
from urdir.model.serve.interface import Json, ServedModel
from urdir.model.serve.parameters import Parameters
from urdir.model.serve.stream import Shape
from urdir.model.serve.usage import Usage

_REASONS = {
    Reason.END: "stop",
    Reason.STOP: "stop",
    Reason.LENGTH: "length",
    Reason.FULL: "length",
    Reason.CALLS: "tool_calls",
}


class ChoicesShape(Shape):
    """An object with choices, and chunks of one choice each."""

    prefix: ClassVar[str]  # of ids
    kind: ClassVar[str]  # of object
    chunk_kind: ClassVar[str]

    def __init__(
        self, model: ServedModel, parameters: Parameters, answers: Sequence[Answer]
    ) -> None:
        super().__init__(model, parameters, answers)
        self.has_logprobs = parameters.settings.logprobs is not None
        self._head: Json = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "object": self.chunk_kind if parameters.stream else self.kind,
            "created": int(time.time()),
            "model": model.names[0],
        }

    @abstractmethod
    def choice(self, answer: Answer) -> Json:
        """The choice of an answer that has ended."""

    @abstractmethod
    def delta(self, answer: Answer, events: Sequence[Event], piece: Piece) -> Json | None:
        """What is new of a choice; None if there is nothing to send."""

    @abstractmethod
    def last_delta(self) -> Json:
        """What the last chunk of a choice has, beside the reason of its end."""

    def part(self, answer: Answer, events: Sequence[Event], piece: Piece) -> list[Json]:
        """A chunk, if there is anything new."""
        delta = self.delta(answer, events, piece)
        return [] if delta is None else [self.chunk(answer, delta)]

    def ending(self, answer: Answer, usage: Usage) -> list[Json]:
        """The chunk with the reason; the last one of all has the times, unless usage follows."""
        chunk = self.chunk(answer, self.last_delta() | _finish(answer))
        if usage.is_complete and not self.parameters.include_usage:
            chunk["timings"] = usage.timings()
        return [chunk]

    def closing(self, usage: Usage) -> list[Json]:
        """The usage, if it is wanted."""
        if not self.parameters.include_usage:
            return []
        return [{**self._head, "choices": []} | self._counted(usage)]

    def whole(self, usage: Usage) -> Json:
        """All choices."""
        choices = [
            {"index": answer.index, **self.choice(answer), **_finish(answer)}
            for answer in self.answers
        ]
        return {**self._head, "choices": choices} | self._counted(usage)

    def chunk(self, answer: Answer, delta: Json) -> Json:
        """A chunk of one choice."""
        empty: Json = {"index": answer.index, "logprobs": None, "finish_reason": None}
        chunk = {**self._head, "choices": [empty | delta]}
        return chunk | {"usage": None} if self.parameters.include_usage else chunk

    def _counted(self, usage: Usage) -> Json:
        reasoning = sum(answer.reasoning_tokens for answer in self.answers)
        return {"usage": usage.json(reasoning), "timings": usage.timings()}


def _finish(answer: Answer) -> Json:
    return {"finish_reason": _REASONS[answer.reason], "stop_reason": answer.stopped_by}
