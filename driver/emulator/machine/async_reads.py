"""Reads of shared memory by asynchronous operations, and their ends.

A wgmma reads its operands until a warp of its warpgroup has waited for its group, a bulk copy to
global memory until its thread has waited for it: a write there must be ordered after the wait. For
every 16 bytes the last reader of each kind is stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from urdir.driver.emulator.machine.clocks import Clocks

Array = npt.NDArray[Any]

_SHIFT = 4


@dataclass(slots=True)
class AsyncRead:
    """An asynchronous read: kind of reader, line, issuing lane (of a warpgroup the first), group,
    and the warps one of which must wait for it, with their epochs at the wait (None: not yet).
    Numbers are the launch's.
    """

    kind: int
    line: int
    lane: int
    group: int
    warps: Array
    epochs: Array | None = None


class AsyncReads:
    """Reads of all CTAs of a wave, separately for ``kinds`` kinds of readers."""

    def __init__(self, nbytes: int, kinds: int) -> None:
        self._last = np.zeros((kinds, nbytes >> _SHIFT), np.int32)
        self._reads: list[AsyncRead | None] = [None]
        self._pending: list[AsyncRead] = []

    def begin(self, offsets: Array, read: AsyncRead) -> None:
        """Start reading 16 bytes at each offset in the wave's shared memory."""
        self._last[read.kind, offsets >> _SHIFT] = len(self._reads)
        self._reads.append(read)
        self._pending.append(read)

    def wait(self, kind: int, lane: int, before: int, clocks: Clocks) -> None:
        """Complete what this lane issued in groups below ``before``."""
        left = []
        for read in self._pending:
            if (read.kind, read.lane) == (kind, lane) and read.group < before:
                read.epochs = clocks.now[read.warps]
            else:
                left.append(read)
        self._pending = left

    def overwritten(
        self, offsets: Array, lanes: Array, clocks: Clocks
    ) -> tuple[AsyncRead, int, int] | None:
        """Find a possibly pending read under a write of at most 16 bytes per lane: the read, the
        writing lane and the offset; None if there is none."""
        if len(self._reads) == 1:
            return None
        units = offsets >> _SHIFT
        found = self._last[:, units]
        kind, at = np.nonzero(found)
        if not at.size:
            return None
        pairs = np.stack([found[kind, at], lanes[at] >> 5])
        pairs, first = np.unique(pairs, axis=1, return_index=True)
        for (which, warp), i in zip(pairs.T.tolist(), first.tolist(), strict=True):
            read = self._reads[which]
            assert read is not None
            if not _is_over(read, warp, clocks):
                return read, int(lanes[at[i]]), int(offsets[at[i]])
        self._last[:, units] = 0
        return None


def _is_over(read: AsyncRead, warp: int, clocks: Clocks) -> bool:
    """Whether a warp is ordered after the end of a read."""
    if read.epochs is None:
        return False
    known = clocks.known(np.full(read.warps.size, warp), read.warps)
    return bool((known >= read.epochs).any() or (read.warps == warp).any())
