"""Execution of one wave: groups of lanes at one pc, the lowest pc first."""

from __future__ import annotations

import enum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from urdir.driver.emulator.machine.barriers import Barriers
from urdir.driver.emulator.machine.compile import Program
from urdir.driver.emulator.machine.diagnosis import Diagnosis
from urdir.driver.emulator.machine.faults import (
    LAUNCH_FAILED,
    LAUNCH_TIMEOUT,
    AccessFault,
    KernelFault,
)
from urdir.driver.emulator.machine.flow import Block, Ending
from urdir.driver.emulator.machine.groups import WARP, Lanes
from urdir.driver.emulator.machine.watch import Watch
from urdir.driver.emulator.machine.wave import Wave
from urdir.ptxgen.ptx import Immediate, Operand, Register

Array = npt.NDArray[Any]

#: Iterations of a polling loop before its group lets others run.
YIELD_AFTER = 4
#: Rounds of all groups without a change that count as a deadlock.
IDLE_ROUNDS = 64
#: The same, before control returns to the caller.
IDLE_ROUNDS_SHARED = 2


class Status(enum.Enum):
    """State of a grid."""

    DONE = "done"
    DEPENDENCY_WAIT = "waits for the kernels before it"
    YIELDED = "spins until something else runs"


class Launch(Protocol):
    """Interface of the grid for its waves."""

    program: Program
    grid: tuple[int, int, int]
    budget: int
    spent: int
    dependencies_pending: bool
    watch: Watch | None


