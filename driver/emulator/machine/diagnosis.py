"""Diagnosis of a failed or waiting wave: kernel, PTX line, threads, addresses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from urdir.driver.emulator.machine.barriers import Barriers
from urdir.driver.emulator.machine.compile import Program
from urdir.driver.emulator.machine.faults import AccessFault, KernelFault
from urdir.driver.emulator.machine.flow import Block
from urdir.driver.emulator.machine.groups import Extent, Lanes, thread_name
from urdir.driver.emulator.machine.wave import Wave
from urdir.ptxgen.ptx import Address, Register, Symbol

#: Start of a fault's message -> its usual cause.
_HINTS = {
    "out-of-bounds": "is the tail guarded, and do index, stride and offset count elements or "
    "bytes as they should?",
    "misaligned": "an access of n bytes needs an address that is a multiple of n: look at the "
    "base, the stride and the offset, or take a narrower vector",
    "load of never-written": "nothing has written it yet: an initial value, a barrier, "
    "griddepcontrol.wait or an edge of the graph may be missing",
    "load of bytes whose asynchronous": "cp.async.wait_group, or a wait for the copy's mbarrier, "
    "must come first",
    "access beyond the cluster": "is the kernel launched with the cluster that it is written for? "
    "Ranks are below %cluster_nctarank",
    "access to a CTA that has ended": "barrier.cluster.arrive and barrier.cluster.wait at the end "
    "keep a CTA until the others have done with its shared memory",
}


def _hint(message: str) -> str:
    return next(
        (f"; hint: {hint}" for start, hint in _HINTS.items() if message.startswith(start)), ""
    )


class Diagnosis:
    """Names lanes and lines of one wave."""

    def __init__(self, program: Program, wave: Wave, first_cta: int, grid: Extent) -> None:
        self.program = program
        self.wave = wave
        self.first_cta = first_cta
        self.grid = grid

    def fault(self, code: str, message: str) -> KernelFault:
        """A fault of the kernel."""
        return KernelFault(code, f"kernel {self.program.name}: {message}")

    def line(self, block: Block) -> str:
        """The last instruction of a block."""
        return f"PTX line {block.instruction.line} ({block.instruction.text})"

    def thread(self, lane: int) -> str:
        """A lane's thread and CTA."""
        cta = self.first_cta + lane // self.wave.lanes_per_cta
        tid = lane % self.wave.lanes_per_cta
        return thread_name(cta, tid, self.wave.block, self.grid, self.wave.cluster)

    def threads(self, lanes: Lanes) -> str:
        """How many lanes, and the first of them."""
        return f"{lanes.count} threads ({self.thread(lanes.first)}, ...)"

    def access(self, fault: AccessFault, lanes: Lanes) -> KernelFault:
        """An access fault with the PTX line, found through the generated function's frame."""
        line = 0
        tables = self.program.line_tables()
        frame = fault.__traceback__
        while frame is not None:
            table = tables.get(frame.tb_frame.f_code.co_filename)
            if table is not None:
                line = table[frame.tb_lineno]
            frame = frame.tb_next
        line = fault.line or line
        text = self.program.instructions.get(line, "")
        lane = int(lanes.numbers()[fault.position])
        where = f"PTX line {line} ({text}), {self.thread(lane)}"
        return self.fault(fault.code, f"{where}: {fault}{_hint(str(fault))}")

    def waits(
        self,
        spinning: Iterable[tuple[int, Lanes, Block]],
        barriers: Barriers,
        parked: Mapping[int, Lanes],
    ) -> Iterator[str]:
        """What every waiting group waits for."""
        for _, lanes, block in spinning:
            polled = block.polled or block.instruction
            where = self._polled_address(block, lanes)
            yield f"{lanes.count} threads spin at PTX line {polled.line} ({polled.text}){where}"
        for name, pc, lanes in barriers.waiting():
            at = self.line(self.program.blocks[pc - 1])
            yield f"{self.threads(lanes)} wait at {name}, {at}"
        for pc, lanes in parked.items():
            line = self.program.blocks[pc].first_line
            whom = "the lanes of their warp that its member mask names"
            if self.program.blocks[pc].is_for_warpgroups:
                whom = "all threads of their warpgroup"
            yield f"{self.threads(lanes)} wait at PTX line {line} for {whom}"

    def _polled_address(self, block: Block, lanes: Lanes) -> str:
        """The address that a polling instruction reads."""
        for operand in block.polled.operands if block.polled else ():
            if not isinstance(operand, Address):
                continue
            if isinstance(operand.base, Symbol):
                return f", variable {operand.base.name}"
            if isinstance(operand.base, Register):
                number = self.program.layout.number(operand.base.name)
                address = int(self.wave.registers[number][lanes.first]) + operand.offset
                where = self.wave.memory.memory.describe(address)
                if self.program.layout.width(number) == 4:
                    where = self.wave.shared.describe(address)
                return f", address 0x{address:x}, {where}"
        return ""
