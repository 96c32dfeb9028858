"""Sanitizer for asynchronous accesses: bulk copies, st.async, and wgmma operands.

In addition to the ordering of all accesses (see races.py):

- Generic writes must be made visible by fence.proxy.async between the write and a wgmma or bulk
  copy that reads or overwrites the data; an mbarrier's initial state also by fence.mbarrier_init
  (PTX ISA, "Async proxy"). Either the writers fence before the issuing threads are ordered after
  them, or the issuing threads fence afterwards.
- The source of a wgmma or bulk copy must not change until it was waited for, see async_reads.

The destination of a bulk copy or st.async counts as written by the issuing thread at the end of the
mbarrier's phase. (Reads of global memory by bulk copies are not checked.)
"""

from __future__ import annotations

import re

import numpy as np

from urdir.driver.emulator.machine.async_reads import AsyncRead, AsyncReads
from urdir.driver.emulator.machine.groups import WARP
from urdir.driver.emulator.machine.races import Place, RaceDetector
from urdir.driver.emulator.machine.shadow import encode, epoch_of, lane_of, line_of
from urdir.driver.emulator.machine.watch import Access, Array, WatchedLaunch, bulk_copies
from urdir.driver.emulator.machine.wave import Wave
from urdir.driver.emulator.machine.wgmma import WARPGROUP

_ASYNC = re.compile(r"(@!?\s*\S+\s+)?cp\.async\.bulk\.")
_PIECE = 4
_FENCE = (
    "fence.proxy.async, by all threads that wrote before they meet the others, or afterwards by "
    "those that issue the asynchronous access"
)


