"""Fields of config.json: each is read once, known not to matter, or refused by name."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from urdir.model.errors import ConfigError, UnsupportedError

_T = TypeVar("_T")
_D = TypeVar("_D")
#: Objects that stay as they are; the fields of others get the object's name before theirs.
_WHOLE = frozenset(
    {"rope_parameters", "rope_scaling", "quantization_config", "compression_config", "id2label"}
    | {"label2id", "pruned_heads", "task_specific_params", "auto_map", "vision_config"}
    | {"audio_config", "text_config", "eagle_config", "sub_configs", "per_layer_config"}
    | {"audio_processor", "embd_layer", "img_processor", "vision_lora", "speech_lora"}
    | {"perceiver_config", "transformers.js_config", "vq_config", "vocabulary_map"}
)
#: Types of values, for messages.
_NAMES: Mapping[type, str] = {
    int: "an integer", float: "a number", bool: "true or false", str: "a text", list: "a list",
    dict: "an object",
}  # fmt: skip


class Fields:
    """The fields of an object by name, "OBJECT.NAME" for those of an object in it. Null counts as
    absent. ``ignored`` are those that were found not to matter."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self.path = path
        self.ignored: list[str] = []
        self._values: dict[str, Any] = {}
        for name, value in values.items():
            if isinstance(value, dict) and name not in _WHOLE:
                self._values |= {f"{name}.{inner}": found for inner, found in value.items()}
            else:
                self._values[name] = value
        self._values = {name: found for name, found in self._values.items() if found is not None}
        self._rest = dict.fromkeys(self._values)

    def has(self, name: str) -> bool:
        """Whether the field is given."""
        return name in self._values

    def is_untaken(self, name: str) -> bool:
        """Whether the field is given and was not taken yet."""
        return name in self._rest

    def is_text(self, name: str) -> bool:
        """Whether the field is given as a text."""
        return isinstance(self._values.get(name), str)

    def peek(self, name: str) -> object:
        """The value of a field, which stays to be taken."""
        return self._values.get(name)

    def drop(self, name: str) -> None:
        """Remove a field, which counts as absent from now on."""
        self._values.pop(name, None)
        self._rest.pop(name, None)

    def put(self, name: str, value: object) -> None:
        """Give a field another value, which is yet to be taken."""
        self._values[name] = value
        self._rest[name] = None

    def take(self, name: str, kind: type[_T]) -> _T | None:
        """The value of a field, or None; ConfigError for another type."""
        self._rest.pop(name, None)
        value = self._values.get(name)
        if kind is int and _is_integral(value):
            value = int(value)
        if type(value) is int and abs(value) >= 1 << 63:
            raise self.wrong(name, "an absurd number")
        if kind is float and type(value) is int:
            value = float(value)
        if value is not None and (
            not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)
        ):
            is_known = type(value) in _NAMES and kind in _NAMES
            what = f", {_NAMES[type(value)]}: expected {_NAMES[kind]}" if is_known else ""
            raise self.wrong(name, f"{shown(value)}{what}")
        if isinstance(value, float) and not math.isfinite(value):
            raise self.wrong(name, value)
        return value

    def given(self, name: str, kind: type[_T], default: _D) -> _T | _D:
        """The value of a field, or ``default``."""
        value = self.take(name, kind)
        return default if value is None else value

    def take_number(self, name: str) -> int | float | None:
        """The value of a numeric field, an integer where it is whole. Of a list, whose elements
        must be equal, the first element."""
        value = self._values.get(name)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            self._values[name] = value = value[0]
        return self.take(name, int if type(value) is int or _is_integral(value) else float)

    def require(self, name: str, kind: type[_T]) -> _T:
        """The value of a required field."""
        value = self.take(name, kind)
        if value is None:
            raise ConfigError(f"{self.path}: '{name}' is missing")
        return value

    def size(self, name: str, default: int | None = None) -> int:
        """A positive integer below 2^31."""
        value = self.require(name, int) if default is None else self.given(name, int, default)
        if not 0 < value < 1 << 31:
            raise self.wrong(name, value)
        return value

    def items(self, name: str, kind: type[_T]) -> list[_T] | None:
        """The elements of a list, all of one kind; None if absent."""
        found = self.take(name, list)
        if found is None:
            return None
        if kind is float:
            found = [float(item) if type(item) is int and abs(item) < 1 << 63 else item
                     for item in found]  # fmt: skip
        for item in found:
            if type(item) is not kind or (isinstance(item, float) and not math.isfinite(item)):
                raise self.wrong(name, found)
        return found

    def take_pattern(self, layers: int) -> list[bool] | None:
        """Which layers have a sliding window, by a period n (every nth attends to everything) or
        letters (L: local, G: global)."""
        letters = self._values.get("sliding_window_pattern")
        if isinstance(letters, str):
            self._rest.pop("sliding_window_pattern", None)
            if not letters or set(letters) - set("LG"):
                raise self.wrong("sliding_window_pattern", letters)
            return [letters[layer % len(letters)] == "L" for layer in range(layers)]
        periods = [
            self.take(name, int) for name in ("sliding_window_pattern", "_sliding_window_pattern")
        ]
        period = periods[0] or periods[1]
        if period is None:
            return None
        if period <= 0:
            raise self.wrong("sliding_window_pattern", period)
        return [(layer + 1) % period != 0 for layer in range(layers)]

    def wrong(self, name: str, value: object) -> ConfigError:
        """The error for an invalid value."""
        return ConfigError(f"{self.path}: '{name}' is {shown(value)}")

    def refused(self, name: str, why: str) -> UnsupportedError:
        """The error for a value without support."""
        return UnsupportedError(f"{self.path}: '{name}' is {shown(self._values.get(name))}; {why}")

    def fix(self, name: str, values: tuple[Any, ...]) -> None:
        """Raise UnsupportedError unless a field has one of ``values``, or is absent."""
        self._rest.pop(name, None)
        value = self._values.get(name)
        kinds = (int, float) if type(value) in (int, float) else (type(value),)
        if value is not None and not any(type(v) in kinds and v == value for v in values):
            wanted = " or ".join(repr(v) for v in values)
            raise self.refused(name, f"{wanted} is supported")

    def leave(self, names: Collection[str]) -> None:
        """Count the named fields as read elsewhere, also within objects."""
        for name in [name for name in self._rest if name.rpartition(".")[2] in names]:
            del self._rest[name]

    def ignore(self, names: Iterable[str], prefixes: tuple[str, ...] = ()) -> None:
        """Count fields as not mattering: the named ones, and those that begin with a prefix, also
        within objects."""
        known = frozenset(names)
        for name in tuple(self._rest):
            own = name.rpartition(".")[2]
            if name in known or own in known or own.startswith(prefixes):
                del self._rest[name]
                self.ignored.append(name)

    def ignore_outside(self, names: Collection[str]) -> None:
        """Count the named fields as not mattering, but not those of objects within."""
        for name in [name for name in self._rest if name in names]:
            del self._rest[name]
            self.ignored.append(name)

    def finish(self) -> None:
        """Raise UnsupportedError if a field was never taken."""
        for name in self._rest:
            value = shown(self._values[name])
            raise UnsupportedError(
                f"{self.path}: unknown field '{shown(name)}' ({value}): remove it if it does not "
                "change results"
            )


def _is_integral(value: object) -> TypeGuard[float]:
    """Whether an integer was written as a float."""
    return type(value) is float and value.is_integer()


def shown(value: object) -> str:
    """A value for a message, printable."""
    text = str(value)[:60]
    return text if text.isprintable() else ascii(text)
