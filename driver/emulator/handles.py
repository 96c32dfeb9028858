"""Opaque handles: unique numbers that stand for the emulator's objects."""

from __future__ import annotations

import itertools
from typing import Any, Generic, TypeVar

from urdir.driver.emulator.calls import Refused, handle

# Like heap addresses of a 64-bit process, and far from those of emulated device memory.
_numbers = itertools.count(0x5A00_0000_0000, 0x40)


T = TypeVar("T")


class Handles(Generic[T]):
    """Live objects of one kind by handle number; numbers are never reused."""

    def __init__(self, what: str, code: str = "CUDA_ERROR_INVALID_HANDLE") -> None:
        self._objects: dict[int, T] = {}
        self._what = what
        self._code = code

    def add(self, item: T) -> int:
        """Register an object; returns its handle."""
        number = next(_numbers)
        self._objects[number] = item
        return number

    def __getitem__(self, value: Any) -> T:
        number = handle(value)
        try:
            return self._objects[number]
        except KeyError:
            state = "null" if not number else "unknown or destroyed"
            raise Refused(self._code, f"{state} {self._what} handle {number:#x}") from None

    def __contains__(self, value: Any) -> bool:
        return handle(value) in self._objects

    def pop(self, value: Any) -> T:
        """Remove an object; its handle becomes invalid."""
        item = self[value]
        del self._objects[handle(value)]
        return item

    def values(self) -> list[T]:
        """All live objects, oldest first."""
        return list(self._objects.values())

    def clear(self) -> None:
        """Invalidate every handle."""
        self._objects.clear()
