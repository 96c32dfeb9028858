"""The schemas within a JSON schema, as far as constraints have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

#: Keywords whose value is a schema, or several in a list; and those whose values are, by name.
_SCHEMAS = (
    *("items", "prefixItems", "additionalItems", "contains", "additionalProperties"),
    *("anyOf", "oneOf", "allOf"),
)
_NAMED = ("properties", "patternProperties", "$defs", "definitions")


def mapped(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """``schema`` (JSON) with what ``change`` makes of each object that is a schema, the inner ones
    first. Values, such as those of "enum" and "default", are none."""
    if isinstance(schema, list):
        return [mapped(each, change) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    made = {word: mapped(of, change) if word in _SCHEMAS else of for word, of in schema.items()}
    for word in _NAMED:
        if isinstance(of := made.get(word), Mapping):
            made[word] = {name: mapped(each, change) for name, each in of.items()}
    return change(made)
