"""JSON of a stranger's: its keys and values are counted before any of them is made."""

from __future__ import annotations

import json
from typing import Any

from urdir.model.errors import ModelError
from urdir.model.files.limits import JSON_VALUES


def check_values(text: bytes, where: str, error: type[ModelError]) -> None:
    """Raise ``error``, which begins with ``where``, for a text that may have too many keys and
    values. Before each but the first stands one of four characters; those in strings count, too."""
    JSON_VALUES.check(1 + sum(map(text.count, (b",", b":", b"[", b"{"))), where, error)


def parse_json(text: bytes, what: str, error: type[ModelError]) -> dict[str, Any]:
    """A JSON object without duplicate keys. Raises ``error``, which begins with ``what``."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise error(f"{what} has {key[:80]!r} twice: corrupt file")
            found[key] = value
        return found

    check_values(text, what, error)
    try:
        value = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as cause:
        reason = "too deeply nested" if isinstance(cause, RecursionError) else str(cause)
        raise error(f"{what} is no JSON: {reason}") from None
    if not isinstance(value, dict):
        raise error(f"{what} is no JSON object")
    return value
