"""POST /v1/messages: Anthropic's conversations, and the count of their tokens."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from urdir.model.engine.requests.request import Piece
from urdir.model.engine.sampling_settings import MOST_COUNT
from urdir.model.serve.answer import Answer, Block, Event, Kind, Reason
from urdir.model.serve.asked import Asked, Begun, render
from urdir.model.serve.conversations import Conversation, make_conversation
from urdir.model.serve.errors import ApiError, anthropic_error
from urdir.model.serve.fields import Fields
from urdir.model.serve.formats import read_format, read_source, refuse_beside_call
from urdir.model.serve.interface import Json, ServedModel
from urdir.model.serve.limits import Limits
from urdir.model.serve.messages import read_texts
from urdir.model.serve.parameters import Parameters, check_model, read_limit, read_parameters
from urdir.model.serve.refusals import refuse_unsupported
from urdir.model.serve.request_fields import MESSAGES
from urdir.model.serve.stream import NAMED, Shape
from urdir.model.serve.tools import Tools, flat_tool, make_tools
from urdir.model.serve.usage import Usage
from urdir.model.text.chat import Message
from urdir.model.text.formats import Format

_NAMES = {"stop": "stop_sequences"}  # of fields that others have, too
_REASONS = {
    Reason.END: "end_turn",
    Reason.STOP: "stop_sequence",
    Reason.LENGTH: "max_tokens",
    Reason.FULL: "model_context_window_exceeded",
    Reason.CALLS: "tool_use",
}


# ---- requests ----


def read_message(fields: Fields, model: ServedModel, limits: Limits) -> Asked:
    """Read the request in ``fields``; ApiError if it is invalid."""
    refuse_unsupported(fields, MESSAGES)
    fields = fields.named(_NAMES)
    limit = read_limit(fields, model, "max_tokens")
    parameters = read_parameters(fields, model, limits, limit, None)
    thinking = fields.object("thinking")
    budget = None if thinking is None else thinking.whole("budget_tokens", 1, MOST_COUNT)
    if budget is not None:
        parameters = replace(parameters, thinking=budget)
    chat = _read_conversation(fields, model, limits)
    form = _read_form(fields, limits)
    if chat.tools.is_required:
        refuse_beside_call(fields)
    return Asked((chat,), parameters, form, MessageShape)


def count_tokens(fields: Fields, model: ServedModel, limits: Limits) -> Json:
    """The tokens of a request that is not answered."""
    check_model(fields.text("model"), model)
    chat = _read_conversation(fields, model, limits)
    begun = Begun.of_conversation(model, chat, render(model, chat))
    return {"input_tokens": len(begun.tokens)}


def _read_conversation(fields: Fields, model: ServedModel, limits: Limits) -> Conversation:
    messages = [Message("system", text)] if (text := read_texts(fields, "system")) else []
    turns = fields.objects("messages")
    if not turns:
        fields.fail("messages", "must be a list with at least one message")
    for turn in turns:
        messages += _read_turn(turn)
    return make_conversation(
        fields, model, messages, _read_tools(fields, limits), _read_thinking(fields)
    )


def _read_turn(turn: Fields) -> Iterator[Message]:
    """The messages of a turn: results of calls are some of their own, before its text."""
    role = turn.choice("role", ("user", "assistant", "system"))
    if role is None:
        turn.fail("role", "is missing")
    if isinstance(content := turn.raw("content"), str):
        yield Message(role, content)
        return
    if not content:
        turn.fail("content", "is missing")
    found: dict[str, list[Any]] = {kind: [] for kind in _READERS}
    for block in turn.objects("content"):
        kind = block.needed_text("type")
        roles, read = _READERS.get(kind, ((), None))
        if read is None or role not in roles:
            block.fail("type", f"is {kind!r}: only text is supported", "unsupported_content")
        found[kind].append(read(block))
    yield from found["tool_result"]
    more: Json = {}
    if found["thinking"]:
        more["reasoning_content"] = "\n".join(found["thinking"])
    if found["tool_use"]:
        more["tool_calls"] = found["tool_use"]
    if found["text"] or more or not found["tool_result"]:
        yield Message(role, "\n".join(found["text"]), more)


def _read_result(block: Fields) -> Message:
    name = block.needed_text("tool_use_id")
    return Message("tool", read_texts(block, "content"), {"tool_call_id": name})


def _read_call(block: Fields) -> Json:
    arguments = block.object("input")
    function = {
        "name": block.needed_text("name"),
        "arguments": {} if arguments is None else arguments.values,
    }
    return {"id": block.needed_text("id"), "type": "function", "function": function}


#: Blocks of a message: the roles that may have them, and what reads them.
_READERS: dict[str, tuple[tuple[str, ...], Callable[[Fields], Any]]] = {
    "text": (("user", "assistant", "system"), lambda block: block.needed_text("text")),
    "thinking": (("assistant",), lambda block: block.needed_text("thinking")),
    "redacted_thinking": (("assistant",), lambda block: None),  # of another model
    "tool_use": (("assistant",), _read_call),
    "tool_result": (("user",), _read_result),
}


def _read_tools(fields: Fields, limits: Limits) -> Tools:
    offered = []
    for tool in fields.objects("tools", limits.tools):
        if tool.raw("type") not in (None, "custom"):
            tool.fail("type", "must be 'custom': the server has no tools", "unsupported_parameter")
        offered.append(flat_tool(tool, "input_schema", limits))
    choice = fields.object("tool_choice")
    if choice is None:
        return make_tools(fields, offered, False, None, parallel=True)
    choice.needed_text("type")
    kind = choice.choice("type", ("auto", "any", "tool", "none"))
    parallel = not choice.flag("disable_parallel_tool_use")
    return make_tools(
        fields,
        [] if kind == "none" else offered,
        kind in ("any", "tool"),
        choice if kind == "tool" else None,
        parallel=parallel,
    )


def _read_thinking(fields: Fields) -> Json:
    """The template's variables."""
    variables: Json = {}
    if (config := fields.object("output_config")) is not None and config.text("effort"):
        variables["reasoning_effort"] = config.text("effort")
    if (thinking := fields.object("thinking")) is not None:
        thinking.needed_text("type")
        kind = thinking.choice("type", ("enabled", "disabled", "adaptive"))
        variables["enable_thinking"] = kind != "disabled"
    return variables


