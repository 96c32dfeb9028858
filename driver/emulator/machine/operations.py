"""Table of instructions: opcode pattern -> emitter, and the targets that have it."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass

from urdir.driver.emulator.machine.emitter import Handler
from urdir.driver.emulator.machine.faults import UNSUPPORTED_PTX_VERSION, CompileError
from urdir.driver.emulator.machine.operand_rules import Rule, Signature, rules_of
from urdir.ptxgen.ptx import Instruction
from urdir.ptxgen.ptx.architecture import number_of

Version = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Operation:
    """A form of an instruction; ``sm`` and ``version`` are the first that support it.

    ``operands`` is the signature of its operands, see operand_rules.py.
    ``only`` lists the targets if not all newer ones support it. ``converges`` marks ``.sync``
    operations, which wait for the lanes of their warp, ``warpgroup`` those that also wait for the
    other warps of their warpgroup; ``polls`` operations that a waiting loop repeats; ``branches``
    those that cannot be guarded per lane and are branched around instead.
    """

    pattern: re.Pattern[str]
    handler: Handler
    operands: Signature
    sm: int = 0
    version: Version = (0, 0)
    converges: bool = False
    polls: bool = False
    branches: bool = False
    warpgroup: bool = False
    only: frozenset[str] = frozenset()


TABLE: dict[str, list[Operation]] = {}


def operation(
    pattern: str,
    operands: Signature,
    sm: int = 0,
    version: Version = (0, 0),
    *,
    converges: bool = False,
    polls: bool = False,
    branches: bool = False,
    warpgroup: bool = False,
    only: frozenset[str] = frozenset(),
) -> Callable[[Handler], Handler]:
    """Decorator: the handler of every opcode that ``pattern`` matches as a whole.

    The alternatives before the first dot are the opcodes' stems.
    """

    def register(handler: Handler) -> Handler:
        meets = converges or warpgroup
        found = Operation(
            re.compile(pattern), handler, operands, sm, version, meets, polls, branches or meets,
            warpgroup, only,
        )  # fmt: skip
        for stem in re.sub(r"[()]|\?:|\\.*", "", pattern).split("|"):
            TABLE.setdefault(stem, []).append(found)
        return handler

    return register


Found = tuple[Operation, re.Match[str], tuple[Rule, ...]]


def find(instruction: Instruction, target: str, version: Version) -> Found:
    """The operation of an instruction, and what its operands may be; CompileError if the target
    lacks it."""
    try:
        return _find(instruction.opcode, target, version)
    except CompileError as exc:
        raise CompileError(f"PTX line {instruction.line}: {exc.message}", exc.code) from None


@functools.lru_cache(maxsize=1 << 12)  # few opcodes make many texts
def _find(opcode: str, target: str, version: Version) -> Found:
    stem, sm = opcode.partition(".")[0], number_of(target)
    if stem not in TABLE:
        raise CompileError(f"unknown instruction {opcode}")
    for form in TABLE[stem]:
        match = form.pattern.fullmatch(opcode)
        if match is None:
            continue
        if sm < form.sm:
            raise CompileError(f"{opcode} needs .target sm_{form.sm} or higher, not sm_{sm}")
        if form.only and target not in form.only:
            names = " or ".join(sorted(form.only))
            raise CompileError(f"{opcode} needs .target {names}, not {target}")
        if version < form.version:
            raise CompileError(
                f"{opcode} needs PTX ISA .version {form.version[0]}.{form.version[1]} or later, "
                f"not {version[0]}.{version[1]}",
                UNSUPPORTED_PTX_VERSION,
            )
        return form, match, rules_of(form.operands, match)
    raise CompileError(f"{stem} has no form {opcode}")
