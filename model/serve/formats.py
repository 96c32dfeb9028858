"""Requested answer formats: JSON, schemas, patterns, grammars."""

from __future__ import annotations

import json
from typing import Any

from urdir.model.serve.fields import Fields
from urdir.model.serve.interface import Json
from urdir.model.serve.limits import Limits
from urdir.model.text.formats import Format, FormatKind

#: Fields of vLLM's "structured_outputs" -> the kind of constraint.
_STRUCTURED: dict[str, FormatKind] = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "grammar": "grammar",
    "choice": "choice",
}
#: Fields of a request: vLLM's old ones, llama-server's.
_ALONE: dict[str, FormatKind] = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_grammar": "grammar",
    "guided_choice": "choice",
    "json_schema": "json_schema",
    "grammar": "grammar",
}
#: Options of a schema for JSON without white space.
_COMPACT: Json = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
_FORMAT_FIELDS = ("response_format", "structured_outputs", *_ALONE)


def read_format(fields: Fields, limits: Limits) -> Format | None:
    """Read the format from one of `_FORMAT_FIELDS`; None for free text.

    Raises ApiError for two of them, for an unknown format and for a source that is too large.
    """
    given = [name for name in _FORMAT_FIELDS if fields.raw(name) not in (None, "")]
    if len(given) > 1:
        fields.fail(given[1], f"cannot be combined with '{given[0]}'")
    pattern = fields.text("guided_whitespace_pattern")
    if not given:
        return None
    name = given[0]
    if name in _ALONE:
        form: Format | None = read_source(fields, name, _ALONE[name], limits)
    elif name == "response_format":
        form = read_response_format(fields.needed_object(name), limits)
    else:
        form = _read_structured(fields.needed_object(name), limits)
    return _spaced(form, fields, "guided_whitespace_pattern", _pattern(pattern))


def refuse_beside_call(fields: Fields) -> None:
    """Refuse a form of the whole answer where a call is required. OpenAI's and Anthropic's forms
    are those of its text, which such an answer does not have."""
    for name in _FORMAT_FIELDS:
        if name != "response_format" and fields.raw(name) not in (None, ""):
            fields.fail(name, "cannot be combined with a 'tool_choice' that requires a call")


def read_response_format(response: Fields, limits: Limits) -> Format | None:
    """Read OpenAI's object with a "type"; None for free text. Raises ApiError."""
    response.needed_text("type")
    kind = response.choice("type", ("text", "json_object", "json_schema"))
    if kind == "text":
        return None
    if response.raw("schema") is not None:  # where llama-server has it
        return read_source(response, "schema", "json_schema", limits)
    if kind == "json_object":
        return Format("json_object")
    schema = response.needed_object("json_schema")
    if schema.raw("schema") is None:
        schema.fail("schema", "is missing")
    return read_source(schema, "schema", "json_schema", limits)


def _read_structured(structured: Fields, limits: Limits) -> Format | None:
    given = [name for name in _STRUCTURED if structured.raw(name) is not None]
    if len(given) != 1:
        structured.fail("", f"must have one of {', '.join(_STRUCTURED)}")
    name = given[0]
    form: Format | None
    if name == "json_object":
        form = Format("json_object") if structured.flag(name) else None
    else:
        form = read_source(structured, name, _STRUCTURED[name], limits)
    pattern = _pattern(structured.text("whitespace_pattern"))
    form = _spaced(form, structured, "whitespace_pattern", pattern)
    compact = _COMPACT if structured.flag("disable_any_whitespace") else {}
    return _spaced(form, structured, "disable_any_whitespace", compact)


def _pattern(pattern: str | None) -> Json:
    return {} if pattern is None else {"whitespace_pattern": pattern}


def _spaced(form: Format | None, fields: Fields, name: str, options: Json) -> Format | None:
    """Add white space options of the field ``name`` to a JSON format: ``options`` of the schema for
    llguidance.

    Raises ApiError for a format other than JSON, and if another field already sets white space.
    """
    if form is None or not options:
        return form
    schema = {"type": "object"} if form.kind == "json_object" else form.source
    if form.kind not in ("json_object", "json_schema"):
        fields.fail(name, "requires a JSON format")
    schema = {} if schema is True else schema
    if schema is False or schema.get("x-guidance"):
        fields.fail(name, "cannot be combined with another white space option")
    return Format("json_schema", {**schema, "x-guidance": options})


def read_source(fields: Fields, name: str, kind: FormatKind, limits: Limits) -> Format:
    """Read a schema, a list of texts, an expression or a grammar. Raises ApiError."""
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
    """Read an object, true or false, or the JSON text of one of these."""
    value = fields.raw(name)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            fields.fail(name, "is not valid JSON", "invalid_value")
    if not isinstance(value, dict | bool):
        fields.fail(name, "must be a JSON schema: an object", "invalid_type")
    return value


def check_size(fields: Fields, name: str, source: Any, limits: Limits) -> None:
    """Refuse a schema, pattern or grammar above the size limit."""
    size = len(source if isinstance(source, str) else json.dumps(source))
    if size > limits.schema:
        fields.fail(
            name,
            f"has {size:,} characters, at most {limits.schema:,} are allowed",
            "schema_too_large",
        )
