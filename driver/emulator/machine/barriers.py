"""CTA barriers: bar.sync and bar.arrive of any number and thread count (PTX ISA 9.7.13.1).

The barrier of the cluster is here too: all waiting lanes are found in one place.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from urdir.driver.emulator.machine.cluster_barrier import ClusterBarrier
from urdir.driver.emulator.machine.groups import Lanes
from urdir.driver.emulator.machine.watch import Watch

Array = npt.NDArray[Any]


@dataclass(slots=True)
class Barrier:
    """A barrier number: threads arrived per CTA, threads expected, waiting lanes."""

    arrived: Array
    #: 0: every live thread of the CTA.
    awaited: Array
    waiting: list[tuple[int, Lanes]] = field(default_factory=list)


class Barriers:
    """The barriers of all CTAs of a wave, which are ``cluster_size`` to a cluster."""

    def __init__(
        self, ctas: int, cluster_size: int, lanes_per_cta: int, watch: Watch | None = None
    ) -> None:
        self.watch = watch
        self.cluster = ClusterBarrier(ctas, cluster_size, lanes_per_cta, watch)
        self.lanes_per_cta = lanes_per_cta
        self.ctas = ctas
        self.table: dict[int, Barrier] = {}

    def arrive(self, number: int, count: int, lanes: Lanes, pc: int | None) -> None:
        """Lanes arrive at a barrier and, unless ``pc`` is None, wait there to continue at
        ``pc``."""
        barrier = self.table.get(number)
        if barrier is None:
            zeros = np.zeros(self.ctas, np.int64)
            barrier = self.table[number] = Barrier(zeros, zeros.copy())
        cta = lanes.numbers() // self.lanes_per_cta
        barrier.arrived += np.bincount(cta, minlength=self.ctas)
        barrier.awaited[np.unique(cta)] = count
        if pc is not None:
            barrier.waiting.append((pc, lanes))

    def beyond(self, number: int) -> tuple[int, int, int] | None:
        """The first CTA of which more threads have arrived than a barrier counts, the threads that
        have arrived, and those counted."""
        barrier = self.table[number]
        over = (barrier.awaited > 0) & (barrier.arrived > barrier.awaited)
        if not over.any():
            return None
        cta = int(over.argmax())
        return cta, int(barrier.arrived[cta]), int(barrier.awaited[cta])

    def release(self, live: Array) -> list[tuple[int, Lanes]]:
        """Groups (pc, lanes) whose barrier is complete, given the live threads per CTA."""
        released = self.cluster.release(live)
        for number, barrier in self.table.items():
            needed = np.where(barrier.awaited, barrier.awaited, live)
            done = (barrier.arrived >= needed) & (barrier.arrived > 0)
            if not done.any():
                continue
            barrier.arrived[done] = 0
            if self.watch is not None:
                self.watch.complete(number, done)
            still = []
            for pc, lanes in barrier.waiting:
                go = done[lanes.numbers() // self.lanes_per_cta]
                if go.all():
                    released.append((pc, lanes))
                elif go.any():
                    released.append((pc, lanes.pick(go)))
                    still.append((pc, lanes.pick(~go)))
                else:
                    still.append((pc, lanes))
            barrier.waiting = still
        return released

    def waiting(self) -> list[tuple[str, int, Lanes]]:
        """(name of the barrier, pc to continue at, lanes) of all waiting lanes."""
        queues = [(f"barrier {number}", barrier.waiting) for number, barrier in self.table.items()]
        queues.append(("the barrier of the cluster", self.cluster.waiting))
        return [(name, pc, lanes) for name, queue in queues for pc, lanes in queue]
