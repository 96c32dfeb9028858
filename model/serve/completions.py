"""POST /v1/completions: continuation of a prompt."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from urdir.model.engine.requests.request import Ending, Piece, TokenChoice
from urdir.model.serve.fields import Fields
from urdir.model.serve.finish import finish_reason
from urdir.model.serve.formats import Format, read_format
from urdir.model.serve.interface import Json, ServedModel
from urdir.model.serve.limits import Limits
from urdir.model.serve.logprobs import text_logprobs
from urdir.model.serve.parameters import MOST_LOGPROBS, Parameters, read_limit, read_parameters
from urdir.model.serve.request_fields import TEXT, refuse_unsupported
from urdir.model.serve.stream import Shape
from urdir.model.serve.tokens import check_tokens
from urdir.model.text.tokenizer import Tokenizer

DEFAULT_LIMIT = 16  # tokens, OpenAI's default
_LIMITS = ("max_tokens", "max_completion_tokens", "n_predict")


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A parsed request: each of ``prompts`` is continued ``parameters.n`` times."""

    prompts: tuple[str | tuple[int, ...], ...]
    parameters: Parameters
    form: Format | None
    echo: bool
    special: bool  # whether texts get BOS, if the model wants it


def read_completion(fields: Fields, model: ServedModel, limits: Limits) -> CompletionRequest:
    """Read the request in ``fields``; ApiError if it is invalid."""
    refuse_unsupported(fields, TEXT)
    logprobs = fields.whole("logprobs", 0, MOST_LOGPROBS)
    echo = fields.flag("echo")
    if echo and logprobs is not None:
        fields.fail("echo", "cannot be combined with 'logprobs': prompts have no log-probabilities")
    limit: int | None = model.defaults.limit or DEFAULT_LIMIT
    if any(fields.raw(name) is not None for name in _LIMITS):
        limit = read_limit(fields, model, *_LIMITS)
    parameters = read_parameters(fields, model, limits, limit, logprobs)
    given = _given_prompts(fields)
    if len(given) * parameters.n > limits.answers:
        fields.fail("prompt", f"and 'n' request more than {limits.answers} answers")
    prompts = tuple(_read_prompt(prompt, model) for prompt in given)
    special = fields.raw("add_special_tokens") is None or fields.flag("add_special_tokens")
    return CompletionRequest(prompts, parameters, read_format(fields, limits), echo, special)


def _given_prompts(fields: Fields) -> list[Any]:
    """The prompts as a list, given a text, token ids, or a list of either."""
    value = fields.raw("prompt")
    if value is None:
        fields.fail("prompt", "is missing")
    if not isinstance(value, str | list):
        fields.fail("prompt", "must be a text, token ids, or a list of these", "invalid_type")
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        return value
    return [value]


def _read_prompt(prompt: Any, model: ServedModel) -> str | tuple[int, ...]:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list):
        check_tokens(model, len(prompt))  # before checking each of them
    return Fields({"prompt": prompt}).token_ids("prompt", model.tokenizer.vocab_size)


@dataclass(slots=True)
class _Choice:
    """One answer so far; ``offset`` is the number of characters before its next token."""

    text: list[str]
    offset: int
    tokens: list[TokenChoice] = field(default_factory=list)
    finish: Json = field(default_factory=dict)


class CompletionShape(Shape):
    """`text_completion` objects."""

    def __init__(self, model: ServedModel, echoes: Sequence[str], logprobs: bool) -> None:
        """``echoes`` are the texts that the answers begin with, one each, usually empty."""
        self._tokenizer: Tokenizer = model.tokenizer
        self._logprobs = logprobs
        self._choices = [_Choice([echo], len(echo)) for echo in echoes]
        self._head: Json = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model.names[0],
        }

    def head(self, streamed: bool) -> Json:
        """The kind of object, the same for chunks and whole responses."""
        return dict(self._head)

    def opening(self) -> list[Json]:
        """The prompts, if they are echoed."""
        return [
            self._chunk(index, choice.text[0])
            for index, choice in enumerate(self._choices)
            if choice.text[0]
        ]

    def piece(self, index: int, piece: Piece) -> Json | None:
        """A piece of text, with log-probabilities if requested."""
        choice = self._choices[index]
        choice.text.append(piece.text)
        logprobs = None
        if self._logprobs:
            choice.tokens += piece.choices
            logprobs = text_logprobs(self._tokenizer, piece.choices, choice.offset)
            choice.offset += sum(map(len, logprobs["tokens"]))
        elif not piece.text:
            return None
        return self._chunk(index, piece.text) | {"logprobs": logprobs}

    def ending(self, index: int, ending: Ending) -> list[Json]:
        """The finish reason."""
        finish = {"finish_reason": finish_reason(ending), "stop_reason": ending.stopped_by}
        self._choices[index].finish = finish
        return [self._chunk(index, "") | finish]

    def whole(self) -> list[Json]:
        """The answers in prompt order."""
        return [
            {"index": index, "text": "".join(choice.text), "logprobs": self._whole_logprobs(choice)}
            | choice.finish
            for index, choice in enumerate(self._choices)
        ]

    def _whole_logprobs(self, choice: _Choice) -> Json | None:
        if not self._logprobs:
            return None
        return text_logprobs(self._tokenizer, choice.tokens, 0)

    def _chunk(self, index: int, text: str) -> Json:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}
