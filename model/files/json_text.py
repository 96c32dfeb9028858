"""Untrusted JSON: keys and values are counted before parsing."""

from __future__ import annotations

import json
from typing import Any

from urdir.model.errors import ModelError
from urdir.model.files.limits import JSON_VALUES


def check_values(text: bytes, where: str, error: type[ModelError]) -> None:
    """Raise ``error``, prefixed by ``where``, if a text may have too many keys and values. Counts
    the separator characters, including those in strings."""
    JSON_VALUES.check(1 + sum(map(text.count, (b",", b":", b"[", b"{"))), where, error)


def parse_json(text: bytes, what: str, error: type[ModelError]) -> dict[str, Any]:
    """Parse a JSON object without duplicate keys. Raises ``error``, prefixed by ``what``."""

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
        raise error(f"{what} is not JSON: {reason}") from None
    if not isinstance(value, dict):
        raise error(f"{what} is not a JSON object")
    return value
