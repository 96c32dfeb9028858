"""Runs a grid: groups of lanes at one pc, lowest pc first, wave after wave of CTAs."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from urdir.driver.emulator.arithmetic import underflow
from urdir.driver.emulator.barriers import Barriers
from urdir.driver.emulator.compile import Program, target_number
from urdir.driver.emulator.faults import (
    LAUNCH_FAILED,
    LAUNCH_TIMEOUT,
    AccessFault,
    KernelFault,
)
from urdir.driver.emulator.flow import Block, Ending
from urdir.driver.emulator.groups import Lanes
from urdir.driver.emulator.memory import Memory
from urdir.driver.emulator.wave import Wave
from urdir.ptxgen.ptx import Immediate, Register

Array = npt.NDArray[Any]
Extent = tuple[int, int, int]

#: Instructions (of a group, whatever its lanes) that a launch may run.
DEFAULT_BUDGET = 20_000_000
#: Iterations of a polling loop before its group lets others run.
YIELD_AFTER = 4
#: Rounds of all groups, with no change between them, that make a deadlock.
IDLE_ROUNDS = 64
#: The same, before the caller is asked to run something else.
IDLE_ROUNDS_SHARED = 2

# Threads and bytes of shared memory of one SM, by compute capability (CUDA C++ guide, table of
# technical specifications); the last line that is not above the target counts.
_SM_LIMITS = ((50, 2048, 65536), (75, 1024, 65536), (80, 2048, 167936), (86, 1536, 102400),
              (87, 2048, 167936), (89, 1536, 102400), (90, 2048, 233472),
              (120, 1536, 102400))  # fmt: skip
MAX_CTAS_PER_SM = 32


class Status(enum.Enum):
    """Where a grid stands."""

    DONE = "done"
    DEPENDENCY_WAIT = "waits for the kernels before it"
    YIELDED = "spins until something else runs"


def ctas_per_sm(target: str, threads: int, shared_bytes: int) -> int:
    """CTAs that one SM of ``target`` holds at once, 0 when not even one fits."""
    number = target_number(target)
    _, limit, shared = [row for row in _SM_LIMITS if row[0] <= number][-1]
    by_threads = limit // (-(-threads // 32) * 32)
    by_shared = shared // (shared_bytes + 1024) if shared_bytes else MAX_CTAS_PER_SM
    return min(MAX_CTAS_PER_SM, by_threads, by_shared)


class GridExecution:
    """One launch of a program. ``run`` again after YIELDED or DEPENDENCY_WAIT.

    ``params`` is the parameter block as laid out by ``program.param_layout``; ``shared_bytes``
    counts dynamic shared memory; ``symbols`` are the addresses of module-level variables.
    """

    def __init__(
        self,
        program: Program,
        grid: Extent,
        block: Extent,
        cluster: Extent,
        shared_bytes: int,
        params: bytes,
        memory: Memory,
        sm_count: int,
        *,
        symbols: Mapping[str, int] | None = None,
        budget: int = DEFAULT_BUDGET,
        dependencies_pending: bool = False,
    ) -> None:
        if len(params) < program.param_bytes:
            raise ValueError(
                f"kernel {program.name} takes {program.param_bytes} bytes of parameters, "
                f"not {len(params)}"
            )
        self.program = program
        self.grid = grid
        self.block = block
        self.cluster = cluster
        self.shared_bytes = program.static_shared_bytes + shared_bytes
        self.params = params
        self.memory = memory
        self.sm_count = sm_count
        self.symbols = symbols or {}
        self.budget = budget
        self.dependencies_pending = dependencies_pending
        self.spent = 0
        self._threads = block[0] * block[1] * block[2]
        self._total = grid[0] * grid[1] * grid[2]
        held = ctas_per_sm(program.target, self._threads, self.shared_bytes)
        size = cluster[0] * cluster[1] * cluster[2]
        self._ctas_at_once = max(1, held * sm_count // size) * size
        self._next_cta = 0
        self._wave: Wave | None = None
        self._done = False

    def release_dependencies(self) -> None:
        """The kernels before this one are complete."""
        self.dependencies_pending = False

    def run(self, alone: bool = False) -> Status:
        """Run as far as possible; raises KernelFault.

        A grid whose threads all wait for memory that nobody in it changes is YIELDED, or a
        deadlock (KernelFault) when it is ``alone``: nothing else can run.
        """
        if self._done:
            return Status.DONE
        with np.errstate(all="ignore", under="call", call=underflow):
            while True:
                if self._wave is None and not self._begin_wave():
                    self._done = True
                    return Status.DONE
                status = self._run_wave(alone)
                if status is not Status.DONE:
                    return status
                self._end_wave()

    def waits_for(self) -> str:
        """What the spinning or waiting groups are at, for messages."""
        return "; ".join(self._waits())

    # ---- waves ----

    def _begin_wave(self) -> bool:
        ctas = min(self._ctas_at_once, self._total - self._next_cta)
        if ctas <= 0:
            return False
        key = (ctas, self.block, self.cluster, self.shared_bytes)
        idle = self.program.idle.setdefault(key, [])
        try:  # another thread's device may run the same program
            wave = idle.pop()
        except IndexError:
            wave = Wave(self.program, ctas, self.block, self.cluster, self.shared_bytes)
        assert isinstance(wave, Wave)
        self._wave, self._key = wave, key
        wave.memory.memory = self.memory
        wave.params[: len(self.params)] = np.frombuffer(self.params, np.uint8)
        wave.set_ctas(self._next_cta, self.grid, self.cluster, self.sm_count)
        wave.shared.clear()
        wave.asynchronous.clear()
        for name, address in self.symbols.items():
            wave.set_special(f"g_{name}", address)
        self._next_cta += ctas
        self._barriers = Barriers(ctas, wave.lanes_per_cta)
        self._live = np.full(ctas, self._threads, np.int64)
        self._alive: Array | None = None
        self._ready: dict[int, Lanes] = {}
        self._parked: dict[int, Lanes] = {}
        self._yielded: list[tuple[int, Lanes, Block]] = []
        self._dependents: list[tuple[int, Lanes]] = []
        self._idle_rounds = 0
        self._last_round: object = None
        self._ready[0] = self._all_lanes(wave)
        return True

    def _all_lanes(self, wave: Wave) -> Lanes:
        if self._threads == wave.lanes_per_cta:
            return Lanes(0, wave.lanes)
        return Lanes.of(np.flatnonzero(wave.numbers % wave.lanes_per_cta < self._threads))

    def _end_wave(self) -> None:
        assert self._wave is not None
        self.program.idle[self._key].append(self._wave)
        self._wave = None

    def _run_wave(self, alone: bool) -> Status:
        while True:
            while self._ready:
                pc = min(self._ready)
                self._run_group(pc, self._ready.pop(pc))
            if self._dependents and not self.dependencies_pending:
                for pc, lanes in self._dependents:
                    self._put(pc, lanes)
                self._dependents = []
            elif self._yielded:
                if not self._next_round(alone):
                    return Status.YIELDED
            elif self._dependents:
                return Status.DEPENDENCY_WAIT
            elif self._parked or self._barriers.waiting():
                raise self._fault(
                    LAUNCH_TIMEOUT, f"deadlock: {self.waits_for()}, and nobody else will come"
                )
            else:
                return Status.DONE

    def _next_round(self, alone: bool) -> bool:
        """Let the groups that yielded poll again; False when that is in vain for now."""
        assert self._wave is not None
        state = (
            self._wave.changes.count,
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
            raise self._fault(LAUNCH_TIMEOUT, f"deadlock: {self.waits_for()}")
        groups, self._yielded = self._yielded, []
        for pc, lanes, _ in groups:
            self._put(pc, lanes)
        return True

    # ---- groups ----

    def _put(self, pc: int, lanes: Lanes) -> None:
        """Make a group ready, together with whoever is at its pc."""
        for others in (self._ready, self._parked):
            if pc in others:
                lanes = others.pop(pc).merge(lanes)
        self._ready[pc] = lanes

    def _run_group(self, pc: int, lanes: Lanes) -> None:
        """Run a group until it meets, splits, waits or ends, or a lower pc must run first."""
        assert self._wave is not None
        program = self.program
        limit = min(self._ready, default=program.exit)
        if self._parked:
            limit = min(limit, *self._parked)
        whole = lanes.index is None
        if whole:
            functions = self._wave.bind(lanes.start, lanes.stop)
            whole = functions[pc] is not None
        if not whole:
            self._run_scattered(pc, lanes)
            return
        blocks = program.blocks
        polls = 0
        try:
            while True:
                next_pc = functions[pc]()  # type: ignore[misc]
                block = blocks[pc]
                self.spent += block.whole_cost
                if next_pc.__class__ is int:
                    if 0 <= next_pc < limit:
                        pc = next_pc
                        continue
                    if next_pc >= 0:
                        self._put_or_end(next_pc, lanes)
                        return
                    last = blocks[block.last]
                    next_pc = ~next_pc
                    if last.ending is Ending.BARRIER and self._passes(last, lanes):
                        if next_pc < limit:
                            pc = next_pc
                            continue
                        self._put_or_end(next_pc, lanes)
                        return
                    if last.spins:
                        polls += 1
                        self._check_budget(last)
                        if polls < YIELD_AFTER and next_pc < limit:
                            pc = next_pc
                            continue
                    self._attend(last, next_pc, lanes)
                    return
                self._branch(blocks[block.last], next_pc, lanes)
                return
        except AccessFault as fault:
            raise self._access_fault(fault, lanes) from None

    def _run_scattered(self, pc: int, lanes: Lanes) -> None:
        """Run one block of a scattered group."""
        assert self._wave is not None
        block = self.program.blocks[pc]
        if block.converges:
            found = self._converged(block, pc, lanes)
            if found is None:
                return
            lanes = found
        function = self._wave.scattered()[pc]
        assert function is not None
        try:
            next_pc = function(lanes.numbers())
        except AccessFault as fault:
            raise self._access_fault(fault, lanes) from None
        self.spent += block.cost
        if next_pc.__class__ is not int:
            self._branch(block, next_pc, lanes)
        elif next_pc >= 0:
            self._put_or_end(next_pc, lanes)
        elif block.ending is Ending.BARRIER and self._passes(block, lanes):
            self._put_or_end(~next_pc, lanes)
        else:
            self._attend(block, ~next_pc, lanes)

    def _put_or_end(self, pc: int, lanes: Lanes) -> None:
        self._check_budget(None)
        if pc == self.program.exit:
            self._exit(lanes)
        else:
            self._put(pc, lanes)

    def _branch(self, block: Block, mask: Array, lanes: Lanes) -> None:
        """Lanes disagree about a branch."""
        taken, others = lanes.pick(mask), lanes.pick(~mask)
        if block.spins:
            self._check_budget(block)
            self._yielded.append((block.target, taken, block))
        else:
            self._put_or_end(block.target, taken)
        self._put_or_end(block.next, others)

    def _attend(self, block: Block, next_pc: int, lanes: Lanes) -> None:
        """See to a block's ending for all lanes of a group."""
        if block.ending is Ending.EXIT:
            self._exit(lanes)
        elif block.ending is Ending.BARRIER:
            self._arrive(block, next_pc, lanes)
        elif block.ending is Ending.DEPENDENCIES:
            if self.dependencies_pending:
                self._dependents.append((next_pc, lanes))
            else:
                self._put_or_end(next_pc, lanes)
        elif block.ending is Ending.TRAP:
            raise self._fault(
                LAUNCH_FAILED,
                f"trap at {self._line(block)}, {self._thread(int(lanes.numbers()[0]))}",
            )
        else:
            self._check_budget(block)
            self._yielded.append((next_pc, lanes, block))

    def _exit(self, lanes: Lanes) -> None:
        assert self._wave is not None
        cta = lanes.numbers() // self._wave.lanes_per_cta
        self._live -= np.bincount(cta, minlength=self._wave.ctas)
        if not self._live.any():
            return
        if self._alive is None:
            self._alive = np.zeros(self._wave.lanes, np.bool_)
            self._alive[self._all_lanes(self._wave).numbers()] = True
        self._alive[lanes.numbers()] = False
        self._release()
        for pc, parked in list(self._parked.items()):
            del self._parked[pc]
            self._put(pc, parked)

    # ---- barriers ----

    def _passes(self, block: Block, lanes: Lanes) -> bool:
        """Whether the group is all threads of its CTAs, so that nobody waits at the barrier."""
        assert self._wave is not None and block.barrier is not None
        size = self._wave.lanes_per_cta
        count = block.barrier.count
        return (
            lanes.index is None
            and lanes.start % size == 0
            and lanes.stop % size == 0
            and block.barrier.waits
            and (count is None or (isinstance(count, Immediate) and count.value == size))
        )

    def _arrive(self, block: Block, next_pc: int, lanes: Lanes) -> None:
        assert block.barrier is not None and self._wave is not None
        number = self._value(block.barrier.number, lanes)
        count = 0 if block.barrier.count is None else self._value(block.barrier.count, lanes)
        waits = block.barrier.waits
        self._barriers.arrive(number, count, lanes, next_pc if waits else None)
        self._release()
        if not waits:
            self._put_or_end(next_pc, lanes)

    def _value(self, operand: object, lanes: Lanes) -> int:
        """A barrier operand, which all threads of a group must agree on."""
        if isinstance(operand, Immediate):
            return int(operand.value)
        assert isinstance(operand, Register) and self._wave is not None
        values = self._wave.registers[self.program.layout.number(operand.name)][lanes.numbers()]
        if (values != values[0]).any():
            raise self._fault(LAUNCH_FAILED, f"threads of a warp name several {operand.name}")
        return int(values[0])

    def _release(self) -> None:
        for pc, lanes in self._barriers.release(self._live):
            self._put(pc, lanes)

    def _converged(self, block: Block, pc: int, lanes: Lanes) -> Lanes | None:
        """Lanes whose warps are complete at a .sync operation; the others are parked."""
        assert self._wave is not None
        index = lanes.numbers()
        warps = self._wave.lanes // 32
        warp = index >> 5
        bits = np.float64(2.0) ** (index & 31)
        here = np.bincount(warp, bits, warps).astype(np.int64)
        live = np.full(warps, 0xFFFFFFFF, np.int64)
        if self._alive is not None or self._threads != self._wave.lanes_per_cta:
            alive = self._alive
            if alive is None:
                alive = np.zeros(self._wave.lanes, np.bool_)
                alive[self._all_lanes(self._wave).numbers()] = True
            live = np.packbits(alive, bitorder="little").view(np.uint32).astype(np.int64)
        members: Any = 0xFFFFFFFF
        if isinstance(block.members, Immediate):
            members = int(block.members.value) & 0xFFFFFFFF
        elif isinstance(block.members, Register):
            if block.members.name in self.program.layout.numbers:
                number = self.program.layout.number(block.members.name)
                members = np.zeros(warps, np.int64)
                members[warp] = self._wave.registers[number][index]
        wanted = live & members
        complete = ((here & wanted) == wanted)[warp]
        if complete.all():
            return lanes
        missing = lanes.pick(~complete)
        self._parked[pc] = missing
        return lanes.pick(complete) if complete.any() else None

    # ---- faults ----

    def _check_budget(self, block: Block | None) -> None:
        if self.spent > self.budget:
            where = f" at {self._line(block)}" if block else ""
            raise self._fault(
                LAUNCH_TIMEOUT, f"more than {self.budget} instructions were run{where}"
            )

    def _fault(self, code: str, message: str) -> KernelFault:
        return KernelFault(code, f"kernel {self.program.name}: {message}")

    def _line(self, block: Block) -> str:
        return f"PTX line {block.instruction.line} ({block.instruction.text})"

    def _thread(self, lane: int) -> str:
        assert self._wave is not None
        size = self._wave.lanes_per_cta
        cta = self._next_cta - self._wave.ctas + lane // size
        tid = lane % size
        x, y, _ = self.block
        gx, gy, _ = self.grid
        return (
            f"thread ({tid % x}, {tid // x % y}, {tid // (x * y)}) "
            f"of CTA ({cta % gx}, {cta // gx % gy}, {cta // (gx * gy)})"
        )

    def _access_fault(self, fault: AccessFault, lanes: Lanes) -> KernelFault:
        """Add kernel, PTX line and thread, found through the generated function's frame."""
        line = 0
        tables = {f"<emulated {self.program.name}, whole>": self.program.whole_lines}
        if lanes.index is not None or self.program._scattered is not None:
            tables[f"<emulated {self.program.name}, scattered>"] = self.program.scattered[1]
        frame = fault.__traceback__
        while frame is not None:
            table = tables.get(frame.tb_frame.f_code.co_filename)
            if table is not None:
                line = table[frame.tb_lineno]
            frame = frame.tb_next
        text = self.program.instructions.get(line, "")
        lane = int(lanes.numbers()[fault.position])
        return self._fault(
            fault.code, f"PTX line {line} ({text}), {self._thread(lane)}: {fault}"
        )

    def _waits(self) -> list[str]:
        waits = []
        if self._wave is None:
            return waits
        for _, lanes, block in self._yielded or self._last_yielded():
            polled = block.polled
            what = f"PTX line {polled.line} ({polled.text})" if polled else self._line(block)
            where = self._polled_address(block, lanes)
            waits.append(f"{lanes.count} threads spin at {what}{where}")
        for number, pc, lanes in self._barriers.waiting():
            at = self.program.blocks[pc - 1]
            first = self._thread(int(lanes.numbers()[0]))
            waits.append(
                f"{lanes.count} threads ({first}, ...) wait at barrier {number}, {self._line(at)}"
            )
        for pc, lanes in self._parked.items():
            line = self.program.blocks[pc].instruction
            first = self._thread(int(lanes.numbers()[0]))
            waits.append(
                f"{lanes.count} threads ({first}, ...) wait at PTX line {line.line} for the lanes "
                "of their warp that its member mask names"
            )
        return waits

    def _last_yielded(self) -> list[tuple[int, Lanes, Block]]:
        return []

    def _polled_address(self, block: Block, lanes: Lanes) -> str:
        """The address that a polling instruction looks at, where a register holds it."""
        from urdir.ptxgen.ptx import Address

        assert self._wave is not None
        for operand in block.polled.operands if block.polled else ():
            if not isinstance(operand, Address) or not isinstance(operand.base, Register):
                continue
            number = self.program.layout.numbers.get(operand.base.name)
            if number is None:
                continue
            address = int(self._wave.registers[number][lanes.numbers()[0]]) + operand.offset
            return f", address 0x{address:x}, {self.memory.describe(address)}"
        return ""
