"""Formats of strings: those that are known constrain an answer, others are notes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from urdir.model.errors import ConstraintError
from urdir.model.text.constraints import Constraint
from urdir.model.text.matcher import ConstraintCompiler
from urdir.model.text.string_formats import KNOWN, known_formats
from urdir.model.text.tokenizer import Tokenizer

PASSWORD = {"type": "string", "format": "password"}
STRING = {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (PASSWORD, STRING),
        ({"properties": {"a": PASSWORD}}, {"properties": {"a": STRING}}),
        ({"items": PASSWORD}, {"items": STRING}),
        ({"allOf": [PASSWORD, True]}, {"allOf": [STRING, True]}),
        ({"$defs": {"format": PASSWORD}}, {"$defs": {"format": STRING}}),
        ({"type": "integer", "format": "int32"}, {"type": "integer"}),
        *(
            (kept, kept)
            for kept in (
                {"type": "string", "format": "date"},
                {"properties": {"format": {"type": "string"}}},
                {"const": PASSWORD},
                {"enum": [PASSWORD], "default": PASSWORD, "examples": [PASSWORD]},
                True,
            )
        ),
    ],
)
def test_formats_that_are_left_out(schema: Any, expected: Any) -> None:
    assert known_formats(schema) == expected


@pytest.mark.parametrize("name", [*sorted(KNOWN), "password", "path", "binary", "regex", "Date"])
def test_what_a_format_allows(
    tokenizer: Tokenizer, compiler: ConstraintCompiler, name: str
) -> None:
    """Of no known format is this text."""
    matcher = compiler.matcher(Constraint.json_schema({"type": "string", "format": name}))
    is_taken = True
    try:
        for token in tokenizer.encode(json.dumps("!! ??")):
            matcher.accept(token)
    except ConstraintError:
        is_taken = False
    assert is_taken == (name not in KNOWN)
