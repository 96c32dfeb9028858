"""JSON of strangers: its size is known before anything is made of it."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from urdir.model.serve.limits import Limits


class JsonTooLargeError(Exception):
    """The JSON has more in it than a request may; the message says of what, after a subject."""


class JsonReader:
    """Reads the JSON texts of one request, whose bounds hold for all of them together.

    Python takes up to 25 times the size of a text for its values, and keeps all other threads
    waiting while it parses. Both depend on what is in it, which is counted first.
    """

    def __init__(self, limits: Limits) -> None:
        self._depth = limits.depth
        self._parts = self._most_parts = limits.parts
        self._items = self._most_items = limits.items

    def read(self, text: bytes | bytearray) -> Any:
        """The value that ``text`` is in UTF-8.

        Raises JsonTooLargeError, ValueError for what is no JSON.
        """
        self._count(text)
        try:
            value = json.loads(
                text.decode("utf-8-sig"),
                parse_constant=_refuse_constant,
                # by Python, so that other threads run meanwhile: a million take 0.2 s
                parse_float=lambda digits: float(digits),
            )
        except RecursionError:
            self._refuse_depth()
        self._check_depth(value)
        return value

    def _count(self, text: bytes | bytearray) -> None:
        """Take the text's parts and items from those that are left."""
        parts, items = _counts(text, self._parts)
        self._parts -= parts
        self._items -= items
        if self._parts < 0:
            raise JsonTooLargeError(
                f"has more than {self._most_parts:,} lists, objects and strings (names, too)"
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
                if isinstance(item, dict | list)
            ]
            if not level:
                return
        self._refuse_depth()

    def _refuse_depth(self) -> NoReturn:
        raise JsonTooLargeError(f"nests deeper than {self._depth} levels")


def _counts(text: bytes | bytearray, most_parts: int) -> tuple[int, int]:
    """The lists, objects and strings in a JSON text, and its values; strings alone where they are
    more than ``most_parts``."""
    quoted = text.replace(rb"\\", b"").replace(rb"\"", b"")  # each quote begins or ends a string
    strings = quoted.count(b'"') // 2
    if strings > most_parts:
        return strings, 0
    outside = b"".join(quoted.split(b'"')[::2])
    containers = outside.count(b"[") + outside.count(b"{")
    # a container has one item more than commas, unless it is empty
    return strings + containers, outside.count(b",") + containers + 1


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
