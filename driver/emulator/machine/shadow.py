"""Shadow memory: the last write and last reads of every unit of a memory.

An access is one number: a flag for strong operations (atomic, volatile, relaxed ...), the lane of
the launch, the epoch of its warp and the PTX line. A unit is four bytes, or fewer once a smaller
access is seen.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_LINE_BITS, _EPOCH_BITS, _LANE_BITS = 18, 18, 26
_EPOCH = _LINE_BITS
_LANE = _EPOCH + _EPOCH_BITS
_STRONG = _LANE + _LANE_BITS


def encode(lanes: Array, epochs: Array, line: int, is_strong: bool) -> Array:
    """Accesses as non-zero numbers: epochs begin at 1. The last epoch has no end."""
    epochs = np.minimum(epochs, (1 << _EPOCH_BITS) - 1).astype(np.int64)
    code: Array = (lanes.astype(np.int64) << _LANE) | (epochs << _EPOCH)
    code |= line | int(is_strong) << _STRONG
    return code


def lane_of(code: Array) -> Array:
    """The lanes."""
    lanes: Array = (code >> _LANE) & ((1 << _LANE_BITS) - 1)
    return lanes


def epoch_of(code: Array) -> Array:
    """The epochs of their warps."""
    epochs: Array = (code >> _EPOCH) & ((1 << _EPOCH_BITS) - 1)
    return epochs


def line_of(code: Array) -> Array:
    """The PTX lines."""
    lines: Array = code & ((1 << _LINE_BITS) - 1)
    return lines


def is_strong(code: Array) -> Array:
    """Which were atomics or other strong operations."""
    strong: Array = (code >> _STRONG) != 0
    return strong


class Shadow:
    """Shadow of ``nbytes`` bytes; 0 stands for no access.

    ``reads`` holds the last read, ``others`` the last earlier one by another warp: if several warps
    read alternately, a later write can be compared with two of them.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.shift = 2
        #: Units outside this range have never been accessed.
        self._touched = [1 << 62, 0]
        self.writes, self.reads, self.others = self._fresh()

    def units(self, offset: Array, shift: int) -> tuple[Array, int]:
        """The units of accesses of 1 << shift bytes, (n * k,), and k."""
        if shift < self.shift:
            self._refine(shift)
        first = offset.astype(np.int64) >> self.shift
        each = 1 << (shift - self.shift)
        self._touched[0] = min(self._touched[0], int(first.min()))
        self._touched[1] = max(self._touched[1], int(first.max()) + each)
        if each == 1:
            return first, 1
        return (first[:, None] + np.arange(each)).reshape(-1), each

    def _fresh(self) -> list[Array]:
        """Arrays that cost nothing until they are touched."""
        return [np.zeros(-(-self.nbytes // (1 << self.shift)), np.int64) for _ in range(3)]

    def _refine(self, shift: int) -> None:
        """Make units smaller, in time proportional to the accessed memory."""
        times = 1 << (self.shift - shift)
        low, high = self._touched
        coarse = (self.writes, self.reads, self.others)
        self.shift = shift
        self.writes, self.reads, self.others = fine = self._fresh()
        if low < high:
            for old, new in zip(coarse, fine, strict=True):
                known = np.repeat(old[low:high], times)[: new.size - low * times]
                new[low * times : low * times + known.size] = known
            self._touched = [low * times, min(high * times, fine[0].size)]

    def read(self, index: Array, code: Array) -> None:
        """Record reads."""
        old = self.reads[index]
        moved = (old != 0) & (lane_of(old) >> 5 != lane_of(code) >> 5)
        if moved.any():
            self.others[index[moved]] = old[moved]
        self.reads[index] = code
        lost = self.reads[index]
        beside = lane_of(lost) >> 5 != lane_of(code) >> 5
        if beside.any():
            self.others[index[beside]] = code[beside]

    def write(self, index: Array, code: Array) -> None:
        """Record writes; earlier reads are ordered before them, or were reported."""
        self.writes[index] = code
        self.reads[index] = 0
        self.others[index] = 0
