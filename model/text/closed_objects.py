"""Objects of a schema that have the named properties alone, as llama.cpp and OpenAI's strict mode
have them. By JSON Schema others may follow, and some models write others without end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from urdir.model.text.schema_parts import mapped

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
    return schema if _has_joined(schema) else mapped(schema, _close)


def _close(schema: dict[str, Any]) -> dict[str, Any]:
    if isinstance(schema.get("properties"), Mapping) and _TOLD.isdisjoint(schema):
        schema["additionalProperties"] = False
    return schema


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
