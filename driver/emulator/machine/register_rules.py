"""Rules for registers that wgmma uses (PTX ISA 9.7.15.3, wgmma.fence, wgmma.mma_async).

Until a wgmma was waited for, other instructions must not access its accumulators nor write the
registers of A. After other instructions accessed these registers, a wgmma.fence must precede the
next wgmma that uses them. Register sets are bits of Python integers, which makes checks cheap.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from urdir.driver.emulator.machine.faults import LAUNCH_FAILED, AccessFault


@dataclass(frozen=True, slots=True)
class Touch:
    """The registers that an instruction reads and writes, as bits."""

    line: int
    text: str
    reads: int
    writes: int


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """Instructions that run one after the other, with no wgmma between them."""

    touches: tuple[Touch, ...]
    reads: int
    writes: int


@dataclass(frozen=True, slots=True)
class Operands:
    """The registers of a wgmma: accumulators in order and as bits, and A's as bits (0 if A is in
    memory)."""

    line: int
    text: str
    accumulators: tuple[int, ...]
    d: int
    a: int


@dataclass(slots=True)
class _State:
    """One warpgroup: pending wgmmas, each with the number of its group."""

    pending: list[tuple[int, Operands]] = field(default_factory=list)
    #: All accumulators and A registers of the pending ones.
    d: int = 0
    a: int = 0
    #: Instructions since the last fence; None: no fence yet.
    since: dict[Stretch, None] | None = None


def bits_of(numbers: Iterable[int]) -> int:
    """Registers as bits."""
    bits = 0
    for number in numbers:
        bits |= 1 << number
    return bits


class RegisterRules:
    """Checks the registers of all warpgroups of a wave. Raises AccessFault."""

    def __init__(self, warpgroups: int, names: Sequence[str]) -> None:
        self._names = names
        self._count = warpgroups
        self.clear()

    def clear(self) -> None:
        """New CTAs."""
        self._states = [_State() for _ in range(self._count)]

    def run(self, stretch: Stretch, warpgroups: Iterable[int]) -> None:
        """Check other instructions that threads of these warpgroups are about to run."""
        for at, number in enumerate(warpgroups):
            state = self._states[number]
            if (stretch.reads | stretch.writes) & state.d or stretch.writes & state.a:
                self._early(state, stretch, at)
            if state.since is not None:
                state.since[stretch] = None

    def multiply(self, operands: Operands, group: int, warpgroups: Iterable[int]) -> None:
        """Check a wgmma that warpgroups are about to issue as part of a group."""
        for at, number in enumerate(warpgroups):
            state = self._states[number]
            self._check_fence(state, operands, at)
            if operands.d & (state.d | state.a) or operands.a & state.d:
                self._check_overlap(state, operands, at)
            state.pending.append((group, operands))
            state.d |= operands.d
            state.a |= operands.a

    def fence(self, warpgroups: Iterable[int]) -> None:
        """wgmma.fence."""
        for number in warpgroups:
            self._states[number].since = {}

    def wait(self, before: int, warpgroup: int) -> None:
        """Groups with a number below ``before`` are complete."""
        state = self._states[warpgroup]
        state.pending = [(group, o) for group, o in state.pending if group >= before]
        state.d = state.a = 0
        for _, operands in state.pending:
            state.d |= operands.d
            state.a |= operands.a

    # ---- faults ----

    def _early(self, state: _State, stretch: Stretch, at: int) -> None:
        """Report an access to a register of a pending wgmma."""
        for touch in stretch.touches:
            for _, o in state.pending:
                if bits := (touch.reads | touch.writes) & o.d:
                    verb = "writes" if touch.writes & bits else "reads"
                    raise self._fault(
                        touch, at, f"{verb} {self._name(bits)}, an accumulator of {_of(o)}, which "
                        "has not been waited for", "wgmma.commit_group and wgmma.wait_group must "
                        "come first",
                    )  # fmt: skip
                if bits := touch.writes & o.a:
                    raise self._fault(
                        touch, at, f"writes {self._name(bits)}, from which {_of(o)} reads A, and "
                        "which has not been waited for", "take other registers for the next A, or "
                        "wait for the group before",
                    )  # fmt: skip

    def _check_fence(self, state: _State, operands: Operands, at: int) -> None:
        if state.since is None:
            raise self._fault(
                operands, at, "no wgmma.fence has come before the first wgmma",
                "wgmma.fence orders what has been written to registers before it",
            )  # fmt: skip
        for stretch in state.since:
            if not ((stretch.reads | stretch.writes) & operands.d or stretch.writes & operands.a):
                continue
            for touch in stretch.touches:
                bits = (touch.reads | touch.writes) & operands.d or touch.writes & operands.a
                if bits:
                    verb = "written" if touch.writes & bits else "read"
                    raise self._fault(
                        operands, at, f"uses {self._name(bits)}, which PTX line {touch.line} "
                        f"({touch.text}) has {verb}", "a wgmma.fence must come between the two",
                    )  # fmt: skip

    def _check_overlap(self, state: _State, operands: Operands, at: int) -> None:
        """Check that pending wgmmas share registers only as equal accumulators."""
        for _, o in state.pending:
            if operands.accumulators != o.accumulators and operands.d & o.d:
                what = f"has some of the accumulators of {_of(o)}, but not all, or in another order"
            elif operands.d & o.a:
                what = f"writes {self._name(operands.d & o.a)}, from which {_of(o)} reads A"
            elif operands.a & o.d:
                what = f"reads {self._name(operands.a & o.d)}, an accumulator of {_of(o)}"
            else:
                continue
            raise self._fault(
                operands, at, f"{what}, and which has not been waited for",
                "wgmma.wait_group must come between the two",
            )  # fmt: skip

    def _name(self, bits: int) -> str:
        """The first of some registers."""
        return self._names[(bits & -bits).bit_length() - 1]

    def _fault(self, by: Touch | Operands, at: int, what: str, hint: str) -> AccessFault:
        """A fault; ``at`` counts the warpgroups of the group, the caller converts it to a lane."""
        return AccessFault(at, LAUNCH_FAILED, f"{what}; hint: {hint}", by.line)


def _of(operands: Operands) -> str:
    return f"PTX line {operands.line} ({operands.text})"
