"""Control flow of an entry: instructions with their operations, cut into blocks.

A block begins at every label, after every branch or barrier, and at every ``.sync`` operation,
where a scattered group may have to wait for the rest of its warps. Only the first two kinds are
leaders: a group of whole warps runs from leader to leader in one go. The first of several
operations of warpgroups is a leader too: there whole warps may have to wait. What follows such an
operation is a block of its own, for it changes registers that it does not name.
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from urdir.driver.emulator.machine.faults import UNSUPPORTED_PTX_VERSION, CompileError
from urdir.driver.emulator.machine.operand_check import OperandCheck
from urdir.driver.emulator.machine.operand_rules import Rules, rules_of
from urdir.driver.emulator.machine.operations import Operation, find
from urdir.driver.emulator.machine.warps import WARP
from urdir.ptxgen.ptx import Entry, Immediate, Instruction, Label, Module, Operand, Register, Symbol
from urdir.ptxgen.ptx.architecture import number_of


class Ending(enum.Enum):
    """What the scheduler must do at a block's end."""

    FALL = "falls through"
    BRANCH = "branch"
    EXIT = "exit"
    BARRIER = "barrier"
    CLUSTER_ARRIVE = "barrier.cluster.arrive"
    CLUSTER_WAIT = "barrier.cluster.wait"
    DEPENDENCIES = "griddepcontrol.wait"
    TRAP = "trap"


