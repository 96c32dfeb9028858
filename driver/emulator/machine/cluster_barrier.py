"""The barrier of a cluster: barrier.cluster.arrive and .wait (PTX ISA 9.7.13.4)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from urdir.driver.emulator.machine.groups import Lanes
from urdir.driver.emulator.machine.watch import Watch

Array = npt.NDArray[Any]


class ClusterBarrier:
    """The barriers of all clusters of a wave, one each.

    A phase ends when every live thread of the cluster has arrived. A thread that has arrived must
    wait before it arrives again, so it is at most one phase behind.
    """

    def __init__(
        self, ctas: int, cluster_size: int, lanes_per_cta: int, watch: Watch | None = None
    ) -> None:
        self.watch = watch
        self.lanes_per_cluster = cluster_size * lanes_per_cta
        clusters = ctas // cluster_size
        #: The current phase of each cluster, and the number of live threads that arrived in it.
        self._phase = np.ones(clusters, np.int32)
        self._arrived = np.zeros(clusters, np.int64)
        #: The phase in which each lane arrived without having waited since; 0: none.
        self._own = np.zeros(clusters * self.lanes_per_cluster, np.int32)
        self.waiting: list[tuple[int, Lanes]] = []
        self._is_used = False

    def arrive(self, lanes: Lanes) -> int | None:
        """Lanes arrive; returns the first that should have waited before."""
        index = lanes.numbers()
        cluster = index // self.lanes_per_cluster
        self._is_used = True
        if (early := self._own[index] != 0).any():
            return int(index[early.argmax()])
        self._own[index] = self._phase[cluster]
        self._count(cluster, 1)
        return None

    def wait(self, pc: int, lanes: Lanes) -> int | None:
        """Lanes wait, to continue at ``pc``; returns the first that has not arrived."""
        index = lanes.numbers()
        if (stray := self._own[index] == 0).any():
            return int(index[stray.argmax()])
        self.waiting.append((pc, lanes))
        return None

    def end(self, index: Array) -> None:
        """Remove ended lanes and their arrivals from the counts."""
        if not self._is_used:
            return
        cluster = index // self.lanes_per_cluster
        self._count(cluster[self._own[index] == self._phase[cluster]], -1)

    def release(self, live: Array) -> list[tuple[int, Lanes]]:
        """Groups (pc, lanes) whose phase is complete, given the live threads per CTA."""
        if not self._is_used:
            return []
        self._complete(live)
        released, still = [], []
        for pc, lanes in self.waiting:
            index = lanes.numbers()
            go = self._own[index] < self._phase[index // self.lanes_per_cluster]
            if go.any():
                released.append((pc, self._pass(lanes if go.all() else lanes.pick(go))))
            if not go.all():
                still.append((pc, lanes.pick(~go) if go.any() else lanes))
        self.waiting = still
        return released

    def _complete(self, live: Array) -> None:
        needed = live.reshape(self._phase.size, -1).sum(axis=1)
        done = (self._arrived == needed) & (self._arrived > 0)
        self._phase[done] += 1
        self._arrived[done] = 0
        if self.watch is not None and done.any():
            self.watch.cluster_complete(done)

    def _pass(self, lanes: Lanes) -> Lanes:
        index = lanes.numbers()
        self._own[index] = 0
        if self.watch is not None:
            self.watch.cluster_wait(index)
        return lanes

    def _count(self, cluster: Array, sign: int) -> None:
        self._arrived += sign * np.bincount(cluster, minlength=self._arrived.size)
