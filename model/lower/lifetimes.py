"""Lifetimes of registers, from the launches that use them.

A register has one value after another. A value ends where none of its bytes is read again before
it is overwritten; the next one is a buffer of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from urdir.driver.kernel import signature
from urdir.driver.memory import Region, Slice
from urdir.model.lower.arena import ALIGNMENT, Lifetime
from urdir.model.lower.registers import Register

if TYPE_CHECKING:
    from urdir.driver.kernel import Kernel

Span = tuple[int, int]


class Unplaced(NamedTuple):
    """A launch whose arguments may be slices of registers."""

    kernel: Kernel
    label: str
    args: dict[str, Any]


class Value:
    """Bytes ``start`` to ``stop`` of a register, or of memory, in ``launches``. With an ``offset``
    it has its place already."""

    __slots__ = (
        *("earlier", "kind", "launches", "offset", "place", "start", "stop", "used", "written"),
    )

    def __init__(self, kind: str = "", offset: int | None = None) -> None:
        self.kind = kind
        self.start, self.stop = 1 << 62, 0
        self.launches: list[int] = []
        self.offset = offset
        #: Where the first byte of the register would lie, once it is placed.
        self.place = 0
        #: Bits of the launches that use it, or write it, and of all before these.
        self.used = self.written = 0
        #: Bits of the launches that are complete before each that uses it.
        self.earlier = -1

    def touch(self, launch: int, start: int, stop: int) -> None:
        """A launch uses some of its bytes."""
        if start < self.start:
            self.start = start
        if stop > self.stop:
            self.stop = stop
        launches = self.launches
        if not launches or launches[-1] != launch:
            launches.append(launch)

    @property
    def first(self) -> int:
        """Its first byte in the register, as it is placed."""
        return self.start // ALIGNMENT * ALIGNMENT

    def lifetime(self, count: int) -> Lifetime:
        """Its lifetime among ``count`` launches; a value with an offset lives to their end."""
        users, last = 0, self.launches[-1]
        for launch in self.launches:
            users |= 1 << launch
        if self.offset is not None:
            users, last = users | 1 << count, count
        nbytes = self.stop - self.first
        return Lifetime(nbytes, self.launches[0], last, users, self.earlier, self.offset, self.kind)


class _Use(NamedTuple):
    """Bytes of a register that a launch reads, writes, or both."""

    launch: int
    start: int
    stop: int
    reads: bool
    writes: bool


#: An argument: its name, what it is, and whether the launch writes that.
_Argument = tuple[str, Register | Value, bool]


class Lifetimes:
    """The values of all registers. ``arguments[i]`` are the names of the arguments of launch i that
    are registers, with their values; ``zeroed`` are the bytes of registers for memory that is zeros
    at first, by name.

    ``shared`` is memory in which the values lie beside slices that launches name: these live from
    their first launch on to the end.
    """

    def __init__(self, launches: Sequence[Unplaced], shared: Slice | None) -> None:
        self.values: list[Value] = []
        self.arguments: list[list[tuple[str, Value]]] = []
        self.zeroed: dict[str, int] = {}
        self._shared = shared
        self._memory: dict[tuple[int, int], Value] = {}
        self._count = len(launches)
        registers: dict[Register, list[_Use]] = {}
        touched = [self._uses(number, launch, registers) for number, launch in enumerate(launches)]
        values: list[dict[Register, Value]] = [{} for _ in launches]
        for register, uses in registers.items():
            self._cut(register, uses, values)
        self._find_order(touched, values)

    def lifetimes(self) -> list[Lifetime]:
        """Those of ``values``, in their order."""
        return [value.lifetime(self._count) for value in self.values]

    def _uses(
        self, number: int, launch: Unplaced, registers: dict[Register, list[_Use]]
    ) -> list[_Argument]:
        """What a launch uses: registers, and memory that is written; uses of registers are added to
        those before."""
        found: list[_Argument] = []
        args = launch.args
        for name, nbytes, access in signature(launch.kernel).pointers:
            region = args.get(name)
            if not isinstance(region, Region) or not nbytes:
                continue
            start, writes = region.offset, access != "in"
            buffer: Any = region.buffer
            if type(buffer) is Register and not buffer.zeroed:
                use = _Use(number, start, start + nbytes, access != "out", writes)
                registers.setdefault(buffer, []).append(use)
                found.append((name, buffer, writes))
            elif (value := self._value(number, region, nbytes, writes)) is not None:
                found.append((name, value, writes))
        return found

    def _value(self, launch: int, region: Region, nbytes: int, writes: bool) -> Value | None:
        """Memory that a launch uses; None if no launch has written it and no value lies there."""
        buffer: Any = region.buffer
        if type(buffer) is Register:
            self.zeroed[buffer.name] = max(self.zeroed.get(buffer.name, 0), region.offset + nbytes)
        key = id(buffer), region.offset
        value = self._memory.get(key)
        if value is None:
            start = self._shared_offset(region)
            if not writes and start is None:
                return None
            value = self._memory[key] = Value(offset=start)
            if start is not None:
                self.values.append(value)
                if not writes:
                    value.touch(0, region.offset, region.offset)  # from before the launches
        if value.offset is not None:
            value.touch(launch, region.offset, region.offset + nbytes)
        return value

    def _shared_offset(self, region: Region) -> int | None:
        """Where memory lies among the values; None if it lies elsewhere."""
        shared = self._shared
        if shared is None or region.buffer is not shared.buffer:
            return None
        start = region.offset - shared.offset
        return start // ALIGNMENT * ALIGNMENT if 0 <= start < shared.nbytes else None

    def _cut(
        self, register: Register, uses: Sequence[_Use], values: Sequence[dict[Register, Value]]
    ) -> None:
        """Cut the uses of a register into values."""
        value = None
        for use, begins in zip(uses, _begins(uses), strict=True):
            if value is None or begins:
                value = Value(register.name)
                self.values.append(value)
            value.touch(use.launch, use.start, use.stop)
            values[use.launch][register] = value

    def _find_order(
        self, touched: Sequence[Sequence[_Argument]], values: Sequence[Mapping[Register, Value]]
    ) -> None:
        """Which launches are complete before which, by what they read and write."""
        for launch, (uses, of) in enumerate(zip(touched, values, strict=True)):
            own, placed, before = [], [], 0
            for name, at, writes in uses:
                if isinstance(at, Register):
                    value = of[at]
                    placed.append((name, value))
                else:
                    value = at
                own.append((value, writes))
                before |= value.used if writes else value.written
            self.arguments.append(placed)
            mask = before | 1 << launch
            for value, writes in own:
                value.used |= mask
                value.earlier &= before
                if writes:
                    value.written |= mask


def _begins(uses: Sequence[_Use]) -> list[bool]:
    """Whether each use of a register is the first one of a launch that begins a value: no byte from
    before is read."""
    live: list[Span] = []
    found = [False] * len(uses)
    end = len(uses)
    while end:
        launch, start = uses[end - 1].launch, end - 1
        while start and uses[start - 1].launch == launch:
            start -= 1
        for use in uses[start:end]:
            if live and not use.reads:
                live = _without(live, (use.start, use.stop))
        for use in uses[start:end]:
            if use.reads and (span := (use.start, use.stop)) not in live:
                live.append(span)
        found[start], end = not live, start
    return found


def _without(spans: Sequence[Span], cut: Span) -> list[Span]:
    """What is left of spans without the bytes of another."""
    left = []
    for start, stop in spans:
        if start < cut[0]:
            left.append((start, min(stop, cut[0])))
        if stop > cut[1]:
            left.append((max(start, cut[1]), stop))
    return left
