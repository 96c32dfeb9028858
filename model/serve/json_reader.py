"""JSON of clients, with its size bounded before it is parsed."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from typing import Any, NoReturn

from urdir.model.serve.limits import Limits


class JsonTooLargeError(Exception):
    """The JSON exceeds a limit; the message completes a sentence about it."""


class JsonReader:
    """Parses the JSON texts of one request; the limits hold for all of them together.

    Python's values take up to 25 times the size of the text, and parsing blocks all other threads.
    Both depend on the number of values, which is counted first.
    """

    def __init__(self, limits: Limits) -> None:
        self._depth = limits.depth
        self._parts = self._most_parts = limits.parts
        self._items = self._most_items = limits.items

    def read(self, text: bytes | bytearray) -> Any:
        """Parse UTF-8 ``text``.

        Raises JsonTooLargeError, or ValueError for invalid JSON.
        """
        self._count(text)
        try:
            value = _DECODER.decode(text.removeprefix(BOM_UTF8).decode())
        except RecursionError:
            self._refuse_depth()
        self._check_depth(value)
        return value

    def _count(self, text: bytes | bytearray) -> None:
        """Charge the text's parts and values to the request's allowance."""
        parts, items = _counts(text, self._parts)
        self._parts -= parts
        self._items -= items
        if self._parts < 0:
            raise JsonTooLargeError(
                f"has more than {self._most_parts:,} lists, objects and strings (including names)"
            )
        if self._items < 0:
            raise JsonTooLargeError(f"has more than {self._most_items:,} values")

    def _check_depth(self, value: Any) -> None:
        level: list[Any] = [[value]]
        for _ in range(self._depth + 1):
            level = [
                item
                for container in level
                for item in (container.values() if isinstance(container, dict) else container)
                if isinstance(item, _CONTAINERS)
            ]
            if not level:
                return
        self._refuse_depth()

    def _refuse_depth(self) -> NoReturn:
        raise JsonTooLargeError(f"nests deeper than {self._depth} levels")


def _counts(text: bytes | bytearray, most_parts: int) -> tuple[int, int]:
    """Numbers of lists, objects and strings in a JSON text, and of its values; of strings alone if
    they exceed ``most_parts``."""
    # each remaining quote begins or ends a string
    quoted = text.replace(rb"\\", b"").replace(rb"\"", b"")
    strings = quoted.count(b'"') // 2
    if strings > most_parts:
        return strings, 0
    outside = b"".join(quoted.split(b'"')[::2])
    containers = outside.count(b"[") + outside.count(b"{")
    # a non-empty container has one item more than commas
    return strings + containers, outside.count(b",") + containers + 1


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


_CONTAINERS = (dict, list)  # `dict | list` would be made for each value
_DECODER = json.JSONDecoder(
    parse_constant=_refuse_constant,
    # in Python, so that other threads run meanwhile: a million values take 0.2 s
    parse_float=lambda digits: float(digits),
)
