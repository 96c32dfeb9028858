"""Groups of lanes at one pc."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Extent = tuple[int, int, int]

WARP = 32


@dataclass(frozen=True, slots=True)
class Lanes:
    """A set of lanes: the range start..stop of whole warps, or ``index`` (sorted numbers)."""

    start: int
    stop: int
    index: Array | None = None

    @staticmethod
    def of(index: Array) -> Lanes:
        """The lanes of a sorted index array; a range where they are whole consecutive warps."""
        first, last = int(index[0]), int(index[-1]) + 1
        if last - first == index.size and first % WARP == 0 and last % WARP == 0:
            return Lanes(first, last)
        return Lanes(first, last, index)

    @property
    def count(self) -> int:
        """Number of lanes."""
        return self.stop - self.start if self.index is None else int(self.index.size)

    @property
    def first(self) -> int:
        """The lowest lane number."""
        return self.start

    def numbers(self) -> Array:
        """Sorted lane numbers."""
        return np.arange(self.start, self.stop) if self.index is None else self.index

    def pick(self, mask: Array) -> Lanes:
        """The lanes where ``mask`` (count,) holds; at least one."""
        if self.index is None:
            index = mask.nonzero()[0]
            if self.start:
                index += self.start
            return Lanes.of(index)
        return Lanes.of(self.index[mask])

    def merge(self, other: Lanes) -> Lanes:
        """The union of disjoint sets."""
        if self.index is None and other.index is None:
            if self.stop == other.start:
                return Lanes(self.start, other.stop)
            if other.stop == self.start:
                return Lanes(other.start, self.stop)
        first, stop = min(self.start, other.start), max(self.stop, other.stop)
        member = np.zeros(stop - first, np.bool_)
        for lanes in (self, other):
            if lanes.index is None:
                member[lanes.start - first : lanes.stop - first] = True
            else:
                member[lanes.index - first] = True
        return Lanes.of(member.nonzero()[0] + first)


def cta_index(number: Any, grid: Extent, cluster: Extent) -> tuple[Any, Any, Any]:
    """The grid position of a CTA: they are numbered cluster by cluster, x fastest in both."""
    x, y, z = cluster
    which, rank = number // (x * y * z), number % (x * y * z)
    across, down = grid[0] // x, grid[1] // y
    return (
        which % across * x + rank % x,
        which // across % down * y + rank // x % y,
        which // (across * down) * z + rank // (x * y),
    )


def thread_name(cta: int, tid: int, block: Extent, grid: Extent, cluster: Extent) -> str:
    """A thread and its CTA for messages, from their numbers."""
    x, y, _ = block
    return (
        f"thread ({tid % x}, {tid // x % y}, {tid // (x * y)}) "
        f"of CTA {cta_index(cta, grid, cluster)}"
    )
