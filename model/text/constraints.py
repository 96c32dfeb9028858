"""Constraints on answers: JSON, a JSON schema, a regular expression, a choice, a grammar.

A `Constraint` is only text; `matcher` compiles it for a tokeniser. All kinds are Lark grammars in
llguidance's dialect (its docs/syntax.md), in which `%json` embeds a schema.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from urdir.model.errors import ConstraintError
from urdir.model.text.closed_objects import closed
from urdir.model.text.json_spacing import json_options
from urdir.model.text.string_formats import known_formats

MAX_BYTES = 128 * 1024  # of grammar text
_MAX_MULTIPLE = 10_000  # each remainder is a state of an automaton
_MAX_JSON_DEPTH = 100  # llguidance's limit is 128
_UNREADABLE = re.compile(r"[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Constraint:
    """Allowed answers, as a grammar.

    `frame`, if any, is the grammar of the whole answer, in which `@answer` stands for `grammar`: it
    allows reasoning first. `markers` are texts that may be control tokens of a model: the rule
    `marker_0` is the first of them, `until_0` any text up to and including it.
    """

    grammar: str
    frame: str = ""
    markers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        text = self.grammar + self.frame
        if _UNREADABLE.search(text):
            raise ConstraintError("the constraint is not valid Unicode: it has a lone surrogate")
        if (size := len(text.encode())) > MAX_BYTES:
            raise ConstraintError(
                f"the constraint has {size:,} bytes, more than {MAX_BYTES:,}: make it smaller"
            )

    @classmethod
    def json_object(cls, *, whitespace_pattern: str | None = None) -> Constraint:
        """Any JSON object; see `json_schema`."""
        return cls.json_schema({"type": "object"}, whitespace_pattern=whitespace_pattern)

    @classmethod
    def json_schema(
        cls, schema: Mapping[str, Any] | bool, *, whitespace_pattern: str | None = None
    ) -> Constraint:
        """JSON that matches `schema`; compiling refuses keywords that cannot be enforced.

        oneOf is treated as anyOf. Objects have the properties that are named alone, unless
        `additionalProperties` says otherwise (`closed_objects`). White space is at most one blank
        after `:` and `,`, unless ``whitespace_pattern`` or the schema's `x-guidance` is given
        (`json_spacing`). Raises ConstraintError: too large, too deep, not JSON, or an unsupported
        option.
        """
        return cls(f"start: {embedded(schema, whitespace_pattern)}")

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Constraint:
        """One of `texts`; ConstraintError if there are none."""
        if not texts:
            raise ConstraintError("the choice is empty")
        return cls("start: " + " | ".join(map(json.dumps, texts)))

    @classmethod
    def regex(cls, pattern: str) -> Constraint:
        """Text that matches `pattern` as a whole (Rust's syntax; no look-around)."""
        # a slash or a line feed would end the expression in Lark
        escaped = re.sub(r"\\.|/|\n", _escape, pattern, flags=re.DOTALL)
        return cls(f"start: /{escaped}/" if pattern else 'start: ""')

    @classmethod
    def lark(cls, grammar: str) -> Constraint:
        """Text of the rule `start` of a Lark grammar without a %llguidance line."""
        if "%llguidance" in grammar:
            raise ConstraintError("leave %llguidance out of the grammar: options cannot be set")
        return cls("".join(_checked(grammar)))


def embedded(
    schema: Mapping[str, Any] | bool,
    whitespace_pattern: str | None = None,
    *,
    closes: bool = True,
) -> str:
    """`schema` as part of a Lark rule; see `Constraint.json_schema`. Unless it ``closes`` objects
    these may have properties that are not named."""
    if not isinstance(schema, Mapping | bool):
        raise ConstraintError("a schema must be an object, true or false")
    if schema is not False:
        schema = {} if schema is True else schema
        options = json_options(schema.get("x-guidance", {}), whitespace_pattern)
        schema = {**schema, "x-guidance": options}
    try:
        text = json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConstraintError(f"the schema is not JSON: {error}") from None
    if _depth(text) > _MAX_JSON_DEPTH:
        raise ConstraintError(f"the schema nests deeper than {_MAX_JSON_DEPTH}")
    # parse again: `schema` may hold Python types that JSON lacks, such as tuples
    parsed = known_formats(json.loads(text))
    multiples = [Decimal(str(value)) for value in _multiples(parsed) if value]
    lowest = min((value.normalize().as_tuple().exponent for value in multiples), default=0)
    scaled = [abs(int(value.scaleb(-int(lowest)))) for value in multiples]
    if math.lcm(*scaled) > _MAX_MULTIPLE:
        raise ConstraintError(
            f"multipleOf: {', '.join(map(str, multiples))}: numbers with a least common multiple "
            f"over {_MAX_MULTIPLE:,} (in units of the last decimal) are not supported"
        )
    return f"%json {json.dumps(closed(parsed) if closes else parsed)}"


def _checked(grammar: str) -> Iterator[str]:
    """The grammar with its schemas checked and re-serialised, so that no escape hides a key."""
    end = 0
    for found in re.finditer(r"%json\s*", grammar):
        if found.start() < end:
            continue
        try:
            schema, after = json.JSONDecoder().raw_decode(grammar, found.end())
        except (ValueError, RecursionError) as error:
            raise ConstraintError(f"the text after %json is not JSON: {error}") from None
        yield grammar[end : found.start()] + embedded(schema, closes=False)
        end = after
    yield grammar[end:]


def _multiples(schema: Any) -> Iterator[float]:
    """Every multipleOf of a schema."""
    if isinstance(schema, dict):
        value = schema.get("multipleOf")
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield value
        schema = schema.values()
    elif not isinstance(schema, list):
        return
    for part in schema:
        yield from _multiples(part)


def _depth(text: str) -> int:
    """Nesting depth of JSON text."""
    depth = deepest = 0
    for bracket in re.findall(r'"(?:[^"\\]|\\.)*"|([][{}])', text):
        if bracket:
            depth += 1 if bracket in "[{" else -1
            deepest = max(deepest, depth)
    return deepest


def _escape(found: re.Match[str]) -> str:
    """Escape a slash or a line feed, unless already escaped."""
    return {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}.get(found[0], found[0])
