"""Items that a request of /v1/responses names (``item_reference``) instead of giving them.

The id of an item has that of its response in it. A response is kept with the conversation before
it, so the last one that is named has the items of most earlier ones, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from urdir.model.serve.fields import Fields
from urdir.model.serve.interface import Json

_ID = re.compile(r"(?:msg|rs|fc)_([0-9a-f]{32})_\d+", re.ASCII)
_MOST_RESPONSES = 8  # that are read for one request


@dataclass(frozen=True, slots=True)
class Missing:
    """The name of a response that has an item; it has not been read yet."""

    name: str


def resolved(items: Sequence[Any], kept: Mapping[str, Json]) -> list[Any] | Missing:
    """``items`` with those that they name in place of the names, out of what was ``kept`` of
    responses, by their names.

    Raises ApiError for an item that is in none, is named twice, or would take too many responses.
    """
    known: dict[Any, Json] = {}
    for each in kept.values():
        known |= {item.get("id"): item for item in (*each["input"], *each["response"]["output"])}
    found, used = list(items), set[str]()
    for place in reversed(range(len(items))):  # the last response is likely to have all
        if not isinstance(items[place], dict) or items[place].get("type") != "item_reference":
            continue
        reference = Fields(items[place], f"input[{place}].")
        name = reference.needed_text("id")
        if name in used:
            reference.fail("id", "is that of an item which comes again")
        used.add(name)
        if name in known:
            found[place] = known[name]
            continue
        match = _ID.fullmatch(name)
        response = "" if match is None else f"resp_{match[1]}"
        if match is None or response in kept:
            reference.fail("id", "names no item of an answer that is kept", "item_not_found")
        if len(kept) == _MOST_RESPONSES:
            reference.fail("id", f"is in one more than the {_MOST_RESPONSES} responses read")
        return Missing(response)
    return found
