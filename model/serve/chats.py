"""POST /v1/chat/completions: the next message of a conversation."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from urdir.model.engine.requests.request import Ending, Piece
from urdir.model.serve.conversations import Conversation, read_conversation
from urdir.model.serve.fields import Fields
from urdir.model.serve.finish import finish_reason
from urdir.model.serve.formats import FORMAT_FIELDS, Format, read_format
from urdir.model.serve.interface import Json, ServedModel
from urdir.model.serve.limits import Limits
from urdir.model.serve.logprobs import chat_logprobs
from urdir.model.serve.parameters import MOST_LOGPROBS, Parameters, read_limit, read_parameters
from urdir.model.serve.request_fields import CHAT, refuse_unsupported
from urdir.model.serve.stream import Shape
from urdir.model.text.answers import AnswerParser
from urdir.model.text.chat import Prompt
from urdir.model.text.constraints import Constraint
from urdir.model.text.deltas import Delta


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A parsed chat request."""

    conversation: Conversation
    format: Format | None
    parameters: Parameters
    echo: str  # text that precedes the model's own in each answer

    def parser(self, model: ServedModel, prompt: Prompt) -> AnswerParser:
        """The parser of one answer to the rendered conversation."""
        return model.answer_parser(prompt, self.conversation.tools.schemas)

    def constraint(self, model: ServedModel, prompt: Prompt) -> Constraint | None:
        """The constraint on the answers; None: free text."""
        tools, form = self.conversation.tools, self.format
        if tools.is_required:
            return model.required_call(tools.schemas, prompt, tools.name, tools.parallel)
        if form is None:
            return None
        return model.constraint(form.kind, form.source, prompt, tools.schemas, tools.parallel)


def read_chat(fields: Fields, model: ServedModel, limits: Limits) -> ChatRequest:
    """Read the request in ``fields``; ApiError if it is invalid."""
    refuse_unsupported(fields, CHAT)
    logprobs = fields.whole("top_logprobs", 0, MOST_LOGPROBS)
    wants_logprobs = fields.flag("logprobs")
    if logprobs and not wants_logprobs:
        fields.fail("top_logprobs", "needs 'logprobs': true")
    limit = read_limit(fields, model, "max_completion_tokens", "max_tokens", "n_predict")
    parameters = read_parameters(
        fields, model, limits, limit, (logprobs or 0) if wants_logprobs else None
    )
    form = read_format(fields, limits)
    conversation = read_conversation(fields, model, limits)
    if conversation.tools.is_required and form is not None:
        fields.fail(
            next(name for name in FORMAT_FIELDS if fields.raw(name) not in (None, "")),
            "cannot be combined with a 'tool_choice' that requires a call",
        )
    echoes = fields.flag("echo") and conversation.continues == "content"
    echo = conversation.messages[-1].content if echoes else ""
    return ChatRequest(conversation, form, parameters, echo)


@dataclass(slots=True)
class _Choice:
    """One answer so far."""

    parser: AnswerParser
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[Json] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)
    finish: Json = field(default_factory=dict)


class ChatShape(Shape):
    """`chat.completion` and `chat.completion.chunk` objects."""

    def __init__(
        self,
        model: ServedModel,
        parsers: Sequence[AnswerParser],
        *,
        logprobs: bool,
        parallel: bool,
        echo: str = "",
    ) -> None:
        """``parsers`` has one for each answer; ``parallel`` allows several tool calls per answer.
        All answers begin with ``echo``.
        """
        self._tokenizer = model.tokenizer
        self._logprobs = logprobs
        self._parallel = parallel
        self._echo = echo
        self._choices = [_Choice(parser, [echo]) for parser in parsers]
        self._head: Json = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model.names[0],
        }

    def head(self, streamed: bool) -> Json:
        """The kinds of object: "chat.completion" or "chat.completion.chunk"."""
        return {**self._head, "object": "chat.completion" + (".chunk" if streamed else "")}

    def opening(self) -> list[Json]:
        """The role, for each answer."""
        delta = {"role": "assistant", "content": self._echo}
        return [self._chunk(index, delta) for index in range(len(self._choices))]

    def piece(self, index: int, piece: Piece) -> Json | None:
        """The delta of a piece of text, with log-probabilities if requested."""
        choice = self._choices[index]
        delta = self._delta(choice, choice.parser.push(piece.text))
        if self._logprobs:
            content = chat_logprobs(self._tokenizer, piece.choices)
            choice.logprobs += content
            return self._chunk(index, delta) | {"logprobs": {"content": content, "refusal": None}}
        return self._chunk(index, delta) if delta else None

    def ending(self, index: int, ending: Ending) -> list[Json]:
        """The text that the parser withheld, and the finish reason."""
        choice = self._choices[index]
        rest = self._delta(choice, choice.parser.finish())
        reason = finish_reason(ending)
        if choice.calls and reason == "stop":
            reason = "tool_calls"
        choice.finish = {"finish_reason": reason, "stop_reason": ending.stopped_by}
        chunks = [self._chunk(index, rest)] if rest else []
        return [*chunks, self._chunk(index, {}) | choice.finish]

    def whole(self) -> list[Json]:
        """One message per answer."""
        return [
            {
                "index": index,
                "message": _message(choice),
                "logprobs": {"content": choice.logprobs, "refusal": None}
                if self._logprobs
                else None,
                **choice.finish,
            }
            for index, choice in enumerate(self._choices)
        ]

    def _delta(self, choice: _Choice, parts: Sequence[Delta]) -> Json:
        """The delta of a message that ``parts`` add."""
        content = "".join(part.content for part in parts)
        reasoning = "".join(part.reasoning for part in parts)
        first = len(choice.calls)
        for part in parts:
            call = part.tool_call
            if call is not None and (self._parallel or not choice.calls):
                function = {"name": call.name, "arguments": call.arguments_piece}
                choice.calls.append({"id": call.id, "type": "function", "function": function})
        choice.content.append(content)
        choice.reasoning.append(reasoning)
        calls = [
            {"index": index, **call} for index, call in enumerate(choice.calls) if index >= first
        ]
        delta = {"content": content, "reasoning_content": reasoning, "tool_calls": calls}
        return {name: value for name, value in delta.items() if value}

    def _chunk(self, index: int, delta: Json) -> Json:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _message(choice: _Choice) -> Json:
    content, reasoning = "".join(choice.content), "".join(choice.reasoning)
    message: Json = {"role": "assistant", "content": content, "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if choice.calls:
        message |= {"content": content or None, "tool_calls": choice.calls}
    return message