class Sanitizer(RaceDetector):
    """Raises KernelFault at the first race, missing fence, or barrier that some threads miss."""

    def begin(self, launch: WatchedLaunch) -> None:
        """Start of a launch."""
        super().begin(launch)
        texts = self.program.instructions
        #: PTX lines with asynchronous writes.
        self._async_lines = np.array([n for n, text in texts.items() if _ASYNC.match(text)])

    def begin_wave(self, wave: Wave, first_cta: int) -> None:
        """Start of a wave: shared memory is new."""
        super().begin_wave(wave, first_cta)
        warps = wave.lanes // WARP
        self._warpgroups = -(-wave.lanes_per_cta // WARPGROUP)
        nbytes = wave.shared.views[0].size
        self._own = Place(self._shared, wave.shared.views, -1)
        #: Kinds of readers: the warpgroups of a CTA, and bulk copies.
        self._reads = AsyncReads(nbytes, self._warpgroups + 1)
        self._committed: dict[int, int] = {}
        #: Lanes of each warp that wrote shared memory since its last fence.proxy.async, or since
        #: they converged in the epoch stored with them.
        self._writers = np.zeros(warps, np.uint32)
        self._writers_since = np.zeros(warps, np.int64)
        #: mbarrier -> copies in flight: bytes of the wave's shared memory, as a shift, the lanes.
        self._landings: dict[int, list[tuple[Array, int, Array]]] = {}

    # ---- generic accesses ----

    def touch(self, access: Access) -> None:
        """Check an access, and record which lanes write shared memory."""
        if access.is_shared and access.action in ("store", "atomic"):
            self._note_writers(access.lanes - self.first_lane)
        super().touch(access)

    def _note_writers(self, lanes: Array) -> None:
        warps = np.unique(lanes // WARP)
        for warp in warps.tolist():
            since = self.clocks.converged(warp + self.first_lane // WARP)
            if since != self._writers_since[warp]:
                self._writers[warp], self._writers_since[warp] = 0, since
        bits = np.uint32(1) << (lanes % WARP).astype(np.uint32)
        np.bitwise_or.at(self._writers, lanes // WARP, bits)

    def fence_proxy(self, line: int, lanes: Array) -> None:
        """fence.proxy.async, fence.mbarrier_init."""
        bits = np.uint32(1) << (lanes % WARP).astype(np.uint32)
        taking_part = np.zeros_like(self._writers)
        np.bitwise_or.at(taking_part, lanes // WARP, bits)
        for warp in np.unique(lanes // WARP).tolist():
            number = warp + self.first_lane // WARP
            is_new = self._writers_since[warp] != self.clocks.converged(number)
            is_whole = is_new or not int(self._writers[warp]) & ~int(taking_part[warp])
            self.clocks.fence(number, is_whole)
            if is_whole:
                self._writers[warp] = 0

    def check_write(self, access: Access, place: Place, offset: Array) -> None:
        """Refuse writes to memory that pending asynchronous operations read."""
        if place.base >= 0:
            return
        found = self._reads.overwritten(offset, access.lanes, self.clocks)
        if found is None:
            return
        read, lane, where = found
        is_bulk = read.kind == self._warpgroups
        wait = "cp.async.bulk.wait_group.read" if is_bulk else "wgmma.wait_group"
        raise self.fault(
            f"race: {self.line(access.line)} of {self.thread(lane)} writes "
            f"{self._where(-1, where)} which {self.line(read.line)} of {self.thread(read.lane)} "
            f"may still read; hint: {wait} of those who issued it must come first, and a barrier"
        )

    # ---- mbarriers ----

    def signal(self, line: int, mbarrier: Array, lanes: Array, rows: Array) -> None:
        """Check that an arriving thread knows that the mbarrier was initialised."""
        self._check_initialised(line, mbarrier, lanes, rows)
        super().signal(line, mbarrier, lanes, rows)

    def _check_initialised(self, line: int, mbarrier: Array, lanes: Array, rows: Array) -> None:
        index, each = self._shared.units(mbarrier.astype(np.int64) + rows.astype(np.int64), 3)
        lanes = np.repeat(lanes + self.first_lane, each)
        code = encode(lanes, self.clocks.now[lanes // WARP], line, is_strong=True)
        self._compare(self._shared.writes[index], code, self._own, index)

    # ---- asynchronous reads ----

    def _check_async(
        self,
        line: int,
        lane: int,
        warps: Array,
        offsets: Array,
        verb: str,
        shift: int = _PIECE,
    ) -> None:
        """An asynchronous access of 1 << shift bytes at each offset, by warps of the launch."""
        index, _ = self._shared.units(offsets, shift)
        past = np.unique(self._shared.writes[index])
        past = past[past != 0]
        if not past.size:
            return
        writer, epochs = lane_of(past) // WARP, epoch_of(past)
        is_generic = ~np.isin(line_of(past), self._async_lines)
        for warp in warps.tolist():
            me = np.full(past.size, warp)
            late = (self.clocks.known(me, writer) < epochs) & (writer != warp)
            if late.any():
                self._report_async(line, lane, past[late.argmax()], index, verb, "CTA")
            unfenced = is_generic & (self.clocks.fenced(me, writer) < epochs)
            if unfenced.any():
                self._report_async(line, lane, past[unfenced.argmax()], index, verb, "proxy")

    def _report_async(
        self, line: int, lane: int, code: int, index: Array, verb: str, why: str
    ) -> None:
        at = int(index[(self._shared.writes[index] == code).argmax()]) << self._shared.shift
        past = np.array([code])
        writer = f"{self.line(int(line_of(past)[0]))} of {self.thread(int(lane_of(past)[0]))}"
        reader = f"{self.line(line)} of {self.thread(lane)}"
        if why == "proxy":
            raise self.fault(
                f"{reader} {verb} {self._where(-1, at)} which {writer} has written, with no "
                f"fence.proxy.async between; hint: {_FENCE}"
            )
        self._report_pair(writer, reader, self._where(-1, at), why)

    def operand(self, line: int, lanes: Array, groups: Array, offsets: Array) -> None:
        """Record that a wgmma of the warpgroups whose first lanes these are reads 16 bytes at each
        of the offsets (W, n) in the wave's shared memory, as part of a group each."""
        for lane, group, where in zip(lanes.tolist(), groups.tolist(), offsets, strict=True):
            first = lane + self.first_lane
            warps = first // WARP + np.arange(WARPGROUP // WARP)
            self._check_async(line, first, warps, where, "reads")
            kind = lane % self.wave.lanes_per_cta // WARPGROUP
            self._reads.begin(where, AsyncRead(kind, line, first, group, warps))

    def wgmma_wait(self, lanes: Array, before: Array) -> None:
        """Groups of these warpgroups with numbers below ``before`` (W,) are complete."""
        for lane, limit in zip(lanes.tolist(), before.tolist(), strict=True):
            kind = lane % self.wave.lanes_per_cta // WARPGROUP
            self._reads.wait(kind, lane + self.first_lane, limit, self.clocks)

    def bulk_store(self, line: int, to: Array, origin: Array, size: Array, lanes: Array) -> None:
        """Shared memory is read until the thread has waited for it."""
        for i, lane, steps in bulk_copies(size, lanes):
            thread = lane + self.first_lane
            where = (origin[i] + steps).astype(np.int64) + int(self.rows(np.array([thread]))[0])
            warp = np.array([thread // WARP])
            self._check_async(line, thread, warp, where, "reads")
            group = self._committed.get(thread, 0)
            self._reads.begin(where, AsyncRead(self._warpgroups, line, thread, group, warp))
            self.pieces(line, "store", to[i] + steps, lane)

    def bulk_commit(self, line: int, lanes: Array) -> None:
        """Close the current group of each lane."""
        for lane in (lanes + self.first_lane).tolist():
            self._committed[lane] = self._committed.get(lane, 0) + 1

    def bulk_wait(self, line: int, groups: int, lanes: Array) -> None:
        """All but the last groups of each lane have read their sources."""
        for lane in (lanes + self.first_lane).tolist():
            if lane in self._committed:
                before = self._committed[lane] - groups
                self._reads.wait(self._warpgroups, lane, before, self.clocks)

    # ---- asynchronous writes ----

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
        """Record what lands when the mbarriers' phases end."""
        every = [None] * to.size if masks is None else np.broadcast_to(masks, to.shape).tolist()
        for i, lane, steps in bulk_copies(size, lanes):
            self.pieces(line, "load", origin[i] + steps, lane)
            self._send(line, to[i : i + 1], steps, mbarrier[i : i + 1], lane, every[i])

    def bulk_send(
        self, line: int, to: Array, origin: Array, size: Array, mbarrier: Array, lanes: Array
    ) -> None:
        """Count the source as read when the copy is issued."""
        for i, lane, steps in bulk_copies(size, lanes):
            thread = lane + self.first_lane
            where = (origin[i] + steps).astype(np.int64) + int(self.rows(np.array([thread]))[0])
            self._check_async(line, thread, np.array([thread // WARP]), where, "reads")
            self.pieces(line, "load", origin[i] + steps, lane, "shared")
            self._send(line, to[i : i + 1], steps, mbarrier[i : i + 1], lane, None)

    def _send(
        self, line: int, to: Array, steps: Array, mbarrier: Array, lane: int, mask: int | None
    ) -> None:
        """A copy of a lane of the wave to one CTA, or to all in a mask."""
        issuer = np.full(steps.size, lane + self.first_lane)
        own = self.rows(issuer[:1]).astype(np.uint64)
        local, home = self.wave.cluster_space.resolve(to, own, None)
        at, _ = self.wave.cluster_space.resolve(mbarrier, own, None)
        warp = issuer[:1] // WARP
        for row in home if mask is None else self.wave.cluster_space.members(home, mask):
            where = (local + steps).astype(np.int64) + int(row)
            slot = int(at[0]) + int(row)
            self._check_async(line, int(issuer[0]), warp, where, "overwrites")
            self._check_async(line, int(issuer[0]), warp, np.array([slot]), "signals", 3)
            rows = np.broadcast_to(row, steps.shape)
            self.touch(Access(line, "copy", "weak", True, local + steps, _PIECE, issuer, rows=rows))
            self._landings.setdefault(slot, []).append((where, _PIECE, issuer))

    def store_async(
        self, line: int, to: Array, data: Array, shift: int, mbarrier: Array, lanes: Array
    ) -> None:
        """Record what lands when the mbarriers' phases end."""
        issuers = lanes + self.first_lane
        own = self.rows(issuers).astype(np.uint64)
        local, home = self.wave.cluster_space.resolve(to, own, None)
        at, _ = self.wave.cluster_space.resolve(mbarrier, own, None)
        self.touch(Access(line, "copy", "weak", True, local, shift, issuers, rows=home))
        where, slots = (a.astype(np.int64) + home.astype(np.int64) for a in (local, at))
        for slot in np.unique(slots).tolist():
            some = slots == slot
            self._landings.setdefault(slot, []).append((where[some], shift, issuers[some]))

    def observe(self, line: int, mbarrier: Array, done: Array, lanes: Array) -> None:
        """Acquire at the end of a phase, including the writes of copies up to now."""
        self._check_initialised(line, mbarrier, lanes, self.rows(lanes + self.first_lane))
        slots = mbarrier[done].astype(np.int64) + self.rows(lanes[done] + self.first_lane)
        for slot in np.unique(slots).tolist() if self._landings else ():
            for where, shift, issuers in self._landings.pop(slot, ()):
                self.rewrite(where, shift, issuers)
                for warp in np.unique(issuers // WARP).tolist():
                    self.release_at((1, slot), warp)
        super().observe(line, mbarrier, done, lanes)
