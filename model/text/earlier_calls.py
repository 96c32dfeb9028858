"""Calls of earlier answers in the form that a chat template takes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any

from urdir.model.text.call_form import CallForm, Slot

Turn = dict[str, Any]


def as_written(turns: Sequence[Turn], form: CallForm) -> list[Turn]:
    """Turns with calls as the template of ``form`` takes them: arguments as text or objects, short
    ids, calls as content, or one call a turn. Calls of another form than OpenAI's stay as they
    are."""
    written = []
    for turn in turns if form.between is not None or form.is_list else _one_by_one(turns):
        with suppress(LookupError, TypeError, AttributeError, ValueError, RecursionError):
            turn = _written(turn, form)
        written.append(turn)
    return written


def _one_by_one(turns: Sequence[Turn]) -> list[Turn]:
    """Turns in which each call of an answer with several is an answer, before its result: that of
    its id, or the next one."""
    made: list[Turn] = []
    results: list[Turn] = []
    for place, turn in enumerate(turns):
        if turn.get("role") == "tool" and results:
            continue  # it follows its call already
        calls = turn.get("tool_calls")
        results = []
        if not isinstance(calls, list) or len(calls) < 2:
            made.append(turn)
            continue
        results = [*takewhile(lambda of: of.get("role") == "tool", turns[place + 1 :])]
        left = [*results]
        for number, call in enumerate(calls):
            known = call.get("id") if isinstance(call, dict) else None
            own = [of for of in left if known and of.get("tool_call_id") == known] or left[:1]
            left = [of for of in left if of not in own]
            content = turn.get("content") if not number else ""
            made += [{**turn, "content": content, "tool_calls": [call]}, *own]
        made += left
    return made


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
    arguments = function["arguments"]
    if form.as_text != isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False) if form.as_text else _read(arguments)
        call = {**call, "function": {**function, "arguments": arguments}}
    return {**call, "id": _short(call["id"])} if form.short_ids and "id" in call else call


def _read(arguments: str) -> Any:
    """Arguments in JSON as an object; another text as it is."""
    with suppress(ValueError, RecursionError):
        found = json.loads(arguments or "{}")
        return found if isinstance(found, dict) else arguments
    return arguments


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
