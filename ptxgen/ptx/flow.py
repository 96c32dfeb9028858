"""Control flow of an entry: basic blocks, registers read and written, dominance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from urdir.ptxgen.ptx.syntax import (
    Address,
    Entry,
    Instruction,
    Label,
    Operand,
    Pair,
    Register,
    Symbol,
    Vector,
)

#: Opcodes without a result: a register as first operand is read.
WITHOUT_RESULT = frozenset({"bar", "barrier", "bra", "nanosleep", "setmaxnreg"})

#: Opcodes after which, unless predicated, the next instruction does not follow.
LEAVES = frozenset({"ret", "exit", "trap"})
#: Opcodes that end the thread.
ENDS = frozenset({"ret", "exit"})


@dataclass(frozen=True, slots=True)
class Block:
    """Instructions in sequence, and the numbers of the possible next blocks.

    ``falls_off``: the end of the entry may follow without a ``ret``.
    """

    instructions: tuple[Instruction, ...]
    successors: tuple[int, ...]
    falls_off: bool = False


def registers(operand: Operand) -> tuple[str, ...]:
    """The names of the registers in an operand, those of an address included."""
    if isinstance(operand, Register):
        return (operand.name,)
    if isinstance(operand, Address):
        return (operand.base.name,) if isinstance(operand.base, Register) else ()
    if isinstance(operand, Vector):
        return tuple(name for element in operand.elements for name in registers(element))
    return registers(operand.first) + registers(operand.second) if isinstance(operand, Pair) else ()


def has_result(instruction: Instruction) -> bool:
    """Whether the first operand is written; otherwise every operand is read."""
    if not instruction.operands or isinstance(instruction.operands[0], Address):
        return False
    return instruction.parts[0] not in WITHOUT_RESULT or "red" in instruction.parts


def writes(instruction: Instruction) -> tuple[str, ...]:
    """The registers that an instruction writes."""
    return registers(instruction.operands[0]) if has_result(instruction) else ()


def reads(instruction: Instruction) -> tuple[str, ...]:
    """The registers that an instruction reads, its predicate included."""
    sources = instruction.operands[1:] if has_result(instruction) else instruction.operands
    guard = (instruction.predicate.name,) if instruction.predicate else ()
    return guard + tuple(name for operand in sources for name in registers(operand))


def branch_target(instruction: Instruction) -> str | None:
    """The target label of a ``bra``; None for any other instruction."""
    if instruction.parts[0] != "bra":
        return None
    target = instruction.operands[0]
    assert isinstance(target, Symbol)
    return target.name


def blocks(entry: Entry) -> tuple[Block, ...]:
    """The basic blocks of an entry, in the order of the text; the first one is where it starts."""
    pieces: list[list[Instruction]] = [[]]
    at_label: dict[str, int] = {}
    for item in entry.body:
        if isinstance(item, Label):
            if pieces[-1]:
                pieces.append([])
            at_label[item.name] = len(pieces) - 1
            continue
        pieces[-1].append(item)
        if item.parts[0] == "bra" or item.parts[0] in LEAVES:
            pieces.append([])
    if not pieces[-1] and len(pieces) - 1 not in at_label.values():
        pieces.pop()  # nothing follows the last ret
    return tuple(_block(pieces, index, at_label) for index in range(len(pieces)))


def _block(pieces: Sequence[Sequence[Instruction]], index: int, at_label: dict[str, int]) -> Block:
    successors: list[int] = []
    last = pieces[index][-1] if pieces[index] else None
    if last and (label := branch_target(last)):
        successors.append(at_label[label])
    leaves = last is not None and last.predicate is None and last.parts[0] in (*LEAVES, "bra")
    falls_off = not leaves and index + 1 == len(pieces)
    if not leaves and not falls_off:
        successors.append(index + 1)
    return Block(tuple(pieces[index]), tuple(dict.fromkeys(successors)), falls_off)


def reachable(graph: Sequence[Block], start: int = 0) -> frozenset[int]:
    """The blocks that may run after block ``start``, itself included."""
    seen, waiting = {start}, [start]
    while waiting:
        for successor in graph[waiting.pop()].successors:
            if successor not in seen:
                seen.add(successor)
                waiting.append(successor)
    return frozenset(seen)


def post_dominators(graph: Sequence[Block]) -> list[frozenset[int]]:
    """For each block the blocks on every path from it to the end, itself included. ``trap`` does
    not count as an end: it ends the whole grid."""
    everything = frozenset(range(len(graph)))
    result = [everything] * len(graph)
    changed = True
    while changed:
        changed = False
        for index in reversed(range(len(graph))):
            block = graph[index]
            last = block.instructions[-1].parts[0] if block.instructions else ""
            ends = last in ENDS or block.falls_off
            after = [result[s] for s in block.successors] + [frozenset()] * ends
            found = frozenset({index}).union(frozenset.intersection(everything, *after))
            if found != result[index]:
                result[index] = found
                changed = True
    return result
