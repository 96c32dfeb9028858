"""Calls of earlier answers in the form that a chat template takes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from urdir.model.text.call_form import CallForm, Slot

Turn = dict[str, Any]


def as_written(turns: Sequence[Turn], form: CallForm) -> list[Turn]:
    """Turns with calls as the template of ``form`` takes them: arguments as text, short ids, or
    calls as content. Calls that do not have OpenAI's form stay as they are."""
    if not (form.as_text or form.short_ids or not form.is_shown):
        return [*turns]
    written = []
    for turn in turns:
        with suppress(LookupError, TypeError, AttributeError, ValueError, RecursionError):
            turn = _written(turn, form)
        written.append(turn)
    return written


def _written(turn: Turn, form: CallForm) -> Turn:
    if form.short_ids and isinstance(turn.get("tool_call_id"), str):
        turn = {**turn, "tool_call_id": _short(turn["tool_call_id"])}
    if not (calls := turn.get("tool_calls")):
        return turn
    if not form.is_shown:
        others = {key: value for key, value in turn.items() if key != "tool_calls"}
        return {**others, "content": turn["content"] + write_calls(form, calls)}
    return {**turn, "tool_calls": [_call(call, form) for call in calls]}


def _call(call: Turn, form: CallForm) -> Turn:
    function = call["function"]
    if form.as_text and not isinstance(function["arguments"], str):
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
        call = {**call, "function": {**function, "arguments": arguments}}
    return {**call, "id": _short(call["id"])} if form.short_ids and "id" in call else call


def _short(call_id: str) -> str:
    """An id of nine letters and digits, the same for the same id."""
    if len(call_id) == 9 and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


def write_calls(form: CallForm, calls: Sequence[Turn]) -> str:
    """Calls with arguments in JSON or as keywords, as the model writes them."""
    opening, closing = ("[", "]") if form.is_list else ("", "")
    texts = [form.begin + _text(form, call["function"]) + form.end for call in calls]
    body = opening + (form.between or "").join(texts) + closing
    return form.section_begin + body + form.section_end


def _text(form: CallForm, function: Turn) -> str:
    arguments = function["arguments"]
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if form.arguments is None:
        written = json.dumps(arguments, ensure_ascii=False)
    else:
        written = f"({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
    slots = {Slot.NAME: function["name"], Slot.ARGUMENTS: written}
    return "".join(part if isinstance(part, str) else slots[part] for part in form.parts)
