"""Ordering within a cluster: barrier.cluster.arrive releases, .wait acquires.

An arrival with .relaxed releases only what a fence before it released. Until its first wait a warp
knows nothing of the other CTAs, not even that they have started.
"""

from __future__ import annotations

import numpy as np

from urdir.driver.emulator.machine.clocks import Knowledge, join
from urdir.driver.emulator.machine.flow import Block
from urdir.driver.emulator.machine.groups import WARP
from urdir.driver.emulator.machine.ordering import Ordering, together
from urdir.driver.emulator.machine.watch import Access, Array
from urdir.driver.emulator.machine.wave import Wave


class ClusterOrdering(Ordering):
    """Clocks of a launch with clusters. Clusters are numbered in their wave."""

    def begin_wave(self, wave: Wave, first_cta: int) -> None:
        """The barriers of the clusters are new."""
        super().begin_wave(wave, first_cta)
        #: Cluster -> what was released in the current phase, and in the one before.
        self._present: dict[int, Knowledge] = {}
        self._past: dict[int, Knowledge] = {}
        self._in_phase: list[tuple[Block, Array]] = []
        #: Warps of the wave that have waited for their cluster.
        self._have_met = np.zeros(wave.lanes // WARP, np.bool_)

    def cluster_arrive(self, block: Block, lanes: Array) -> None:
        """Some threads arrive: they release."""
        self._in_phase.append((block, lanes))
        is_relaxed = "relaxed" in block.instruction.parts
        for warp in np.unique(lanes // WARP).tolist():
            number = warp + self.first_lane // WARP
            given = self._fenced.get(number) if is_relaxed else self.clocks.release(number)
            if given:
                join(self._present.setdefault(self._cluster(warp), {}), given)

    def cluster_complete(self, clusters: Array) -> None:
        """A phase ends: its releases can be acquired from now on."""
        for cluster in np.flatnonzero(clusters).tolist():
            self._past[cluster] = self._present.pop(cluster, {})
        still, now = [], []
        for block, lanes in self._in_phase:
            here = clusters[lanes // (self.wave.lanes_per_cta * self.wave.cluster_size)]
            now.append((block, lanes[here]))
            if not here.all():
                still.append((block, lanes[~here]))
        self._in_phase = still
        for block, lanes in together(now):
            self._check_warps(block, "of the cluster", lanes)

    def cluster_wait(self, lanes: Array) -> None:
        """Waiting lanes acquire."""
        warps = np.unique(lanes // WARP)
        self._have_met[warps] = True
        for warp in warps.tolist():
            known = self._past[self._cluster(warp)]
            self.clocks.acquire(warp + self.first_lane // WARP, known)

    def _cluster(self, warp: int) -> int:
        return int(warp * WARP // self.wave.lanes_per_cta // self.wave.cluster_size)

    def check_begun(self, access: Access) -> None:
        """Check that another CTA is known to have started before its shared memory is accessed."""
        size = self.wave.lanes_per_cta
        home = self.rows_of(access) // self.shared.stride + self.first_lane // size
        foreign = np.flatnonzero(home != access.lanes // size)
        for at in foreign[~self._have_met[(access.lanes[foreign] - self.first_lane) // WARP]]:
            lane, cta = int(access.lanes[at]), int(home[at])
            if not self.clocks.has_met(lane // WARP, cta):
                raise self.fault(
                    f"race: {self.line(access.line)} of {self.thread(lane)} touches the shared "
                    f"memory of CTA {self.cta(cta * size)}, which may not have begun; hint: "
                    "barrier.cluster.arrive and barrier.cluster.wait must come first"
                )
