"""Table of instructions: opcode pattern -> emitter, and the targets that have it."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from urdir.driver.emulator.machine.emitter import Handler
from urdir.driver.emulator.machine.faults import UNSUPPORTED_PTX_VERSION, CompileError
from urdir.driver.emulator.machine.operand_rules import Rules, Signature, rules_of
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

    pattern: str
    handler: Handler
    operands: Signature
    sm: int = 0
    version: Version = (0, 0)
    converges: bool = False
    polls: bool = False
    branches: bool = False
    warpgroup: bool = False
    only: frozenset[str] = frozenset()

    def match(self, opcode: str) -> re.Match[str] | None:
        """The match of a whole opcode. Patterns are compiled at first use: many never are."""
        return _compiled(self.pattern).fullmatch(opcode)

    def signature(self, match: re.Match[str]) -> str:
        """The signature of an opcode that the pattern matches; CompileError if it has none."""
        return self.operands if isinstance(self.operands, str) else self.operands(match)


_compiled = functools.cache(re.compile)

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
            pattern, handler, operands, sm, version, meets, polls, branches or meets,
            warpgroup, only,
        )  # fmt: skip
        for stem in re.sub(r"[()]|\?:|\\.*", "", pattern).split("|"):
            TABLE.setdefault(stem, []).append(found)
        return handler

    return register


Found = tuple[Operation, re.Match[str], Rules]


def find(instruction: Instruction, target: str, version: Version) -> Found:
    """The operation of an instruction, and what its operands may be; CompileError if the target
    lacks it."""
    try:
        return _find(instruction.opcode, target, version)
    except CompileError as exc:
        raise CompileError(f"PTX line {instruction.line}: {exc.message}", exc.code) from None


#: What modifiers need, some of one instruction only, besides the instruction itself.
_MODIFIERS: Mapping[str, tuple[int, Version]] = {
    "shared::cta": (0, (7, 8)), "cluster": (90, (7, 8)),
    "mbarrier.acquire": (80, (8, 0)), "mbarrier.release": (80, (8, 0)),
    "L2::64B": (75, (7, 4)), "L2::128B": (75, (7, 4)), "L2::256B": (80, (7, 4)),
    "L2::cache_hint": (80, (7, 4)), "L1::no_allocate": (70, (7, 4)),
    **{f"L1::evict_{when}": (70, (7, 4)) for when in ("normal", "unchanged", "first", "last")},
}  # fmt: skip


@functools.lru_cache(maxsize=1 << 12)  # few opcodes make many texts
def _find(opcode: str, target: str, version: Version) -> Found:
    stem, *parts = opcode.split(".")
    if stem not in TABLE:
        raise CompileError(f"unknown instruction {opcode}")
    missing = CompileError(f"{stem} has no form {opcode}")
    for form in TABLE[stem]:
        match = form.match(opcode)
        if match is None:
            continue
        try:
            _check_target(opcode, target, version, form.sm, form.version)
        except CompileError as exc:
            missing = exc
            continue
        if form.only and target not in form.only:
            names = " or ".join(sorted(form.only))
            raise CompileError(f"{opcode} needs .target {names}, not {target}")
        for part in parts:
            needed = _MODIFIERS.get(part) or _MODIFIERS.get(f"{stem}.{part}")
            if needed is not None:
                _check_target(f".{part} of {opcode}", target, version, *needed)
        return form, match, rules_of(form.signature(match), match.groups())
    raise missing


def _check_target(what: str, target: str, version: Version, sm: int, first: Version) -> None:
    if number_of(target) < sm:
        raise CompileError(f"{what} needs .target sm_{sm} or higher, not sm_{number_of(target)}")
    if version < first:
        raise CompileError(
            f"{what} needs PTX ISA .version {first[0]}.{first[1]} or later, "
            f"not {version[0]}.{version[1]}",
            UNSUPPORTED_PTX_VERSION,
        )
