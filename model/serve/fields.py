"""Typed access to the fields of a request's JSON; each refusal names the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from urdir.model.serve.errors import ApiError


class Fields:
    """The fields of a JSON object. null counts as absent, as in OpenAI's API.

    Every method raises ApiError for a value of the wrong type or out of range.
    """

    def __init__(
        self, values: Mapping[str, Any], path: str = "", names: Mapping[str, str] | None = None
    ) -> None:
        """``path`` is the position of the object in the request: "messages[0].". ``names`` are
        those that this request's protocol has for some fields."""
        self.values = values
        self._path = path
        self._names = names or {}

    def named(self, names: Mapping[str, str]) -> Fields:
        """The same fields; reading "a" reads what the request has at ``names["a"]``."""
        return Fields(self.values, self._path, names)

    def fail(self, name: str, wanted: str, code: str | None = None) -> NoReturn:
        """Refuse a field: "'n' must be ..."."""
        param = self._path + self._names.get(name, name)
        raise ApiError(f"'{param}' {wanted}", param=param, code=code)

    def at(self, path: str) -> Any:
        """The value at "name", or at "name.name" in a nested object; None if absent."""
        if path in self.values:
            return self.values[path]
        name, _, rest = path.partition(".")
        inner = self.values.get(name) if rest else None
        return inner.get(rest) if isinstance(inner, dict) else None

    def raw(self, name: str) -> Any:
        """The unchecked value."""
        if (called := self._names.get(name)) is not None:
            return self.at(called)
        return self.values.get(name)

    def number(self, name: str, low: float, high: float) -> float | None:
        """A number within bounds."""
        value = self.raw(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.fail(name, "must be a number", "invalid_type")
        if not low <= value <= high:
            self.fail(name, f"must be from {low:g} to {high:g}", "invalid_value")
        return float(value)

    def whole(self, name: str, low: int, high: int | None = None) -> int | None:
        """An integer within bounds."""
        value = self.raw(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            self.fail(name, "must be an integer", "invalid_type")
        if value < low or (high is not None and value > high):
            wanted = f"at least {low}" if high is None else f"from {low} to {high}"
            self.fail(name, f"must be {wanted}", "invalid_value")
        return value

    def flag(self, name: str) -> bool:
        """true or false (default)."""
        value = self.raw(name)
        if not isinstance(value, bool | None):
            self.fail(name, "must be true or false", "invalid_type")
        return bool(value)

    def text(self, name: str) -> str | None:
        """A string."""
        value = self.raw(name)
        if not isinstance(value, str | None):
            self.fail(name, "must be a string", "invalid_type")
        return value

    def needed_text(self, name: str) -> str:
        """A required string."""
        value = self.text(name)
        if value is None:
            self.fail(name, "is missing")
        return value

    def choice(self, name: str, choices: Sequence[str]) -> str | None:
        """One of a few strings."""
        value = self.text(name)
        if value is not None and value not in choices:
            self.fail(name, f"must be one of {', '.join(choices)}", "invalid_value")
        return value

    def texts(self, name: str, most: int) -> tuple[str, ...]:
        """A string, or a list of non-empty strings, as a tuple."""
        value = self.raw(name)
        if value is None:
            return ()
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(item, str) and item for item in values):
            self.fail(name, "must be a string or a list of non-empty strings", "invalid_type")
        if len(values) > most:
            self.fail(name, f"has {len(values)} entries, at most {most} are allowed")
        return tuple(values)

    def object(self, name: str) -> Fields | None:
        """An object."""
        value = self.raw(name)
        if not isinstance(value, dict | None):
            self.fail(name, "must be an object", "invalid_type")
        return None if value is None else Fields(value, f"{self._path}{name}.")

    def needed_object(self, name: str) -> Fields:
        """A required object."""
        value = self.object(name)
        if value is None:
            self.fail(name, "is missing")
        return value

    def objects(self, name: str, most: int | None = None) -> list[Fields]:
        """A list of objects."""
        value = self.raw(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            self.fail(name, "must be a list of objects", "invalid_type")
        if most is not None and len(value) > most:
            self.fail(name, f"has {len(value)} entries, at most {most} are allowed")
        return [Fields(item, f"{self._path}{name}[{i}].") for i, item in enumerate(value)]

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """A list of token ids."""
        value = self.raw(name)
        if not is_whole_list(value):
            self.fail(name, "must be a list of token ids", "invalid_type")
        if value and (min(value) < 0 or max(value) >= vocab_size):
            self.fail(name, f"has an id outside the vocabulary of {vocab_size}", "invalid_value")
        return tuple(value)


def is_whole_list(value: Any) -> bool:
    """Whether a value is a list of integers."""
    return isinstance(value, list) and {int}.issuperset(map(type, value))
