"""The form that a request wants its answer to have."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from urdir.model.serve.fields import Fields
from urdir.model.serve.interface import ConstraintKind
from urdir.model.serve.limits import Limits

#: Fields of vLLM's "structured_outputs" -> what they are here.
_STRUCTURED: dict[str, ConstraintKind] = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "grammar": "grammar",
    "choice": "choice",
}


@dataclass(frozen=True, slots=True)
class Format:
    """A constraint yet to be compiled."""

    kind: ConstraintKind
    source: Any


def read_format(fields: Fields, limits: Limits) -> Format | None:
    """response_format or structured_outputs; None where the answer is free text.

    Raises ApiError for both, for an unknown form and for a source that is too large.
    """
    response = fields.object("response_format")
    structured = fields.object("structured_outputs")
    if response is not None and structured is not None:
        fields.fail("structured_outputs", "cannot be had with 'response_format'")
    if response is not None:
        return _read_response_format(response, limits)
    if structured is not None:
        return _read_structured(structured, limits)
    return None


def _read_response_format(response: Fields, limits: Limits) -> Format | None:
    response.needed_text("type")
    match response.choice("type", ("text", "json_object", "json_schema")):
        case "json_object":
            return Format("json_object", None)
        case "json_schema":
            schema = response.needed_object("json_schema").needed_object("schema")
            check_size(schema, schema.values, limits)
            return Format("json_schema", schema.values)
        case _:
            return None


def _read_structured(structured: Fields, limits: Limits) -> Format | None:
    given = [name for name in _STRUCTURED if structured.raw(name) is not None]
    if len(given) != 1:
        structured.fail("", f"must have one of {', '.join(_STRUCTURED)}")
    name = given[0]
    kind = _STRUCTURED[name]
    source: Any
    if name == "json_object":
        return Format(kind, None) if structured.flag(name) else None
    if name == "choice":
        source = list(structured.texts(name, limits.schema))
    elif name == "json" and isinstance(structured.raw(name), dict):
        source = structured.raw(name)
    else:
        source = structured.needed_text(name)
    check_size(structured, source, limits)
    return Format(kind, source)


def check_size(fields: Fields, source: Any, limits: Limits) -> None:
    """Refuse ``fields`` for a schema, pattern or grammar that is larger than allowed."""
    size = len(source if isinstance(source, str) else json.dumps(source))
    if size > limits.schema:
        fields.fail(
            "",
            f"has {size:,} characters, at most {limits.schema:,} are allowed",
            "schema_too_large",
        )
