"""Guarded device memory that reveals wrong writes: poison inside, guard zones around."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from urdir.driver.context import Closing
from urdir.driver.errors import MismatchError
from urdir.driver.memory import Region

if TYPE_CHECKING:
    from urdir.driver.device import Device

Array = npt.NDArray[Any]

#: Bytes before and after a guarded array; keeps its alignment.
GUARD_BYTES = 256
GUARD = 0xA5
#: Initial contents of an output array: NaN in every float type, and an odd value for integers.
POISON_FLOAT, POISON_INTEGER = 0xFF, 0xA5


def poison(shape: int | tuple[int, ...], dtype: npt.DTypeLike, *, floats: bool = False) -> Array:
    """An array of values that no kernel should write: NaN in every element of a float type.

    ``floats`` poisons an integer type as floats too, for bits of a type that numpy lacks (bf16).
    """
    dtype = np.dtype(dtype)
    byte = POISON_FLOAT if floats or dtype.kind == "f" else POISON_INTEGER
    nbytes = int(np.prod(shape)) * dtype.itemsize
    return np.full(nbytes, byte, np.uint8).view(dtype).reshape(shape)


class GuardedBuffer(Closing):
    """An array in separate device memory, between ``guard`` bytes that must not be written. A
    context manager; ``region`` is the array's memory, for a launch.

    With ``guard=0`` the array is its whole allocation: reads beyond it fault on the emulator.
    Raises OutOfMemoryError, TransferError for an empty array.
    """

    def __init__(
        self, device: Device, array: Array, name: str, *, guard: int = GUARD_BYTES
    ) -> None:
        array = np.ascontiguousarray(array)
        self.name = name
        self.guard = guard
        self.dtype, self.shape = array.dtype, array.shape
        content = np.full(array.nbytes + 2 * guard, GUARD, np.uint8)
        content[guard : guard + array.nbytes] = array.reshape(-1).view(np.uint8)
        self._buffer = device.allocate(content.nbytes, name)
        self._buffer.upload(content)
        self.region: Region = self._buffer.slice(guard, array.nbytes)

    @classmethod
    def poisoned(
        cls, device: Device, shape: int | tuple[int, ...], dtype: npt.DTypeLike, name: str
    ) -> Self:
        """A guarded array full of `poison`, which reveals elements that a kernel does not write."""
        return cls(device, poison(shape, dtype), name)

    def download(self) -> Array:
        """The array's contents, after earlier work; guards are not checked."""
        return self.region.download(self.dtype, self.shape)

    def first_beside(self) -> int | None:
        """The first changed guard byte, relative to the array's start, or None."""
        nbytes = self.region.nbytes
        content = self._buffer.download(np.uint8)
        outside = np.concatenate([content[: self.guard], content[self.guard + nbytes :]])
        changed = np.flatnonzero(outside != GUARD)
        if not changed.size:
            return None
        at = int(changed[0]) - self.guard
        return at + nbytes if at >= 0 else at

    def check(self) -> Array:
        """The array's contents; MismatchError if a guard was overwritten."""
        if (byte := self.first_beside()) is not None:
            raise MismatchError(
                f"something wrote beside {self.name} {self.shape}: at byte {byte} of "
                f"{self.region.nbytes}"
            )
        return self.download()

    def close(self) -> None:
        """Free the memory. Idempotent."""
        self._buffer.close()
