"""Items of /v1/responses, read as messages for the chat template."""

from __future__ import annotations

from typing import Any

from urdir.model.serve.answer import Kind
from urdir.model.serve.fields import Fields
from urdir.model.serve.interface import Json, ServedModel
from urdir.model.serve.json_reader import JsonReader
from urdir.model.serve.messages import read_arguments, read_texts
from urdir.model.text.chat import Message, role_in

_ROLES = ("user", "assistant", "system", "developer")


class Items:
    """Makes messages of items: reasoning, text and calls of the model are one."""

    def __init__(self, model: ServedModel, reader: JsonReader) -> None:
        self.messages: list[Message] = []
        self._source = model.template.source if model.template else ""
        self._reader = reader
        self._turn: dict[Kind, list[Any]] = {}  # what the model said last

    def read(self, item: Fields) -> None:
        """Add an item; ApiError for one that is not supported."""
        kind = item.text("type") or "message"
        if kind == "message":
            role = item.choice("role", _ROLES)
            if role is None:
                item.fail("role", "is missing")
            if item.raw("content") is None:
                item.fail("content", "is missing")
            text = read_texts(item, "content")
            if role == "assistant":
                self._said(Kind.CONTENT, text, before=(Kind.CALL, Kind.CONTENT))
            else:
                self._add(Message(role_in(self._source, role), text))
        elif kind == "reasoning":
            name = "content" if item.raw("content") else "summary"
            self._said(Kind.REASONING, read_texts(item, name), before=tuple(Kind))
        elif kind == "function_call":
            arguments = read_arguments(item, self._reader)
            function = {"name": item.needed_text("name"), "arguments": arguments}
            call = {"id": item.needed_text("call_id"), "type": "function", "function": function}
            self._said(Kind.CALL, call, before=())
        elif kind == "function_call_output":
            name = item.needed_text("call_id")
            self._add(Message("tool", read_texts(item, "output"), {"tool_call_id": name}))
        else:
            item.fail("type", f"is {kind!r}: only text is supported", "unsupported_content")

    def end_turn(self) -> None:
        """Make a message of what the model said."""
        turn, self._turn = self._turn, {}
        if turn:
            more: Json = {}
            if Kind.REASONING in turn:
                more["reasoning_content"] = "\n".join(turn[Kind.REASONING])
            if Kind.CALL in turn:
                more["tool_calls"] = turn[Kind.CALL]
            self.messages.append(Message("assistant", "".join(turn.get(Kind.CONTENT, [])), more))

    def _add(self, message: Message) -> None:
        self.end_turn()
        self.messages.append(message)

    def _said(self, kind: Kind, value: Any, before: tuple[Kind, ...]) -> None:
        """Add to the model's turn, which ends if it has a kind that this comes ``before``."""
        if any(each in self._turn for each in before):
            self.end_turn()
        self._turn.setdefault(kind, []).append(value)
