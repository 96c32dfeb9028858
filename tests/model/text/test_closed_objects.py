"""Objects of schemas, which have the named properties alone."""

from __future__ import annotations

import json
from typing import Any

import pytest

from urdir.model.errors import ConstraintError
from urdir.model.text.closed_objects import closed
from urdir.model.text.constraints import Constraint
from urdir.model.text.matcher import ConstraintCompiler
from urdir.model.text.tokenizer import Tokenizer

NAMES = {"properties": {"a": {"type": "integer"}}}
CLOSED = NAMES | {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (NAMES, CLOSED),
        ({"type": "object"}, {"type": "object"}),
        ({"items": NAMES}, {"items": CLOSED}),
        ({"anyOf": [NAMES, True]}, {"anyOf": [CLOSED, True]}),
        (
            {"$ref": "#/$defs/x", "$defs": {"x": NAMES}},
            {"$ref": "#/$defs/x", "$defs": {"x": CLOSED}},
        ),
        (
            {"properties": {"properties": NAMES}},
            {"properties": {"properties": CLOSED}, "additionalProperties": False},
        ),
        ({"const": NAMES}, {"const": NAMES}),
        (  # a reference with a default, as pydantic has written it
            {"properties": {"x": {"allOf": [NAMES], "default": {}}}},
            {
                "properties": {"x": {"allOf": [CLOSED], "default": {}}},
                "additionalProperties": False,
            },
        ),
        ({"enum": [NAMES]}, {"enum": [NAMES]}),
    ],
)
def test_objects_that_are_closed(schema: Any, expected: Any) -> None:
    assert closed(schema) == expected


@pytest.mark.parametrize(
    "schema",
    [
        NAMES | {"additionalProperties": True},
        NAMES | {"patternProperties": {"^x": True}},
        NAMES | {"anyOf": [{"properties": {"b": True}}, True]},
        NAMES | {"$ref": "#/$defs/x", "$defs": {"x": {"properties": {"b": True}}}},
        {"allOf": [NAMES, {"properties": {"b": True}}]},
        {"allOf": [NAMES], "properties": {"b": True}},
        {"allOf": [NAMES], "anyOf": [{"properties": {"b": True}}, True]},
        {"allOf": [NAMES], "$ref": "#/$defs/x", "$defs": {"x": {"properties": {"b": True}}}},
        {"items": {"if": NAMES, "then": {"properties": {"b": True}}}},
        True,
    ],
)
def test_objects_that_stay_open(schema: Any) -> None:
    assert closed(schema) == schema


@pytest.mark.parametrize(
    ("more", "is_taken"), [({}, False), ({"additionalProperties": True}, True)]
)
def test_other_properties(tokenizer: Tokenizer, more: dict[str, Any], is_taken: bool) -> None:
    with ConstraintCompiler(tokenizer) as compiler:
        matcher = compiler.matcher(Constraint.json_schema({"type": "object", **NAMES, **more}))
        tokens = tokenizer.encode(json.dumps({"a": 1, "b": 2}))
        try:
            for token in tokens:
                matcher.accept(token)
        except ConstraintError:
            assert not is_taken
        else:
            assert is_taken
