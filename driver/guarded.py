"""Device memory in which a wrong write shows: poison inside, guard zones on both sides."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from urdir.driver.compare import MismatchError
from urdir.driver.memory import Region

if TYPE_CHECKING:
    from urdir.driver.device import Device

Array = npt.NDArray[Any]

#: Bytes before and after a guarded array; keeps its alignment.
GUARD_BYTES = 256
GUARD = 0xA5
#: What an array to be written holds before: NaN in every float type, and for integers an odd value.
POISON_FLOAT, POISON_INTEGER = 0xFF, 0xA5


def poison(shape: int | tuple[int, ...], dtype: npt.DTypeLike, *, floats: bool = False) -> Array:
    """An array that no kernel means to write: NaN in every element of a float type.

    ``floats`` poisons an integer type as floats too, for bits of a type that numpy lacks (bf16).
    """
    dtype = np.dtype(dtype)
    byte = POISON_FLOAT if floats or dtype.kind == "f" else POISON_INTEGER
    nbytes = int(np.prod(shape)) * dtype.itemsize
    return np.full(nbytes, byte, np.uint8).view(dtype).reshape(shape)


class GuardedBuffer:
    """An array in device memory of its own, with ``guard`` bytes that nothing may write on each
    side. A context manager; ``region`` is where the array lies, to be passed to a launch.

    With ``guard=0`` the array has its allocation to itself: reads beyond it fault on the emulator.
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
        """A guarded array full of `poison`: elements that a kernel leaves out show."""
        return cls(device, poison(shape, dtype), name)

    def download(self) -> Array:
        """What the array holds, once earlier work is done; the guards are not looked at."""
        return self.region.download(self.dtype, self.shape)

    def first_beside(self) -> int | None:
        """The first byte changed in the guards, counted from the array's start; None if none."""
        nbytes = self.region.nbytes
        content = self._buffer.download(np.uint8)
        outside = np.concatenate([content[: self.guard], content[self.guard + nbytes :]])
        changed = np.flatnonzero(outside != GUARD)
        if not changed.size:
            return None
        at = int(changed[0]) - self.guard
        return at + nbytes if at >= 0 else at

    def check(self) -> Array:
        """What the array holds; raises MismatchError when something wrote beside it."""
        if (byte := self.first_beside()) is not None:
            raise MismatchError(
                f"something wrote beside {self.name} {self.shape}: at byte {byte} of "
                f"{self.region.nbytes}"
            )
        return self.download()

    def close(self) -> None:
        """Free the memory; again is harmless."""
        self._buffer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
