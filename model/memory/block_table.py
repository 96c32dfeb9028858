"""Block table: the pages of each sequence of a paged cache, in device memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from urdir.model.memory.queued_writes import QueuedWrites
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout

if TYPE_CHECKING:
    from urdir.driver.memory import Slice


class BlockTable:
    """A table (sequences, blocks) u32 on the device: the pages of every sequence in order of
    position."""

    def __init__(self, on_device: Slice, layout: KvLayout, writes: QueuedWrites) -> None:
        self._on_device, self._writes = on_device, writes
        self._rows = np.zeros((layout.sequences, layout.blocks), np.uint32)
        writes.write(on_device, self._rows)

    def set(self, sequence: int, pages: Sequence[int], first: int = 0) -> None:
        """Write ``pages`` as those of a sequence from number ``first`` on; others are unchanged."""
        row = self._rows[sequence]
        row[first : first + len(pages)] = pages
        self._writes.write(self._on_device, row, sequence * row.nbytes)
