"""Writes that nobody waits for: all of them arrive, in order, however many there are."""

from __future__ import annotations

import numpy as np
import pytest

from urdir.driver import Device
from urdir.driver.errors import LifetimeError
from urdir.model.memory import queued_writes
from urdir.model.memory.queued_writes import QueuedWrites

SIZE = 3 * queued_writes._HALF_BYTES


@pytest.mark.parametrize("most", [0, SIZE - 7])
def test_writes_arrive_in_order(device: Device, most: int) -> None:
    """More than the page-locked memory holds, odd sizes, over each other; sources change at
    once. With and without a half for the largest write but one."""
    rng = np.random.default_rng(5)
    size = SIZE
    wanted = np.zeros(size, np.uint8)
    with (
        device.create_stream() as stream,
        device.allocate(size, "memory") as memory,
        QueuedWrites(device, stream, most) as writes,
    ):
        memory.fill(0)
        for nbytes in (1, 7, 4096, 300_001, 300_000, size - 7, size, *rng.integers(0, 100_000, 60)):
            at = int(rng.integers(0, size - nbytes + 1))
            values = rng.integers(0, 256, int(nbytes), np.uint8)
            wanted[at : at + nbytes] = values
            writes.write(memory, values, at)
            values[:] = 0
        stream.synchronize()
        np.testing.assert_array_equal(memory.download(np.uint8), wanted)


def test_nothing_is_written_after_the_end(device: Device) -> None:
    """The page-locked memory belongs to others then."""
    with device.create_stream() as stream, device.allocate(64, "memory") as memory:
        writes = QueuedWrites(device, stream)
        writes.close()
        with pytest.raises(LifetimeError, match="'queued writes' was used after it was closed"):
            writes.write(memory, np.zeros(8, np.uint8))
