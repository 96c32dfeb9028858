"""GET /v1/responses/ID/input_items: the conversation before a response that is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile

from urdir.model.serve.errors import ApiError
from urdir.model.serve.interface import Json

_MOST, _USUAL = 100, 20


def input_items(name: str, items: Sequence[Json], query: Mapping[str, str]) -> Json:
    """A page of the ``items`` before the response ``name``, as OpenAI lists them: ``limit`` of them
    (20, at most 100) after that of the id ``after``, the last one first unless ``order`` is "asc".
    Raises ApiError for other values.
    """
    limit, order, after = (query.get(key, "") for key in ("limit", "order", "after"))
    if limit and not (limit.isascii() and limit.isdecimal() and 1 <= int(limit[:9]) <= _MOST):
        raise ApiError(f"'limit' must be from 1 to {_MOST}", param="limit", code="invalid_value")
    if order not in ("", "asc", "desc"):
        raise ApiError("'order' must be asc or desc", param="order", code="invalid_value")
    found = [_listed(item, f"{name.partition('_')[2]}_in{i}") for i, item in enumerate(items)]
    if order != "asc":
        found.reverse()
    if after:
        before = sum(1 for _ in takewhile(lambda item: item["id"] != after, found))
        if before == len(found):
            raise ApiError(f"there is no item {after!r:.80}", param="after", code="item_not_found")
        found = found[before + 1 :]
    most = int(limit or _USUAL)
    page = found[:most]
    ends = {key: page[at]["id"] if page else None for key, at in (("first_id", 0), ("last_id", -1))}
    return {"object": "list", "data": page, **ends, "has_more": len(found) > most}


def _listed(item: Json, name: str) -> Json:
    """An item with an id; a message with its text as a part, whatever it was sent as."""
    kind = item.get("type") or "message"
    prefix = {"message": "msg", "function_call": "fc", "reasoning": "rs"}.get(kind, "item")
    found = {"id": f"{prefix}_{name}", **item, "type": kind}
    if kind == "message" and isinstance(text := item.get("content"), str):
        is_said = item.get("role") == "assistant"
        part: Json = {"type": "output_text" if is_said else "input_text", "text": text}
        found["content"] = [part | ({"annotations": []} if is_said else {})]
    return found
