"""Asynchronous small writes to device memory.

A plain copy from host memory waits for all work queued before. These writes are first copied to
page-locked memory, then queued on a stream, after the queued steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from urdir.driver.context import close_all
from urdir.model.owner import Owner

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.driver.memory import Region
    from urdir.driver.stream import Event, Stream

#: Page-locked bytes of each half, at least. A step of 256 rows and 2,048 prompt rows takes 22 KB.
_HALF_BYTES = 1 << 19


class QueuedWrites(Owner):
    """Writes in the order of ``stream``.

    Page-locked memory has two halves: while one is filled, copies from the other finish; they are
    waited for only when it is needed again. A write larger than a half, which has 512 KB or the
    ``most`` bytes of a write, is an ordinary copy.
    """

    def __init__(self, device: Device, stream: Stream, most: int = 0) -> None:
        self._stream = stream
        self._half_nbytes = max(_HALF_BYTES, _padded(most))
        self._pinned = device.pinned(2 * self._half_nbytes, "queued writes")
        self._bytes = self._pinned.array
        self._events: list[Event] = [device.create_event("queued writes") for _ in range(2)]
        self._half = self._used = 0

    def write(self, to: Region, values: npt.NDArray[Any], offset: int = 0) -> None:
        """Queue a copy of ``values`` to ``offset``; the array may change immediately. Raises
        LifetimeError after `close`."""
        _ = self._pinned.handle  # the array of its bytes is only good while it is open
        if not values.nbytes:
            return
        if values.nbytes > self._half_nbytes:
            to.upload(np.ascontiguousarray(values), offset)
            return
        if self._used + values.nbytes > self._half_nbytes:
            self._turn()
        at = self._half * self._half_nbytes + self._used
        self._bytes[at : at + values.nbytes].view(values.dtype).reshape(values.shape)[...] = values
        to.upload_async(self._pinned, values.nbytes, offset, self._stream, at)
        self._used += _padded(values.nbytes)

    def _turn(self) -> None:
        """Switch to the other half, once all copies from it are done."""
        other = 1 - self._half
        self._stream.record(self._events[self._half])
        self._events[other].synchronize()
        self._half, self._used = other, 0  # not before: a wait may be interrupted

    def close(self) -> None:
        """Free the memory. Idempotent."""
        close_all([*self._events, self._pinned])


def _padded(nbytes: int) -> int:
    """Bytes up to where the next write may begin."""
    return -(-nbytes // 16) * 16
