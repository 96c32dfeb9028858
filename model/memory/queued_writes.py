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

#: Page-locked bytes of each half. A step of 256 rows and 2,048 prompt rows takes 22 KB.
_HALF_BYTES = 1 << 19


class QueuedWrites(Owner):
    """Writes in the order of ``stream``.

    Page-locked memory has two halves: while one is filled, copies from the other finish; they are
    waited for only when it is needed again. A write larger than a half is an ordinary copy.
    """

    def __init__(self, device: Device, stream: Stream) -> None:
        self._stream = stream
        self._pinned = device.pinned(2 * _HALF_BYTES, "queued writes")
        self._events: list[Event] = [device.create_event("queued writes") for _ in range(2)]
        self._half = self._used = 0

    def write(self, to: Region, values: npt.NDArray[Any], offset: int = 0) -> None:
        """Queue a copy of ``values`` to ``offset``; the array may change immediately."""
        if not values.nbytes:
            return
        if values.nbytes > _HALF_BYTES:
            to.upload(np.ascontiguousarray(values), offset)
            return
        if self._used + values.nbytes > _HALF_BYTES:
            self._turn()
        at = self._half * _HALF_BYTES + self._used
        self._pinned.view(values.dtype, values.shape, at)[...] = values
        to.upload_async(self._pinned, values.nbytes, offset, self._stream, at)
        self._used += -(-values.nbytes // 16) * 16

    def _turn(self) -> None:
        """Switch to the other half, once all copies from it are done."""
        other = 1 - self._half
        self._stream.record(self._events[self._half])
        self._events[other].synchronize()
        self._half, self._used = other, 0  # not before: a wait may be interrupted

    def close(self) -> None:
        """Free the memory. Idempotent."""
        close_all([*self._events, self._pinned])
