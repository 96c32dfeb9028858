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
#: Fields of a request: vLLM's old ones, llama-server's.
_ALONE: dict[str, ConstraintKind] = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_grammar": "grammar",
    "guided_choice": "choice",
    "json_schema": "json_schema",
    "grammar": "grammar",
}
FORMAT_FIELDS = ("response_format", "structured_outputs", *_ALONE)


@dataclass(frozen=True, slots=True)
class Format:
    """A constraint yet to be compiled."""

    kind: ConstraintKind
    source: Any


def read_format(fields: Fields, limits: Limits) -> Format | None:
    """The form by one of `FORMAT_FIELDS`; None where the answer is free text.

    Raises ApiError for two of them, for an unknown form and for a source that is too large.
    """
    given = [name for name in FORMAT_FIELDS if fields.raw(name) not in (None, "")]
    if len(given) > 1:
        fields.fail(given[1], f"cannot be had with '{given[0]}'")
    if not given:
        return None
    name = given[0]
    if name in _ALONE:
        return _read_source(fields, name, _ALONE[name], limits)
    inner = fields.needed_object(name)
    if name == "response_format":
        return _read_response_format(inner, limits)
    return _read_structured(inner, limits)


def _read_response_format(response: Fields, limits: Limits) -> Format | None:
    response.needed_text("type")
    kind = response.choice("type", ("text", "json_object", "json_schema"))
    if kind == "text":
        return None
    if response.raw("schema") is not None:  # llama-server's place for it
        return _read_source(response, "schema", "json_schema", limits)
    if kind == "json_object":
        return Format("json_object", None)
    schema = response.needed_object("json_schema")
    if schema.raw("schema") is None:
        schema.fail("schema", "is missing")
    return _read_source(schema, "schema", "json_schema", limits)


def _read_structured(structured: Fields, limits: Limits) -> Format | None:
    given = [name for name in _STRUCTURED if structured.raw(name) is not None]
    if len(given) != 1:
        structured.fail("", f"must have one of {', '.join(_STRUCTURED)}")
    name = given[0]
    if name == "json_object":
        return Format("json_object", None) if structured.flag(name) else None
    return _read_source(structured, name, _STRUCTURED[name], limits)


def _read_source(fields: Fields, name: str, kind: ConstraintKind, limits: Limits) -> Format:
    """A schema, a list of texts, an expression or a grammar."""
    source: Any
    if kind == "choice":
        source = list(fields.texts(name, limits.schema))
    elif kind == "json_schema":
        source = _schema(fields, name)
    else:
        source = fields.needed_text(name)
    check_size(fields, name, source, limits)
    return Format(kind, source)


def _schema(fields: Fields, name: str) -> Any:
    """An object, true or false, or the JSON text of one of these."""
    value = fields.raw(name)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            fields.fail(name, "is a text that is no JSON", "invalid_value")
    if not isinstance(value, dict | bool):
        fields.fail(name, "must be a JSON schema: an object", "invalid_type")
    return value


def check_size(fields: Fields, name: str, source: Any, limits: Limits) -> None:
    """Refuse a schema, pattern or grammar that is larger than allowed."""
    size = len(source if isinstance(source, str) else json.dumps(source))
    if size > limits.schema:
        fields.fail(
            name,
            f"has {size:,} characters, at most {limits.schema:,} are allowed",
            "schema_too_large",
        )