@dataclass(frozen=True, slots=True)
class BarrierForm:
    """bar.sync / bar.arrive: the barrier's number and thread count (None: the whole CTA)."""

    number: Operand
    count: Operand | None
    waits: bool

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Number and count."""
        return (self.number,) if self.count is None else (self.number, self.count)


@dataclass(frozen=True, slots=True)
class Code:
    """An instruction to translate (``operation`` is None for control flow), or a label."""

    instruction: Instruction
    operation: Operation | None
    match: re.Match[str]
    labels: tuple[str, ...] = ()


@dataclass(slots=True)
class Block:
    """codes[start:end] for scattered groups, codes[start:whole_end] for whole warps.

    ``last`` is the pc of the block that ends at ``whole_end``; ``next`` and ``target`` are pcs.
    """

    start: int
    end: int
    leads: bool
    #: The last instruction of the scattered block.
    instruction: Instruction
    first_line: int
    ending: Ending = Ending.FALL
    next: int = 0
    target: int = 0
    guard: Register | None = None
    spins: bool = False
    barrier: BarrierForm | None = None
    whole_end: int = 0
    last: int = 0
    converges: bool = False
    #: The .sync operation that begins it waits for all threads of its warpgroup.
    is_for_warpgroups: bool = False
    #: Member mask of the .sync operation that begins the block: constant or register.
    members: Operand | None = None
    polled: Instruction | None = field(default=None)

    @property
    def cost(self) -> int:
        """Instructions of the scattered block."""
        return self.end - self.start

    @property
    def whole_cost(self) -> int:
        """Instructions up to the next leader."""
        return self.whole_end - self.start


_CONTROL = re.compile(
    r"(?P<branch>bra(?:\.uni)?)|(?P<exit>ret(?:\.uni)?|exit)|(?P<trap>trap)"
    r"|(?P<sync>bar(?:\.cta)?\.sync|barrier(?:\.cta)?\.sync(?:\.aligned)?)"
    r"|(?P<arrive>bar(?:\.cta)?\.arrive|barrier(?:\.cta)?\.arrive(?:\.aligned)?)"
    r"|(?P<wait>griddepcontrol\.wait)|(?P<launch>griddepcontrol\.launch_dependents)"
    r"|(?P<cluster_arrive>barrier\.cluster\.arrive(?:\.(?:release|relaxed))?(?:\.aligned)?)"
    r"|(?P<cluster_wait>barrier\.cluster\.wait(?:\.acquire)?(?:\.aligned)?)"
)
#: What barrier.cluster may say of memory, since PTX ISA 8.0.
_CLUSTER_ORDER = frozenset(("release", "relaxed", "acquire"))
#: Those that sm_90 brought.
_SINCE_90 = frozenset(("wait", "launch", "cluster_arrive", "cluster_wait"))


#: Operands of those that have some.
_OPERANDS = {"branch": "label", "sync": "i32#0..15 (i32#0..2048/32)",
             "arrive": "i32#0..15 i32#0..2048/32"}  # fmt: skip


@functools.cache
def _control_rules(kind: str) -> Rules:
    return rules_of(_OPERANDS.get(kind, ""))


def flatten(module: Module, entry: Entry) -> list[Code]:
    """Instructions with their operations; guards that need it become branches around.

    Raises CompileError for instructions that ptxas would refuse: see `OperandCheck`.
    """
    checks = OperandCheck(module, entry)
    known: dict[str, Found] = {}
    result: list[Code] = []
    labels: list[str] = []
    skips = 0
    for item in entry.body:
        if isinstance(item, Label):
            labels.append(item.name)
            continue
        found = known.get(item.opcode)
        if found is None:
            found = known[item.opcode] = _lookup(item, module)
        operation, match, rules = found
        checks.check(item, rules)
        around = item.predicate is not None and (
            operation.branches if operation else match.lastgroup not in ("branch", "exit")
        )
        if around:
            assert item.predicate is not None
            name = f"skip {(skips := skips + 1)}"
            guard = Register(item.predicate.name, not item.predicate.negated)
            branch = Instruction("bra", ("bra",), (Symbol(name),), guard, item.line, item.text)
            result.append(Code(branch, None, _control(branch), tuple(labels)))
            bare = Instruction(item.opcode, item.parts, item.operands, None, item.line, item.text)
            result.append(Code(bare, operation, match))
            labels = [name]
        else:
            result.append(Code(item, operation, match, tuple(labels)))
            labels = []
    line = result[-1].instruction.line if result else entry.line
    end = Instruction("ret", ("ret",), (), None, line, "ret")
    if labels or not result or result[-1].instruction.opcode not in ("ret", "exit"):
        result.append(Code(end, None, _control(end), tuple(labels)))
    elif result[-1].instruction.predicate is not None:
        result.append(Code(end, None, _control(end)))
    return result


def _control(instruction: Instruction) -> re.Match[str]:
    match = _CONTROL.fullmatch(instruction.opcode)
    assert match is not None
    return match


#: Of an opcode: its operation (None for control flow), the match of its pattern, its rules.
Found = tuple[Operation | None, re.Match[str], Rules]


def _lookup(item: Instruction, module: Module) -> Found:
    target, version = module.target, module.version
    control = _CONTROL.fullmatch(item.opcode)
    if control is None:
        return find(item, target, version)
    if control.lastgroup in _SINCE_90 and number_of(target) < 90:
        raise CompileError(f"PTX line {item.line}: {item.opcode} needs .target sm_90 or higher")
    if _CLUSTER_ORDER & set(item.parts) and item.parts[1] == "cluster" and version < (8, 0):
        raise CompileError(
            f"PTX line {item.line}: {item.opcode} needs PTX ISA .version 8.0 or later, not "
            f"{version[0]}.{version[1]}",
            UNSUPPORTED_PTX_VERSION,
        )
    assert control.lastgroup is not None
    return None, control, _control_rules(control.lastgroup)


def split(codes: list[Code]) -> tuple[list[Block], list[Code]]:
    """Cut into blocks and join them; pcs are indices of the result."""
    blocks = list(_cut(codes))
    pc_of = {block.start: pc for pc, block in enumerate(blocks)}
    label_pc = {name: pc_of[at] for at, code in enumerate(codes) for name in code.labels}
    for pc, block in enumerate(blocks):
        block.next = pc + 1
        _end(block, codes[block.end - 1], label_pc, len(blocks))
    _join(blocks)
    _mark_spins(blocks, codes)
    return blocks, codes


def _cut(codes: list[Code]) -> Iterator[Block]:
    start, leads, met = 0, True, False
    for at, code in enumerate(codes):
        last = at + 1 == len(codes)
        ends = code.operation is None and code.match.lastgroup != "launch"
        following = None if last else codes[at + 1]
        label = following is not None and bool(following.labels)
        operation = None if following is None else following.operation
        converges = operation is not None and operation.converges
        is_for_warpgroups = code.operation is not None and code.operation.warpgroup
        if last or ends or label or converges or is_for_warpgroups:
            first = codes[start]
            line = first.instruction.line
            block = Block(start, at + 1, leads, code.instruction, line)
            if first.operation is not None and first.operation.converges:
                block.converges = True
                block.is_for_warpgroups = first.operation.warpgroup
                block.members = _members(first.instruction)
            yield block
            met = (met or is_for_warpgroups) and not (ends or label)
            meets = operation is not None and operation.warpgroup and not met
            start, leads = at + 1, ends or label or meets


def _members(instruction: Instruction) -> Operand:
    """The member mask of a .sync operation: its last operand; all lanes for .aligned ones."""
    if "aligned" in instruction.parts or not instruction.operands:
        return Immediate(0xFFFFFFFF)
    return instruction.operands[-1]


def _end(block: Block, code: Code, label_pc: dict[str, int], exit_pc: int) -> None:
    """Fill in how the block ends."""
    instruction = code.instruction
    kind = code.match.lastgroup if code.operation is None else None
    if kind == "branch":
        (target,) = instruction.operands
        if not isinstance(target, Symbol) or target.name not in label_pc:
            raise CompileError(f"PTX line {instruction.line}: {instruction.text}: no such label")
        block.ending, block.target = Ending.BRANCH, label_pc[target.name]
        block.guard = instruction.predicate
    elif kind == "exit":
        if instruction.predicate is None:
            block.ending, block.next = Ending.EXIT, exit_pc
        else:
            block.ending, block.target = Ending.BRANCH, exit_pc
            block.guard = instruction.predicate
    elif kind in ("sync", "arrive"):
        number, *count = instruction.operands
        if count and isinstance(count[0], Immediate) and int(count[0].value) % WARP:
            raise CompileError(
                f"PTX line {instruction.line}: {instruction.text}: the number of threads must be a "
                f"multiple of {WARP}"
            )
        block.ending = Ending.BARRIER
        block.barrier = BarrierForm(number, count[0] if count else None, kind == "sync")
    elif kind in ("cluster_arrive", "cluster_wait"):
        block.ending = Ending.CLUSTER_WAIT if kind == "cluster_wait" else Ending.CLUSTER_ARRIVE
    elif kind == "wait":
        block.ending = Ending.DEPENDENCIES
    elif kind == "trap":
        block.ending = Ending.TRAP


def _join(blocks: list[Block]) -> None:
    """Find for each leader where the next one begins."""
    for pc, block in enumerate(blocks):
        last = pc
        while last + 1 < len(blocks) and not blocks[last + 1].leads:
            last += 1
        block.last, block.whole_end = last, blocks[last].end


def _mark_spins(blocks: list[Block], codes: list[Code]) -> None:
    """A backward branch spins when its loop polls memory, an atomic or a clock."""
    for pc, block in enumerate(blocks):
        if block.ending is not Ending.BRANCH or block.target > pc:
            continue
        for code in codes[blocks[block.target].start : block.end]:
            if code.operation is not None and code.operation.polls:
                block.spins = True
                block.polled = code.instruction