class WaveRun:
    """Execution state of a wave's lanes."""

    def __init__(self, launch: Launch, wave: Wave, first_cta: int) -> None:
        self.launch = launch
        self.program = launch.program
        self.wave = wave
        self.diagnosis = Diagnosis(launch.program, wave, first_cta, launch.grid)
        self._barriers = Barriers(wave.ctas, wave.cluster_size, wave.lanes_per_cta, launch.watch)
        self._live = np.full(wave.ctas, wave.threads, np.int64)
        wave.cluster_space.live = self._live
        self._alive: Array | None = None
        self._ready: dict[int, Lanes] = {0: wave.all_lanes()}
        #: Lanes at a .sync operation with incomplete warps.
        self._parked: dict[int, Lanes] = {}
        self._yielded: list[tuple[int, Lanes, Block]] = []
        self._dependents: list[tuple[int, Lanes]] = []
        self._idle_rounds = 0
        self._last_round: object = None

    def waits(self) -> str:
        """What the waiting groups wait for."""
        return "; ".join(self.diagnosis.waits(self._yielded, self._barriers, self._parked))

    def run(self, alone: bool) -> Status:
        """Run as far as possible; raises KernelFault."""
        while True:
            while self._ready:
                pc = min(self._ready)
                self._run_group(pc, self._ready.pop(pc))
            if self._dependents and not self.launch.dependencies_pending:
                for pc, lanes in self._dependents:
                    self._put(pc, lanes)
                self._dependents = []
            elif self._yielded:
                if not self._next_round(alone):
                    return Status.YIELDED
            elif self._dependents:
                return Status.DEPENDENCY_WAIT
            elif self._parked or self._barriers.waiting():
                raise self.diagnosis.fault(
                    LAUNCH_TIMEOUT,
                    f"deadlock: {self.waits()}, and no other thread will arrive; hint: every "
                    "thread that the barrier's count, or the member mask, includes must reach it",
                )
            else:
                self._finish()
                return Status.DONE

    def _finish(self) -> None:
        """All threads have ended."""
        if self.wave.bulk is not None:
            self.wave.bulk.finish()
        if self.wave.warpgroups is not None:
            try:
                self.wave.warpgroups.finish()
            except AccessFault as fault:
                raise self.diagnosis.access(fault, self.wave.all_lanes()) from None

    def _next_round(self, alone: bool) -> bool:
        """Let yielded groups poll again; False if that is currently futile."""
        state = (
            self.wave.changes.count,
            sorted((pc, lanes.start, lanes.count) for pc, lanes, _ in self._yielded),
            int(self._live.sum()),
            sum(lanes.count for _, _, lanes in self._barriers.waiting()),
        )
        self._idle_rounds = self._idle_rounds + 1 if state == self._last_round else 0
        self._last_round = state
        if self._idle_rounds >= (IDLE_ROUNDS if alone else IDLE_ROUNDS_SHARED):
            self._idle_rounds = 0
            if not alone or self._dependents:
                self._last_round = None
                return False
            raise self.diagnosis.fault(LAUNCH_TIMEOUT, f"deadlock: {self.waits()}")
        groups, self._yielded = self._yielded, []
        for pc, lanes, _ in groups:
            self._put(pc, lanes)
        return True

    # ---- groups ----

    def _put(self, pc: int, lanes: Lanes) -> None:
        """Make a group ready, merged with the lanes at its pc."""
        for others in (self._ready, self._parked):
            if pc in others:
                lanes = others.pop(pc).merge(lanes)
        self._ready[pc] = lanes

    def _run_group(self, pc: int, lanes: Lanes) -> None:
        """Run a group until it merges, splits, waits or ends, or a lower pc must run first."""
        program = self.program
        if program.blocks[pc].is_for_warpgroups:
            found = self._met(program.blocks[pc], pc, lanes)
            if found is None:
                return
            lanes = found
        limit = min(self._ready, default=program.exit)
        if self._parked:
            limit = min(limit, *self._parked)
        whole = lanes.index is None
        if whole:
            functions = self.wave.bind(lanes.start, lanes.stop)
            whole = functions[pc] is not None
        if not whole:
            self._run_scattered(pc, lanes)
            return
        blocks, costs, budget = program.blocks, program.costs, self.launch.budget
        polls = 0
        try:
            while True:
                next_pc = functions[pc]()  # type: ignore[misc]
                self.launch.spent += costs[pc]
                if next_pc.__class__ is not int:
                    self._branch(blocks[blocks[pc].last], next_pc, lanes)
                    return
                if next_pc < 0:
                    last, next_pc = blocks[blocks[pc].last], ~next_pc
                    if last.ending is Ending.BARRIER:
                        if not self._passes(last, lanes):
                            self._arrive(last, next_pc, lanes)
                            return
                    elif last.spins and polls < YIELD_AFTER and next_pc < limit:
                        polls += 1  # else others, perhaps those that it waits for, would never run
                    else:
                        self._attend(last, next_pc, lanes)
                        return
                if (
                    next_pc >= limit
                    or self.launch.spent > budget
                    or blocks[next_pc].is_for_warpgroups
                ):
                    self._put_or_end(next_pc, lanes)
                    return
                pc = next_pc
        except AccessFault as fault:
            raise self.diagnosis.access(fault, lanes) from None

    def _run_scattered(self, pc: int, lanes: Lanes) -> None:
        """Run one block of a scattered group."""
        block = self.program.blocks[pc]
        if block.converges and not block.is_for_warpgroups:
            found = self._converged(block, pc, lanes)
            if found is None:
                return
            lanes = found
        function = self.wave.scattered(pc)
        try:
            next_pc = function(lanes.numbers())
        except AccessFault as fault:
            raise self.diagnosis.access(fault, lanes) from None
        self.launch.spent += block.cost
        if next_pc.__class__ is not int:
            self._branch(block, next_pc, lanes)
        elif next_pc >= 0:
            self._put_or_end(next_pc, lanes)
        elif block.ending is Ending.BARRIER and self._passes(block, lanes):
            self._put_or_end(~next_pc, lanes)
        else:
            self._attend(block, ~next_pc, lanes)

    def _put_or_end(self, pc: int, lanes: Lanes) -> None:
        if self.launch.spent > self.launch.budget:
            raise self._over_budget(pc)
        if pc == self.program.exit:
            self._exit(lanes)
        else:
            self._put(pc, lanes)

    def _branch(self, block: Block, mask: Array, lanes: Lanes) -> None:
        """Lanes disagree about a branch."""
        taken, others = lanes.pick(mask), lanes.pick(~mask)
        if block.spins:
            self._yielded.append((block.target, taken, block))
        else:
            self._put_or_end(block.target, taken)
        self._put_or_end(block.next, others)

    def _attend(self, block: Block, next_pc: int, lanes: Lanes) -> None:
        """Handle a block's ending for all lanes of a group."""
        if block.ending is Ending.EXIT:
            self._exit(lanes)
        elif block.ending is Ending.BARRIER:
            self._arrive(block, next_pc, lanes)
        elif block.ending is Ending.CLUSTER_ARRIVE:
            self._arrive_in_cluster(block, next_pc, lanes)
        elif block.ending is Ending.CLUSTER_WAIT:
            self._wait_in_cluster(block, next_pc, lanes)
        elif block.ending is Ending.DEPENDENCIES:
            if self.launch.dependencies_pending:
                self._dependents.append((next_pc, lanes))
            else:
                self._put_or_end(next_pc, lanes)
        elif block.ending is Ending.TRAP:
            raise self.diagnosis.fault(
                LAUNCH_FAILED,
                f"trap at {self.diagnosis.line(block)}, {self.diagnosis.thread(lanes.first)}",
            )
        else:
            if self.launch.spent > self.launch.budget:
                raise self._over_budget(next_pc)
            self._yielded.append((next_pc, lanes, block))

    def _exit(self, lanes: Lanes) -> None:
        if self.wave.bulk is not None:
            try:
                self.wave.bulk.end(lanes.numbers())
            except AccessFault as fault:
                raise self.diagnosis.access(fault, lanes) from None
        if self.launch.watch is not None:
            self.launch.watch.end(lanes.numbers())
        if lanes.count == self.wave.ctas * self.wave.threads:
            self._live[:] = 0
            return
        cta = lanes.numbers() // self.wave.lanes_per_cta
        self._live -= np.bincount(cta, minlength=self.wave.ctas)
        if not self._live.any():
            return
        if self._alive is None:
            self._alive = self.wave.all_flags()
        index = lanes.numbers()
        self._alive[index] = False
        self._barriers.cluster.end(index)
        self._release()
        for pc, parked in list(self._parked.items()):
            del self._parked[pc]
            self._put(pc, parked)

    # ---- barriers and convergence ----

    def _passes(self, block: Block, lanes: Lanes) -> bool:
        """Whether the group is all threads of its CTAs, so that none has to wait at the barrier."""
        assert block.barrier is not None
        size = self.wave.lanes_per_cta
        count = block.barrier.count
        passes = (
            lanes.index is None
            and lanes.start % size == 0
            and lanes.stop % size == 0
            and block.barrier.waits
            and (count is None or (isinstance(count, Immediate) and count.value == size))
        )
        if passes and self.launch.watch is not None:
            self.launch.watch.barrier(block, lanes.numbers())
        return passes

    def _arrive(self, block: Block, next_pc: int, lanes: Lanes) -> None:
        form = block.barrier
        assert form is not None
        watch = self.launch.watch
        for number, some in self._by_value(form.number, lanes):
            if watch is not None:
                watch.arrive(block, number, some.numbers())
            for count, same in self._by_value(form.count or Immediate(0), some):
                self._barriers.arrive(number, count, same, next_pc if form.waits else None)
                if (beyond := self._barriers.beyond(number)) is not None:
                    raise self._miscounted(block, number, *beyond, same)
        self._release()
        if not form.waits:
            self._put_or_end(next_pc, lanes)

    def _miscounted(
        self, block: Block, number: int, cta: int, arrived: int, counted: int, lanes: Lanes
    ) -> KernelFault:
        numbers = lanes.numbers()
        one = int(numbers[numbers // self.wave.lanes_per_cta == cta][0])
        return self.diagnosis.fault(
            LAUNCH_FAILED,
            f"barrier {number} counts too few: {self.diagnosis.line(block)} is for {counted} "
            f"threads of a CTA, and {arrived} arrive, such as {self.diagnosis.thread(one)}; hint: "
            "count the threads of all instructions with this barrier",
        )

    def _arrive_in_cluster(self, block: Block, next_pc: int, lanes: Lanes) -> None:
        if self.launch.watch is not None:
            self.launch.watch.cluster_arrive(block, lanes.numbers())
        if (lane := self._barriers.cluster.arrive(lanes)) is not None:
            raise self._misused(block, lane, "arrives again before it has waited")
        self._release()
        self._put_or_end(next_pc, lanes)

    def _wait_in_cluster(self, block: Block, next_pc: int, lanes: Lanes) -> None:
        if (lane := self._barriers.cluster.wait(next_pc, lanes)) is not None:
            raise self._misused(block, lane, "waits without having arrived")
        self._release()

    def _misused(self, block: Block, lane: int, what: str) -> KernelFault:
        return self.diagnosis.fault(
            LAUNCH_FAILED,
            f"{self.diagnosis.line(block)}: {self.diagnosis.thread(lane)} {what}; hint: "
            "barrier.cluster.arrive and barrier.cluster.wait must alternate in every thread",
        )

    def _by_value(self, operand: Operand, lanes: Lanes) -> list[tuple[int, Lanes]]:
        """The lanes that agree on the value of an operand."""
        if isinstance(operand, Immediate):
            return [(int(operand.value), lanes)]
        assert isinstance(operand, Register)
        number = self.program.layout.number(operand.name)
        values = self.wave.registers[number][lanes.numbers()]
        return [(v, lanes.pick(values == v)) for v in np.unique(values).tolist()]

    def _release(self) -> None:
        for pc, lanes in self._barriers.release(self._live):
            self._put(pc, lanes)

    def _converged(self, block: Block, pc: int, lanes: Lanes) -> Lanes | None:
        """Lanes with complete warps at a .sync operation; the others are parked."""
        index = lanes.numbers()
        warp = index // WARP
        here = np.zeros(self.wave.lanes, np.bool_)
        here[index] = True
        alive = self.wave.all_flags() if self._alive is None else self._alive
        present, living = (np.packbits(f, bitorder="little").view("<u4") for f in (here, alive))
        members: Array = np.full(present.size, 0xFFFFFFFF, np.uint32)
        if isinstance(block.members, Immediate):
            members[:] = int(block.members.value) & 0xFFFFFFFF
        elif isinstance(block.members, Register):
            number = self.program.layout.number(block.members.name)
            members[warp] = self.wave.registers[number][index]
        wanted = living & members
        return self._park(pc, lanes, ((present & wanted) == wanted)[warp])

    def _met(self, block: Block, pc: int, lanes: Lanes) -> Lanes | None:
        """Lanes with complete warpgroups at an operation of warpgroups."""
        warpgroups = self.wave.warpgroups
        assert warpgroups is not None
        alive = self.wave.all_flags() if self._alive is None else self._alive
        here = warpgroups.numbers(lanes.numbers())
        if (short := warpgroups.incomplete(alive)[here]).any():
            lane = int(lanes.numbers()[short.argmax()])
            raise self.diagnosis.fault(
                LAUNCH_FAILED,
                f"{self.diagnosis.line(block)}: {self.diagnosis.thread(lane)} is in no warpgroup "
                "of 128 threads, or some of them have ended; hint: a warpgroup is four warps, the "
                "first of them with a number that is a multiple of four",
            )
        return self._park(pc, lanes, warpgroups.complete(here)[here])

    def _park(self, pc: int, lanes: Lanes, complete: Array) -> Lanes | None:
        """The lanes that are complete; the others wait for the rest."""
        if complete.all():
            return lanes
        self._parked[pc] = lanes.pick(~complete)
        return lanes.pick(complete) if complete.any() else None

    def _over_budget(self, pc: int) -> KernelFault:
        at = self.diagnosis.line(self.program.blocks[min(pc, self.program.exit - 1)])
        return self.diagnosis.fault(
            LAUNCH_TIMEOUT, f"more than {self.launch.budget} instructions were run, at {at}"
        )
