"""Writes that nobody waits for: all of them arrive, in order, however many there are."""

from __future__ import annotations

import numpy as np

from urdir.driver import Device
from urdir.model.memory import queued_writes
from urdir.model.memory.queued_writes import QueuedWrites


def test_writes_arrive_in_order(device: Device) -> None:
    """More than the page-locked memory holds, odd sizes, over each other; sources change at
    once."""
    rng = np.random.default_rng(5)
    size = 3 * queued_writes._HALF_BYTES
    wanted = np.zeros(size, np.uint8)
    with (
        device.create_stream() as stream,
        device.allocate(size, "memory") as memory,
        QueuedWrites(device, stream) as writes,
    ):
        memory.fill(0)
        for nbytes in (1, 7, 4096, 300_001, 300_000, size, *rng.integers(0, 100_000, 60)):
            at = int(rng.integers(0, size - nbytes + 1))
            values = rng.integers(0, 256, int(nbytes), np.uint8)
            wanted[at : at + nbytes] = values
            writes.write(memory, values, at)
            values[:] = 0
        stream.synchronize()
        np.testing.assert_array_equal(memory.download(np.uint8), wanted)
