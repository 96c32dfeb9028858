"""The form that a request wants its answer to have."""

from __future__ import annotations

import json
from typing import Any

from urdir.model.serve.fields import Fields
from urdir.model.serve.limits import Limits
from urdir.model.text.constraints import Constraint


def read_format(fields: Fields, limits: Limits) -> Constraint | None:
    """response_format or structured_outputs; None where the answer is free text.

    Raises ApiError for both, for an unknown form and for a source that is too large;
    ConstraintError for one that is malformed, as far as that is seen before it is compiled.
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


def _read_response_format(response: Fields, limits: Limits) -> Constraint | None:
    """OpenAI's form."""
    response.needed_text("type")
    match response.choice("type", ("text", "json_object", "json_schema")):
        case "json_object":
            return Constraint.json_object()
        case "json_schema":
            schema = response.needed_object("json_schema").needed_object("schema")
            check_size(schema, schema.values, limits)
            return Constraint.json_schema(schema.values)
        case _:
            return None


def _read_structured(structured: Fields, limits: Limits) -> Constraint | None:
    """vLLM's form; a grammar is one of llguidance's."""
    kinds = ("json", "json_object", "regex", "grammar", "choice")
    given = [kind for kind in kinds if structured.raw(kind) is not None]
    if len(given) != 1:
        structured.fail("", f"must have one of {', '.join(kinds)}")
    check_size(structured, structured.values, limits)
    match given[0]:
        case "json":
            return Constraint.json_schema(structured.needed_object("json").values)
        case "json_object":
            return Constraint.json_object() if structured.flag("json_object") else None
        case "regex":
            return Constraint.regex(structured.needed_text("regex"))
        case "grammar":
            return Constraint.lark(structured.needed_text("grammar"))
        case _:
            texts = structured.texts("choice", limits.schema)
            return Constraint.lark(f"start: {' | '.join(map(json.dumps, texts))}")


def check_size(fields: Fields, source: Any, limits: Limits) -> None:
    """Refuse ``fields`` for a schema, pattern or grammar that is larger than allowed."""
    size = len(source if isinstance(source, str) else json.dumps(source))
    if size > limits.schema:
        fields.fail(
            "",
            f"has {size:,} characters, at most {limits.schema:,} are allowed",
            "schema_too_large",
        )
