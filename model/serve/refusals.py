"""Refusal of request fields that would change an answer and cannot be served."""

from __future__ import annotations

import logging
from typing import Any

from urdir.model.serve.fields import Fields
from urdir.model.serve.request_fields import FIELDS, Handling

log = logging.getLogger("urdir.serve")


_BY_ENDPOINT = {
    endpoint: {field.name: field for field in FIELDS if endpoint in field.endpoints}
    for endpoint in dict.fromkeys(each for field in FIELDS for each in field.endpoints)
}
_REFUSED = {
    endpoint: [field for field in known.values() if field.handling is Handling.REFUSED]
    for endpoint, known in _BY_ENDPOINT.items()
}
#: What a request has at its top where it has one of these: "name", or of "name.name" the first.
_BEGINNINGS = {
    endpoint: frozenset(
        name for field in refused for name in (field.name, field.name.partition(".")[0])
    )
    for endpoint, refused in _REFUSED.items()
}


def refuse_unsupported(fields: Fields, endpoint: str) -> None:
    """Refuse fields that would change the answer and cannot be served. Raises ApiError."""
    known = _BY_ENDPOINT[endpoint]
    if not _BEGINNINGS[endpoint].isdisjoint(fields.values):
        for field in _REFUSED[endpoint]:
            value = fields.at(field.name)
            if value is not None and not any(_is_same(value, each) for each in field.neutral):
                fields.fail(field.name, f"is not supported: {field.note}", "unsupported_parameter")
    if unknown := [name for name in fields.values if name not in known]:
        log.debug("fields that are ignored: %.200r", unknown)


def _is_same(value: Any, neutral: Any) -> bool:
    """Equality as JSON has it: a number is not a truth value."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)
