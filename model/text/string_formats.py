"""Formats of strings in a schema. Those that llguidance knows constrain an answer; others
("password", "path") are notes, as JSON Schema has unknown ones, and not errors, as llguidance does.
"""

from __future__ import annotations

from typing import Any

from urdir.model.text.schema_parts import mapped

#: Formats that llguidance 1.9 knows.
KNOWN = frozenset(
    (
        *("date-time", "time", "date", "duration", "email", "hostname"),
        *("ipv4", "ipv6", "uuid", "uri"),
    )
)


def known_formats(schema: Any) -> Any:
    """``schema`` (JSON) without formats that are not `KNOWN`."""
    return mapped(schema, _without_others)


def _without_others(schema: dict[str, Any]) -> dict[str, Any]:
    of = schema.get("format")
    if isinstance(of, str) and of not in KNOWN:
        del schema["format"]
    return schema
