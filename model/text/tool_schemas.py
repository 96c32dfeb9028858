"""What the JSON schemas of tools say of their parameters. Nothing in them has been checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]

Tools = Mapping[str, Schema]
"""The JSON schema of the parameters of each function, by its name."""

_DEFINITIONS = ("$defs", "definitions")
_MOST_REFERENCES = 16  # from one to the next
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object"}


def properties(schema: Schema) -> dict[str, Schema]:
    """The schemas of an object's properties, each with the definitions that it may refer to."""
    listed = schema.get("properties")
    if not isinstance(listed, Mapping):
        return {}
    shared = {name: schema[name] for name in _DEFINITIONS if name in schema}
    return {
        key: {**(value if isinstance(value, Mapping) else {}), **shared}
        for key, value in listed.items()
    }


def required(schema: Schema) -> frozenset[str]:
    """The properties that an object needs."""
    wanted = schema.get("required")
    wanted = wanted if isinstance(wanted, list) else []
    return frozenset(key for key in wanted if isinstance(key, str))


def types_of(schema: Schema) -> set[str]:
    """The JSON types that a schema names; empty: any."""
    return _Types(schema).of(schema)


def options_of(schema: Schema) -> list[Any] | None:
    """The values that a schema permits; None where it does not list them."""
    schema = _resolved(schema, schema)
    if "const" in schema:
        return [schema["const"]]
    options = schema.get("enum")
    return options if isinstance(options, list) else None


def type_of(value: Any) -> str:
    """The JSON type of a value."""
    return "null" if value is None else _TYPES.get(type(value), "array")


class _Types:
    """The types of schemas within ``root``."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._known: dict[str, set[str]] = {}  # by reference; empty while one is followed

    def of(self, schema: Any) -> set[str]:
        """See `types_of`."""
        if not isinstance(schema, Mapping):
            return set()
        reference = schema.get("$ref")
        if isinstance(reference, str):
            if reference not in self._known:
                self._known[reference] = set()
                self._known[reference] = self.of(_referred(reference, self._root))
            return self._known[reference]
        if (options := options_of(schema)) is not None:
            return {type_of(option) for option in options}
        wanted = schema.get("type")
        wanted = [wanted] if isinstance(wanted, str) else wanted
        if isinstance(wanted, list):
            return {kind for kind in wanted if isinstance(kind, str)}
        for name in ("anyOf", "oneOf"):
            if isinstance(choices := schema.get(name), list):
                found = [self.of(choice) for choice in choices]
                return set().union(*found) if all(found) else set()
        parts = schema.get("allOf")
        found = [self.of(part) for part in parts] if isinstance(parts, list) else []
        found = [types for types in found if types]
        return set.intersection(*found) if found else set()


def _resolved(schema: Any, root: Schema) -> Schema:
    """A schema, or the one that it refers to; without contents if there is none."""
    for _ in range(_MOST_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str):
            return schema if isinstance(schema, Mapping) else {}
        schema = _referred(reference, root)
    return {}


def _referred(reference: str, root: Schema) -> Any:
    """What a reference within ``root`` names (RFC 6901)."""
    found: Any = root
    if not reference.startswith("#/"):
        return None
    for part in reference[2:].split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, Mapping) else None
    return found
