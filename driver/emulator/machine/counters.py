"""Counters of a kernel's accesses per PTX line, as a hardware profiler would report them.

The models are those of NVIDIA's profilers: a global access of a warp is one request, made of the
32-byte sectors that its lanes touch; a shared access takes a wavefront for each distinct word in
the same one of the 32 four-byte banks, 8-byte accesses per half warp and 16-byte ones per quarter
warp. A bulk copy is a request of one lane on either side. Reads of wgmma are not counted. Caches
and time are not modelled. Two runs on equal inputs count the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from urdir.driver.emulator.machine.flow import Block
from urdir.driver.emulator.machine.groups import WARP
from urdir.driver.emulator.machine.watch import Access, Array, Watch, WatchedLaunch

SECTOR_BYTES = 32
BANKS = 32
BANK_BYTES = 4


@dataclass(slots=True)
class AccessCount:
    """A line's accesses of one kind: "global load", "shared store", "global copy" ...

    ``parts`` are sectors (global) or wavefronts (shared), ``fewest`` the minimum for the same lanes
    and bytes.
    """

    line: int
    kind: str
    requests: int = 0
    lanes: int = 0
    parts: int = 0
    fewest: int = 0


@dataclass(slots=True)
class BlockCount:
    """Straight-line code from ``line`` to ``last_line``: how often a warp ran it, and its lanes."""

    line: int
    last_line: int
    instructions: int
    warps: int = 0
    lanes: int = 0


class Counters(Watch):
    """Counts of one launch, or of several launches of one program in sequence."""

    def __init__(self) -> None:
        self.accesses: dict[tuple[int, str], AccessCount] = {}
        self.blocks: dict[int, BlockCount] = {}
        #: Line of a barrier -> number of arriving warps.
        self.barriers: dict[int, int] = defaultdict(int)
        self.texts: dict[int, str] = {}

    def begin(self, launch: WatchedLaunch) -> None:
        """A launch begins."""
        super().begin(launch)
        self.texts = dict(self.program.instructions)

    def touch(self, access: Access) -> None:
        """Count an access."""
        kind = f"{'shared' if access.is_shared else 'global'} {access.action}"
        count = self.accesses.setdefault((access.line, kind), AccessCount(access.line, kind))
        warps, warp = np.unique(access.lanes // WARP, return_inverse=True)
        count.requests += warps.size
        count.lanes += access.lanes.size
        measure = _wavefronts if access.is_shared else _sectors
        for some, of_warp in _by_row(access, warp):
            parts, fewest = measure(some, of_warp)
            count.parts += parts
            count.fewest += fewest

    def pieces(
        self, line: int, action: str, address: Array, lane: int, space: str = "memory"
    ) -> None:
        """Count one side of a bulk copy: consecutive bytes, one request of one lane."""
        is_global = space == "memory"
        unit = SECTOR_BYTES if is_global else BANKS * BANK_BYTES
        kind = f"{'global' if is_global else 'shared'} {action}"
        count = self.accesses.setdefault((line, kind), AccessCount(line, kind))
        first, end = int(address[0]), int(address[-1]) + 16
        count.requests += 1
        count.lanes += 1
        count.parts += -(-end // unit) - first // unit
        count.fewest += -(-(end - first) // unit)

    def block(self, pc: int, last: int, lanes: Array) -> None:
        """Count a run of straight-line code."""
        warps = np.unique(lanes // WARP).size
        for at in range(pc, last + 1):
            count = self.blocks.get(at)
            if count is None:
                block = self.program.blocks[at]
                count = BlockCount(block.first_line, block.instruction.line, block.cost)
                self.blocks[at] = count
            count.warps += warps
            count.lanes += lanes.size

    def barrier(self, block: Block, lanes: Array) -> None:
        """Count whole CTAs at a barrier."""
        self.barriers[block.instruction.line] += lanes.size // WARP

    def arrive(self, block: Block, number: int, lanes: Array) -> None:
        """Count some threads at a barrier."""
        self.barriers[block.instruction.line] += np.unique(lanes // WARP).size

    def cluster_arrive(self, block: Block, lanes: Array) -> None:
        """Count some threads at the barrier of their cluster."""
        self.arrive(block, 0, lanes)


def _by_row(access: Access, warp: Array) -> Iterator[tuple[Access, Array]]:
    """Split an access by the CTA whose shared memory it accesses: each has its own banks."""
    if access.rows is None:
        yield access, warp
        return
    for row in np.unique(access.rows):
        some = access.rows == row
        yield access.pick(some), warp[some]


def _sectors(access: Access, warp: Array) -> tuple[int, int]:
    """Sectors of a global access, and the fewest that could hold its distinct bytes."""
    sector = (access.address >> np.uint64(5)).astype(np.int64)
    parts = len(set(zip(warp.tolist(), sector.tolist(), strict=True)))
    distinct = np.unique(np.stack([warp, access.address.astype(np.int64)], axis=1), axis=0)
    each = np.bincount(distinct[:, 0]) << access.shift
    return parts, int((-(-each // SECTOR_BYTES)).sum())


def _wavefronts(access: Access, warp: Array) -> tuple[int, int]:
    """Wavefronts of a shared access, and the fewest for its distinct words."""
    words = max(1, (1 << access.shift) // BANK_BYTES)
    phase = access.lanes % WARP // (WARP // words)
    group = np.repeat(warp * words + phase, words)
    first = access.address.astype(np.int64) // BANK_BYTES
    word = (first[:, None] + np.arange(words)).reshape(-1)
    distinct = np.unique(np.stack([group, word], axis=1), axis=0)
    groups, index = np.unique(distinct[:, 0], return_inverse=True)
    load = np.bincount(index * BANKS + distinct[:, 1] % BANKS, minlength=groups.size * BANKS)
    load = load.reshape(-1, BANKS)
    return int(load.max(axis=1).sum()), int((-(-load.sum(axis=1) // BANKS)).sum())
