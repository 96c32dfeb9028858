"""POST /api/chat and /api/generate, and what else ollama's clients ask: lines of JSON."""

from __future__ import annotations

import json
import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from urdir.model.engine.requests.request import Piece, TokenChoice
from urdir.model.serve.answer import Answer, Block, Event, Kind, Reason, text_of
from urdir.model.serve.asked import Asked, Mixed, fill_tokens
from urdir.model.serve.conversations import Conversation, make_conversation, template_of
from urdir.model.serve.errors import ApiError, ollama_error
from urdir.model.serve.fields import Fields
from urdir.model.serve.formats import read_source
from urdir.model.serve.interface import Json, ServedModel
from urdir.model.serve.json_response import iso_time
from urdir.model.serve.limits import Limits
from urdir.model.serve.logprobs import chat_logprobs
from urdir.model.serve.messages import read_messages
from urdir.model.serve.parameters import MOST_LOGPROBS, check_model, read_limit, read_parameters
from urdir.model.serve.refusals import refuse_unsupported
from urdir.model.serve.request_fields import OLLAMA_CHAT, OLLAMA_GENERATE, OLLAMA_OPTIONS
from urdir.model.serve.stream import LINES, Shape
from urdir.model.serve.tools import Tools, read_tools
from urdir.model.serve.usage import Usage
from urdir.model.text.chat import Message
from urdir.model.text.formats import Format

_EFFORTS = ("low", "medium", "high")
_REASONS = dict.fromkeys(Reason, "stop") | dict.fromkeys((Reason.LENGTH, Reason.FULL), "length")


# ---- requests ----


def read_ollama_chat(fields: Fields, model: ServedModel, limits: Limits) -> Asked | Json:
    """Read a request of /api/chat; ApiError if it is invalid. Without messages there is no answer:
    clients load a model by that."""
    refuse_unsupported(fields, OLLAMA_CHAT)
    if fields.raw("messages") in (None, []):
        check_model(named(fields), model)
        return without_answer(model.names[0], "load", is_chat=True)
    messages = read_messages(fields, template_of(model).source, limits)
    tools = read_tools(fields, limits)
    chat = make_conversation(fields, model, messages, tools, _read_thinking(fields))
    return _asked(fields, model, limits, chat, ChatLines)


def read_generate(fields: Fields, model: ServedModel, limits: Limits) -> Asked | Json:
    """Read a request of /api/generate, as `read_ollama_chat` does. ``context`` are the tokens of an
    earlier conversation; a ``raw`` prompt has no template, nor has any if the model has none. With
    a ``suffix`` the answer is the text before that."""
    refuse_unsupported(fields, OLLAMA_GENERATE)
    prompt, system, suffix = (fields.text(name) for name in ("prompt", "system", "suffix"))
    earlier: tuple[int, ...] = ()
    if fields.raw("context") is not None:
        earlier = fields.token_ids("context", model.tokenizer.vocab_size)
    is_raw = fields.flag("raw") or (model.template is None and not system)
    if not prompt:
        check_model(named(fields), model)
        return without_answer(model.names[0], "load", is_chat=False)
    source: Conversation | Mixed | str = prompt
    if suffix:
        fill = fill_tokens(model)
        source = Mixed((fill.before, prompt, fill.after, suffix, fill.gap))
    elif not is_raw:
        messages = [Message("system", system)] if system else []
        messages.append(Message("user", prompt))
        variables = _read_thinking(fields)
        source = make_conversation(fields, model, messages, Tools(), variables)
    return replace(_asked(fields, model, limits, source, GenerateLines), earlier=earlier)


def _asked(
    fields: Fields,
    model: ServedModel,
    limits: Limits,
    source: Conversation | Mixed | str,
    shape: type[_Lines],
) -> Asked:
    options = fields.object("options") or Fields({})
    refuse_unsupported(options, OLLAMA_OPTIONS)
    options = Fields({**options.values, "model": named(fields)}, "options.")
    top = fields.whole("top_logprobs", 0, MOST_LOGPROBS)
    logprobs = (top or 0) if fields.flag("logprobs") or top else None
    limit = read_limit(options, model, "num_predict", least=0) or None  # to ollama 0 means none
    parameters = read_parameters(options, model, limits, limit, logprobs)
    is_streamed = fields.raw("stream") is None or fields.flag("stream")
    parameters = replace(parameters, stream=is_streamed)
    return Asked((source,), parameters, _read_form(fields, limits), shape)


def named(fields: Fields) -> str | None:
    """The model; "latest" is what ollama calls the one of a name without a tag."""
    name = fields.text("model")
    return None if name is None else name.removesuffix(":latest")


