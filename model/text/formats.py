"""Formats of answers that a caller may require: JSON, a schema, an expression, a grammar, a choice.

A `Format` is what a request has; its `constraint` is what `matcher` compiles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from urdir.model.errors import ConstraintError
from urdir.model.text.constraints import Constraint
from urdir.model.text.gbnf import as_lark

FormatKind = Literal["json_object", "json_schema", "regex", "grammar", "choice"]

_CONSTRAINTS: dict[FormatKind, Callable[[Any], Constraint]] = {
    "json_object": lambda _: Constraint.json_object(),
    "json_schema": Constraint.json_schema,
    "regex": Constraint.regex,
    "grammar": lambda grammar: Constraint.lark(as_lark(grammar)),
    "choice": Constraint.choice,
}


@dataclass(frozen=True, slots=True)
class Format:
    """What an answer must be: its kind, and the schema, expression, grammar (GBNF or Lark) or texts
    of that kind."""

    kind: FormatKind
    source: Any = None

    def constraint(self) -> Constraint:
        """The constraint of a whole answer. Raises ConstraintError for a bad source."""
        return _CONSTRAINTS[self.kind](self.source)


def given_format(
    response_format: Mapping[str, Any] | None, grammar: str | None, regex: str | None
) -> Format | None:
    """The one that is given, ``response_format`` as OpenAI's object; None for free text. Raises
    ConstraintError for two of them, and for an object of another form."""
    for name, text in (("grammar", grammar), ("regex", regex)):
        if not isinstance(text, str | None):
            raise ConstraintError(f"{name} is {text!r:.80}: expected a text")
    formats = [
        None if response_format is None else _of_response(response_format),
        None if grammar is None else Format("grammar", grammar),
        None if regex is None else Format("regex", regex),
    ]
    given = [each for each in formats if each is not None]
    if len(given) > 1:
        raise ConstraintError(
            f"two formats of one answer, {given[0].kind} and {given[1].kind}: give one of "
            "response_format, grammar and regex"
        )
    return given[0] if given else None


def _of_response(response: Mapping[str, Any]) -> Format | None:
    match response:
        case {"type": "text"}:
            return None
        case {"type": "json_schema", "json_schema": {"schema": (Mapping() | bool()) as schema}}:
            return Format("json_schema", schema)
        # as llama-server has it
        case {"type": "json_object" | "json_schema", "schema": (Mapping() | bool()) as schema}:
            return Format("json_schema", schema)
        case {"type": "json_object"}:
            return Format("json_object")
    raise ConstraintError(
        f"response_format {response!r:.80} has another form: give {{'type': 'json_object'}} or "
        "{'type': 'json_schema', 'json_schema': {'schema': {...}}}"
    )
