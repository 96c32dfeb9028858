"""Responses of /v1/responses: items, whole or as events."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from urdir.model.engine.requests.request import Piece
from urdir.model.serve.answer import Answer, Block, Event, Kind, Reason
from urdir.model.serve.errors import ApiError
from urdir.model.serve.interface import Json, ServedModel
from urdir.model.serve.parameters import Parameters
from urdir.model.serve.stream import NAMED, Shape
from urdir.model.serve.usage import Usage

_BUSY = 429
#: The beginning of an item's id, and of the types of its events.
_ITEMS = {
    Kind.CONTENT: ("msg", "response.output_text"),
    Kind.REASONING: ("rs", "response.reasoning_text"),
    Kind.CALL: ("fc", "response.function_call_arguments"),
}
#: Fields of a request that its response repeats, with their defaults.
_REPEATED: Json = {
    "background": False,
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "store": True,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "truncation": "disabled",
    "user": None,
}


class ResponseShape(Shape):
    """A `response`, or events with sequence numbers."""

    framing = NAMED

    def __init__(
        self,
        request: Mapping[str, Any],
        items: Sequence[Json],
        model: ServedModel,
        parameters: Parameters,
        answers: Sequence[Answer],
    ) -> None:
        """``request`` has the fields, ``items`` is the whole conversation before the answer."""
        super().__init__(model, parameters, answers)
        self._items = items
        self._number = 0
        self._is_queued = bool(request.get("background"))
        self._id = uuid.uuid4().hex
        repeated = {
            name: default if request.get(name) is None else request[name]
            for name, default in _REPEATED.items()
        }
        self._head: Json = {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model.names[0],
            "temperature": parameters.settings.temperature,
            "top_p": parameters.settings.top_p,
            **repeated,
        }

    def opening(self) -> list[Json]:
        """The response without output."""
        status = "queued" if self._head["background"] else "in_progress"
        response = self._so_far(status)
        return [
            self._event("response.created", response=response),
            self._event(f"response.{status}", response=response),
        ]

    def part(self, answer: Answer, events: Sequence[Event], piece: Piece) -> list[Json]:
        """Beginnings and ends of items, and deltas."""
        found: list[Json] = []
        if self._is_queued and piece.choices:
            self._is_queued = False
            response = self._so_far("in_progress")
            found.append(self._event("response.in_progress", response=response))
        for event in events:
            index = answer.blocks.index(event.block)
            if event.begins:
                if index:
                    is_broken = answer.blocks[index - 1].is_broken
                    status = "incomplete" if is_broken else "completed"
                    found += self._end_item(answer, index - 1, status)
                found += self._begin_item(answer, index)
            if event.text:
                found.append(self._change(answer, index, "delta", delta=event.text))
        return found

    def ending(self, answer: Answer, usage: Usage) -> list[Json]:
        """The end of the last item."""
        last = len(answer.blocks) - 1
        return list(self._end_item(answer, last, _status(answer))) if answer.blocks else []

    def closing(self, usage: Usage) -> list[Json]:
        """The whole response."""
        response = self.whole(usage)
        return [self._event(f"response.{response['status']}", response=response)]

    def whole(self, usage: Usage) -> Json:
        """The response."""
        [answer] = self.answers
        status = _status(answer)
        is_cut = status == "incomplete"
        return {
            **self._head,
            "status": status,
            "completed_at": int(time.time()),
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._output(answer, status),
            "usage": _counts(usage, answer),
            "timings": usage.timings(),
        }

    def failure(self, error: ApiError) -> Json:
        """The event "response.failed"."""
        return self._event("response.failed", response=self._so_far("failed", error))

    def standing(self, status: str, error: ApiError | None = None) -> Json:
        """What is kept of a response that is being written, was cancelled or failed."""
        return {"input": self._items, "response": self._so_far(status, error)}

    def _so_far(self, status: str, error: ApiError | None = None) -> Json:
        """The response before its end, or without one."""
        [answer] = self.answers
        is_open = status in ("queued", "in_progress")
        output = [] if is_open else self._output(answer, "incomplete")
        if output and _is_cut(answer.blocks[-1]):
            del output[-1]
        response = {**self._head, "status": status, "output": output, "usage": None}
        response |= {"incomplete_details": None, "error": None}
        if error is not None:
            code = "rate_limit_exceeded" if error.status == _BUSY else "server_error"
            response["error"] = {"code": code, "message": str(error)}
        return response

    def kept(self, usage: Usage) -> tuple[str, Json] | None:
        """The conversation, unless the request says that it is not to be stored."""
        if self._head["store"] is False:
            return None
        return self._head["id"], {"input": self._items, "response": self.whole(usage)}

    def _begin_item(self, answer: Answer, index: int) -> Iterator[Json]:
        block = Block(answer.blocks[index].kind, id=answer.blocks[index].id)
        block.name = answer.blocks[index].name
        item = self._item(block, index, "in_progress")
        yield self._event("response.output_item.added", output_index=index, item=item)
        if block.kind is not Kind.CALL:
            yield self._part(item, index, "added", _part(block))

    def _end_item(self, answer: Answer, index: int, status: str) -> Iterator[Json]:
        block = answer.blocks[index]
        item = self._item(block, index, status)
        name = "arguments" if block.kind is Kind.CALL else "text"
        more = {"name": block.name} if block.kind is Kind.CALL else {}
        yield self._change(answer, index, "done", **{name: block.text}, **more)
        if block.kind is not Kind.CALL:
            yield self._part(item, index, "done", _part(block))
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _change(self, answer: Answer, index: int, change: str, **more: Any) -> Json:
        """An event of an item's text."""
        kind = answer.blocks[index].kind
        name, begin = _ITEMS[kind]
        if kind is not Kind.CALL:
            more["content_index"] = 0
        if kind is Kind.CONTENT:
            more["logprobs"] = []
        item = f"{name}_{self._id}_{index}"
        return self._event(f"{begin}.{change}", item_id=item, output_index=index, **more)

    def _part(self, item: Json, index: int, change: str, part: Json) -> Json:
        return self._event(
            f"response.content_part.{change}",
            item_id=item["id"],
            output_index=index,
            content_index=0,
            part=part,
        )

    def _output(self, answer: Answer, status: str) -> list[Json]:
        """The items, of which the last one has the status of the answer."""
        last = len(answer.blocks) - 1
        return [
            self._item(block, i, status if i == last else "completed")
            for i, block in enumerate(answer.blocks)
            if not block.is_broken
        ]

    def _item(self, block: Block, index: int, status: str) -> Json:
        name = _ITEMS[block.kind][0]
        item: Json = {"id": f"{name}_{self._id}_{index}", "status": status}
        if block.kind is Kind.CALL:
            call = {"call_id": block.id, "name": block.name, "arguments": block.text}
            return item | {"type": "function_call", **call}
        content = [] if status == "in_progress" else [_part(block)]
        if block.kind is Kind.REASONING:
            return item | {"type": "reasoning", "summary": [], "content": content}
        return item | {"type": "message", "role": "assistant", "content": content}

    def _event(self, kind: str, **more: Any) -> Json:
        event = {"type": kind, "sequence_number": self._number, **more}
        self._number += 1
        return event


def _is_cut(block: Block) -> bool:
    """Whether a block is a call whose arguments are not whole."""
    if block.kind is not Kind.CALL or block.is_broken:
        return False
    try:
        json.loads(block.text)
    except (ValueError, RecursionError):
        return True
    return False


def _status(answer: Answer) -> str:
    """Of an answer that has ended, and of its last item."""
    return "incomplete" if answer.reason in (Reason.LENGTH, Reason.FULL) else "completed"


def _part(block: Block) -> Json:
    if block.kind is Kind.REASONING:
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _counts(usage: Usage, answer: Answer) -> Json:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
        "total_tokens": usage.prompt + usage.completion,
    }