def _read_form(fields: Fields, limits: Limits) -> Format | None:
    if fields.raw("format") in (None, ""):
        return None
    if fields.raw("format") == "json":
        return Format("json_object", None)
    if not isinstance(fields.raw("format"), dict):
        fields.fail("format", "must be 'json' or a JSON schema", "invalid_type")
    return read_source(fields, "format", "json_schema", limits)


def _read_thinking(fields: Fields) -> Json:
    """The template's variables for "think"."""
    if isinstance(fields.raw("think"), str):
        effort = fields.choice("think", _EFFORTS)
        return {"enable_thinking": True, "reasoning_effort": effort}
    return {} if fields.raw("think") is None else {"enable_thinking": fields.flag("think")}


# ---- answers ----


class _Lines(Shape):
    """A line for each piece, and a last one that says why the answer ended."""

    framing = LINES

    @abstractmethod
    def content(self, text: str, thinking: str, calls: Sequence[Block]) -> Json:
        """The part of a line that has text."""

    def end(self, answer: Answer) -> Json:
        """More of the last line."""
        return {}

    def part(self, answer: Answer, events: Sequence[Event], piece: Piece) -> list[Json]:
        """A line, if there is anything new."""
        logprobs = self._logprobs(piece.choices)
        if not events and not logprobs:
            return []
        calls = [event.block for event in events if event.ends]
        text, thinking = text_of(events, Kind.CONTENT), text_of(events, Kind.REASONING)
        if not (calls or text or thinking or logprobs):
            return []
        return [self._line(self.content(text, thinking, calls), done=False) | logprobs]

    def ending(self, answer: Answer, usage: Usage) -> list[Json]:
        """The last line."""
        return [self._line(self.content("", "", ()), done=True) | self._end(answer, usage)]

    def whole(self, usage: Usage) -> Json:
        """All of it in one object."""
        [answer] = self.answers
        text, thinking = answer.text(Kind.CONTENT), answer.text(Kind.REASONING)
        content = self.content(text, thinking, answer.of(Kind.CALL))
        line = self._line(content, done=True) | self._logprobs(answer.tokens)
        return line | self._end(answer, usage)

    def failure(self, error: ApiError) -> Json:
        """A line with the error."""
        return ollama_error(error)

    def _line(self, content: Json, *, done: bool) -> Json:
        return {
            "model": self.model.names[0],
            "created_at": iso_time(time.time()),
            **content,
            "done": done,
        }

    def _logprobs(self, tokens: Sequence[TokenChoice]) -> Json:
        if self.parameters.settings.logprobs is None or not tokens:
            return {}
        return {"logprobs": chat_logprobs(self.model.tokenizer, tokens)}

    def _end(self, answer: Answer, usage: Usage) -> Json:
        prompt, completion = usage.prompt_seconds, usage.completion_seconds
        return {
            "done_reason": _REASONS[answer.reason],
            **self.end(answer),
            "total_duration": _nanoseconds(prompt + completion),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt,
            "prompt_eval_duration": _nanoseconds(prompt),
            "eval_count": usage.completion,
            "eval_duration": _nanoseconds(completion),
            "timings": usage.timings(),
        }


class ChatLines(_Lines):
    """Lines of /api/chat."""

    def content(self, text: str, thinking: str, calls: Sequence[Block]) -> Json:
        """A message."""
        message: Json = {"role": "assistant", "content": text}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = [_call(block) for block in calls]
        return {"message": message}


class GenerateLines(_Lines):
    """Lines of /api/generate."""

    def content(self, text: str, thinking: str, calls: Sequence[Block]) -> Json:
        """A text."""
        return {"response": text} | ({"thinking": thinking} if thinking else {})

    def end(self, answer: Answer) -> Json:
        """The tokens of the conversation so far."""
        return {"context": [*answer.prompt, *(choice.token for choice in answer.tokens)]}


def _call(block: Block) -> Json:
    function = {"name": block.name, "arguments": json.loads(block.text or "{}")}
    return {"id": block.id, "function": function}


def _nanoseconds(seconds: float) -> int:
    return round(1e9 * seconds)


def without_answer(model: str, reason: Literal["load", "unload"], *, is_chat: bool) -> Json:
    """The response to a request without a text, by which clients load or unload a model."""
    message: Json = {"message": {"role": "assistant", "content": ""}}
    return {
        "model": model,
        "created_at": iso_time(time.time()),
        **(message if is_chat else {"response": ""}),
        "done": True,
        "done_reason": reason,
    }