def _read_form(fields: Fields, limits: Limits) -> Format | None:
    config = fields.object("output_config")
    form = None if config is None else config.object("format")
    if form is None:
        return read_format(fields, limits)
    if form.needed_text("type") != "json_schema":
        form.fail("type", "must be 'json_schema'", "invalid_value")
    return read_source(form, "schema", "json_schema", limits)


# ---- answers ----

#: The type of a block, the field of its text, the type of a delta, the field of its text.
_BLOCKS = {
    Kind.CONTENT: ("text", "text", "text_delta", "text"),
    Kind.REASONING: ("thinking", "thinking", "thinking_delta", "thinking"),
    Kind.CALL: ("tool_use", "input", "input_json_delta", "partial_json"),
}


class MessageShape(Shape):
    """A `message`, or the events from `message_start` to `message_stop`."""

    framing = NAMED

    def __init__(
        self, model: ServedModel, parameters: Parameters, answers: Sequence[Answer]
    ) -> None:
        super().__init__(model, parameters, answers)
        self._index = -1  # of the block that is open
        self._id = f"msg_{uuid.uuid4().hex}"

    def opening(self) -> list[Json]:
        """The message without content. How much of the prompt was cached is known at the end."""
        counts = _counts(len(self.answers[0].prompt))
        return [{"type": "message_start", "message": self._message([], counts, _NO_END)}]

    def part(self, answer: Answer, events: Sequence[Event], piece: Piece) -> list[Json]:
        """Beginnings of blocks and deltas."""
        return [each for event in events for each in self._changes(event)]

    def ending(self, answer: Answer, usage: Usage) -> list[Json]:
        """The end of the last block, the reason and the usage."""
        counts = {"usage": _used(usage, answer), "timings": usage.timings()}
        return [
            *self._close(),
            {"type": "message_delta", "delta": _end(answer), **counts},
            {"type": "message_stop"},
        ]

    def whole(self, usage: Usage) -> Json:
        """The message."""
        [answer] = self.answers
        content = [_block(block, block.text) for block in answer.whole()]
        message = self._message(content, _used(usage, answer), _end(answer))
        return message | {"timings": usage.timings()}

    def failure(self, error: ApiError) -> Json:
        """An event of the type "error"."""
        return anthropic_error(error)

    def _changes(self, event: Event) -> Iterator[Json]:
        if event.begins:
            yield from self._close()
            self._index += 1
            block = _block(event.block, "")
            yield {"type": "content_block_start", "index": self._index, "content_block": block}
        if event.text:
            *_, kind, name = _BLOCKS[event.block.kind]
            delta = {"type": kind, name: event.text}
            yield {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _close(self) -> Iterator[Json]:
        if self._index >= 0:
            yield {"type": "content_block_stop", "index": self._index}

    def _message(self, content: list[Json], counts: Json, end: Json) -> Json:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self.model.names[0],
            "content": content,
            **end,
            "usage": counts,
        }


def _block(block: Block, text: str) -> Json:
    """A content block with some text, which is JSON for a call."""
    kind, name, *_ = _BLOCKS[block.kind]
    if block.kind is Kind.CALL:
        return {"type": kind, "id": block.id, "name": block.name, name: json.loads(text or "{}")}
    signature = {"signature": ""} if block.kind is Kind.REASONING else {}
    return {"type": kind, name: text, **signature}


_NO_END: Json = {"stop_reason": None, "stop_sequence": None}


def _end(answer: Answer) -> Json:
    """Why an answer ended; a stop string after a call is not the reason."""
    sequence = answer.stopped_by if answer.reason is Reason.STOP else None
    return {"stop_reason": _REASONS[answer.reason], "stop_sequence": sequence}


def _used(usage: Usage, answer: Answer) -> Json:
    counts = _counts(usage.prompt, usage.cached, usage.completion)
    if answer.reasoning_tokens:
        counts["output_tokens_details"] = {"thinking_tokens": answer.reasoning_tokens}
    return counts


def _counts(prompt: int, cached: int = 0, completion: int = 0) -> Json:
    return {
        "input_tokens": prompt - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": completion,
    }
