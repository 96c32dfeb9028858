"""Storage for register files, shared by all programs.

Only one launch of a driver runs at a time, so the register files of all programs may lie in one
place: a few megabytes that stay in the CPU caches, instead of as many per kernel. A suspended
launch keeps its arena, and the next one, or one of another driver, takes another.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

#: Bytes of address space of an arena; memory is committed when touched.
ARENA_BYTES = 256 << 20
_ALIGNMENT = 64


class Arena:
    """A block of memory and the launch that uses it."""

    def __init__(self, nbytes: int) -> None:
        self.data = np.zeros(nbytes, np.uint8)
        self._owner: weakref.ref[object] | None = None

    @property
    def is_free(self) -> bool:
        """Whether no live launch uses it."""
        return self._owner is None or self._owner() is None

    def take(self, owner: object) -> None:
        """Reserve for a launch."""
        self._owner = weakref.ref(owner)

    def release(self) -> None:
        """The launch has ended."""
        self._owner = None


class Carver:
    """Hands out consecutive arrays of an arena."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._at = 0

    def array(self, shape: tuple[int, ...], element: str | type[Any]) -> Array:
        """An uninitialised array, with the contents left by the last launch."""
        dtype = np.dtype(element)
        nbytes = dtype.itemsize * math.prod(shape)
        start = self._at
        self._at += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return self.arena.data[start : start + nbytes].view(dtype).reshape(shape)


_arenas: list[Arena] = []


def free_arena(nbytes: int) -> Arena:
    """An arena of at least ``nbytes`` that no launch uses."""
    for arena in _arenas:
        if arena.data.size >= nbytes and arena.is_free:
            return arena
    arena = Arena(max(nbytes, ARENA_BYTES))
    _arenas.append(arena)
    return arena
