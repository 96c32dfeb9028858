"""Watchers: events of a running kernel.

A launch with a watcher runs the program's watched translation (`Program.watched`), whose text
reports every access, fence and block. Without a watcher there is no cost. Lanes of a launch are
numbered CTA by CTA, each rounded up to whole warps; those of a wave count from its first CTA.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from urdir.driver.emulator.machine.compile import Program
from urdir.driver.emulator.machine.flow import Block
from urdir.driver.emulator.machine.groups import cta_index, thread_name
from urdir.driver.emulator.machine.memory import Memory
from urdir.driver.emulator.machine.ops_convert import SHARED_WINDOW
from urdir.driver.emulator.machine.shared import SharedMemory
from urdir.driver.emulator.machine.wave import Wave

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Access:
    """An access of 1 << shift bytes at (n,) addresses by (n,) lanes of the launch.

    ``action`` is "load", "store", "atomic", or "copy" (which lands later); ``order`` is "weak", or
    the qualifier of a strong operation; ``values`` (n,) are those of a plain store; ``rows`` (n,)
    is the start of the accessed shared memory per lane, None if it is its own CTA's.
    """

    line: int
    action: str
    order: str
    is_shared: bool
    address: Array
    shift: int
    lanes: Array
    values: Array | None = None
    rows: Array | None = None

    def pick(self, some: Array) -> Access:
        """The access of some lanes."""
        values = None if self.values is None else self.values[some]
        rows = None if self.rows is None else self.rows[some]
        return replace(
            self, address=self.address[some], lanes=self.lanes[some], values=values, rows=rows
        )

    def split(self) -> tuple[Access, Access]:
        """Split by generic addresses: accesses to shared memory, and to global memory."""
        window = np.uint64(SHARED_WINDOW)
        inside = (self.address >= window) & (self.address < window + np.uint64(1 << 32))
        shared = self.pick(inside)
        shared = replace(shared, address=shared.address - window, is_shared=True)
        return shared, self.pick(~inside)


class WatchedLaunch(Protocol):
    """Interface of a launch for its watcher."""

    program: Program
    grid: tuple[int, int, int]
    memory: Memory
    params: bytes


def bulk_copies(size: Array, lanes: Array) -> Iterator[tuple[int, int, Array]]:
    """For every bulk copy of a lane: its number, the lane, and the offsets of its 16-byte
    pieces."""
    for number, nbytes in enumerate(np.broadcast_to(size, lanes.shape).tolist()):
        yield number, int(lanes[number]), np.arange(0, nbytes, 16, dtype=np.uint64)


class Watch:
    """Base class of watchers; every event does nothing here.

    Generated code calls the methods whose first argument is ``line`` or ``pc``. Lanes are numbered
    in their wave, except those of an `Access` (see `touch`), which are the launch's.
    """

    program: Program
    wave: Wave
    grid: tuple[int, int, int]
    memory: Memory
    params: bytes
    #: The launch's number of the wave's first lane.
    first_lane: int

    # ---- called by the machine ----

    def begin(self, launch: WatchedLaunch) -> None:
        """A launch begins."""
        self.program = launch.program
        self.grid = launch.grid
        self.memory = launch.memory
        self.params = launch.params

    def begin_wave(self, wave: Wave, first_cta: int) -> None:
        """Its next CTAs begin."""
        self.wave = wave
        self.first_lane = first_cta * wave.lanes_per_cta

    def barrier(self, block: Block, lanes: Array) -> None:
        """All threads of some CTAs pass a barrier together; ``lanes`` are the wave's."""

    def arrive(self, block: Block, number: int, lanes: Array) -> None:
        """Some lanes of the wave arrive at a barrier."""

    def complete(self, number: int, ctas: Array) -> None:
        """A barrier is complete for the CTAs of the wave where ``ctas`` holds."""

    def cluster_arrive(self, block: Block, lanes: Array) -> None:
        """Some lanes of the wave arrive at the barrier of their cluster."""

    def cluster_complete(self, clusters: Array) -> None:
        """A phase of the barrier is over for the clusters of the wave where this holds."""

    def cluster_wait(self, lanes: Array) -> None:
        """Lanes of the wave have waited for the end of the phase in which they arrived."""

    def end(self, lanes: Array) -> None:
        """Lanes of the wave have ended."""

    # ---- called by generated code ----

    def block(self, pc: int, last: int, lanes: Array) -> None:
        """A group of the wave runs the blocks ``pc`` to ``last``."""

    def access(
        self,
        line: int,
        action: str,
        order: str,
        space: str,
        address: Array,
        shift: int,
        lanes: Array,
        q: Array | None = None,
        values: Array | None = None,
    ) -> None:
        """Lanes ``q`` of a group (None: all) access 1 << shift bytes each; see `touch`."""
        if values is not None:
            values = np.broadcast_to(values, lanes.shape)
        is_shared, rows, lanes = space in ("shared", "cluster"), None, lanes + self.first_lane
        if space == "cluster":
            own = self.rows(lanes).astype(np.uint64)
            address, rows = self.wave.cluster_space.resolve(address, own, q)
        everything = Access(line, action, order, is_shared, address, shift, lanes, values, rows)
        if q is not None:
            everything = everything.pick(q)
        for access in (everything,) if space != "generic" else everything.split():
            if access.lanes.size:
                self.touch(access)

    def touch(self, access: Access) -> None:
        """An access; stores are reported before they happen, others after."""

    def landed(self, line: int, copies: Sequence[Any]) -> None:
        """cp.async of these lanes are complete, at their own wait."""

    def pieces(
        self, line: int, action: str, address: Array, lane: int, space: str = "memory"
    ) -> None:
        """A lane of the wave accesses 16 bytes at each address."""
        self.access(line, action, "weak", space, address, 4, np.full(address.size, lane))

    def bulk(
        self,
        line: int,
        to: Array,
        origin: Array,
        size: Array,
        mbarrier: Array,
        lanes: Array,
        masks: Array | None,
    ) -> None:
        """cp.async.bulk from global to shared memory; of the CTAs in ``masks`` if given."""
        for i, lane, steps in bulk_copies(size, lanes):
            self.pieces(line, "load", origin[i] + steps, lane)
            self.pieces(line, "copy", to[i] + steps, lane, "cluster")

    def bulk_send(
        self, line: int, to: Array, origin: Array, size: Array, mbarrier: Array, lanes: Array
    ) -> None:
        """cp.async.bulk from shared memory to that of another CTA."""
        for i, lane, steps in bulk_copies(size, lanes):
            self.pieces(line, "load", origin[i] + steps, lane, "shared")
            self.pieces(line, "copy", to[i] + steps, lane, "cluster")

    def store_async(
        self, line: int, to: Array, data: Array, shift: int, mbarrier: Array, lanes: Array
    ) -> None:
        """st.async of 1 << shift bytes a lane."""
        self.access(line, "copy", "weak", "cluster", to, shift, lanes)

    def bulk_store(self, line: int, to: Array, origin: Array, size: Array, lanes: Array) -> None:
        """cp.async.bulk from shared to global memory."""
        for i, lane, steps in bulk_copies(size, lanes):
            self.pieces(line, "load", origin[i] + steps, lane, "shared")
            self.pieces(line, "store", to[i] + steps, lane)

    def bulk_commit(self, line: int, lanes: Array) -> None:
        """cp.async.bulk.commit_group."""

    def bulk_wait(self, line: int, groups: int, lanes: Array) -> None:
        """cp.async.bulk.wait_group, which also waits for the copies to have read their source."""

    def signal(self, line: int, mbarrier: Array, lanes: Array, rows: Array) -> None:
        """Lanes of the wave arrive at mbarriers, in shared memory that begins at ``rows``."""

    def observe(self, line: int, mbarrier: Array, done: Array, lanes: Array) -> None:
        """Lanes of the wave see a phase of their mbarrier complete where ``done`` holds."""

    def fence(self, line: int, lanes: Array) -> None:
        """A fence of at least CTA scope."""

    def fence_proxy(self, line: int, lanes: Array) -> None:
        """fence.proxy.async, or fence.mbarrier_init."""

    def operand(self, line: int, lanes: Array, groups: Array, offsets: Array) -> None:
        """A wgmma of the warpgroups whose first lanes these are reads 16 bytes at each of the
        offsets (W, n) in the wave's shared memory, as part of a group each."""

    def wgmma_wait(self, lanes: Array, before: Array) -> None:
        """The groups of these warpgroups with numbers below ``before`` (W,) are complete."""

    def converge(self, line: int, lanes: Array) -> None:
        """bar.warp.sync."""

    # ---- for watchers ----

    @property
    def shared(self) -> SharedMemory:
        """The wave's shared memory."""
        return self.wave.shared

    def rows(self, lanes: Array) -> Array:
        """Where the shared memory of each lane's CTA begins, (n,) int64."""
        cta: Array = (lanes - self.first_lane) // self.wave.lanes_per_cta
        return cta * self.shared.stride

    def rows_of(self, access: Access) -> Array:
        """Where the shared memory begins that an access goes to, (n,) int64."""
        return self.rows(access.lanes) if access.rows is None else access.rows.astype(np.int64)

    def cta(self, lane: int) -> tuple[int, int, int]:
        """The grid position of the CTA of a launch's lane."""
        return cta_index(lane // self.wave.lanes_per_cta, self.grid, self.wave.cluster)

    def line(self, number: int) -> str:
        """A PTX line for messages."""
        return f"PTX line {number} ({self.program.instructions.get(number, '')})"

    def thread(self, lane: int) -> str:
        """A lane of the launch for messages."""
        cta, tid = divmod(lane, self.wave.lanes_per_cta)
        return thread_name(cta, tid, self.wave.block, self.grid, self.wave.cluster)
