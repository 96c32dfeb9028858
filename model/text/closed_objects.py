"""Objects of a schema that have the named properties alone, as llama.cpp and OpenAI's strict mode
have them. By JSON Schema others may follow, and some models write others without end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Keywords whose value is a schema, or several in a list; and those whose values are, by name.
_SCHEMAS = (
    *("items", "prefixItems", "additionalItems", "contains", "additionalProperties"),
    *("anyOf", "oneOf", "allOf"),
)
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
#: What says whether further properties may come.
_TOLD = frozenset(("additionalProperties", "patternProperties"))
#: Schemas of one object that are joined: each has to allow what the others name.
_JOINED = frozenset(("if", "dependentSchemas", "unevaluatedProperties", "$dynamicRef"))
_JOINED_WITH_NAMES = frozenset(("anyOf", "oneOf", "$ref"))
#: What joins nothing to an ``allOf`` of one schema, as pydantic 1 describes a reference.
_BESIDE_ONE = frozenset(
    (
        *("allOf", "type", "title", "description", "default", "examples", "deprecated"),
        *("readOnly", "writeOnly", "$schema", "$comment", "$defs", "definitions"),
    )
)


def closed(schema: Any) -> Any:
    """``schema`` (JSON) with ``additionalProperties`` false where an object names properties and
    nothing says whether others may come. Where schemas are joined anywhere (``allOf`` of several,
    ``if``, ``anyOf`` beside ``properties``) it stays as it is."""
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
    is_joined = bool(words & _JOINED or ("properties" in words and words & _JOINED_WITH_NAMES))
    if "allOf" in words and not is_joined:
        of = schema["allOf"]
        is_joined = not (isinstance(of, list) and len(of) == 1 and words <= _BESIDE_ONE)
    return is_joined or any(map(_has_joined, schema.values()))
