"""Objects of a schema that have the named properties alone, as llama.cpp and OpenAI's strict mode
have them. By JSON Schema others may follow, and some models write others without end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Keywords whose value is a schema, or several in a list; and those whose values are, by name.
_SCHEMAS = (
    *("items", "prefixItems", "additionalItems", "contains", "additionalProperties"),
    *("anyOf", "oneOf"),
)
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
#: What says whether further properties may come.
_TOLD = frozenset(("additionalProperties", "patternProperties"))
#: Schemas of one object that are joined: each has to allow what the others name.
_JOINED = frozenset(("allOf", "if", "dependentSchemas", "unevaluatedProperties", "$dynamicRef"))
_JOINED_WITH_NAMES = frozenset(("anyOf", "oneOf", "$ref"))


def closed(schema: Any) -> Any:
    """``schema`` (JSON) with ``additionalProperties`` false where an object names properties and
    nothing says whether others may come. Where schemas are joined anywhere (``allOf``, ``if``,
    ``anyOf`` beside ``properties``) it stays as it is."""
    return schema if _has_joined(schema) else _closed(schema)


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    made = {word: _closed(of) if word in _SCHEMAS else of for word, of in schema.items()}
    for word in _NAMED:
        if isinstance(of := made.get(word), Mapping):
            made[word] = {name: _closed(each) for name, each in of.items()}
    if isinstance(made.get("properties"), Mapping) and _TOLD.isdisjoint(made):
        made["additionalProperties"] = False
    return made


def _has_joined(schema: Any) -> bool:
    """Whether schemas are joined anywhere; properties that are named as keywords count, too."""
    if isinstance(schema, list):
        return any(map(_has_joined, schema))
    if not isinstance(schema, Mapping):
        return False
    words = schema.keys()
    is_joined = words & _JOINED or ("properties" in words and words & _JOINED_WITH_NAMES)
    return bool(is_joined) or any(map(_has_joined, schema.values()))
