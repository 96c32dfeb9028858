"""Buffers of launches before they have places in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, cast

from urdir.driver.memory import Region, Slice

if TYPE_CHECKING:
    from urdir.driver.memory import Buffer

#: Memory of zeros: a counter (u32) for each row of a step of few rows.
COUNTERS = "experts arrived"
#: Bytes between the addresses of registers, more than any buffer has, and the first address.
ROOM, _FIRST = 1 << 44, 1 << 60


class Register:
    """A buffer without a place: a tensor, or what a rule keeps under a name. ``handle`` is an
    address that no memory has; `Slice` takes a register for a buffer."""

    __slots__ = ("handle", "name", "number", "zeroed")
    closed = False

    def __init__(self, number: int, name: str) -> None:
        self.number, self.name, self.handle = number, name, _FIRST + number * ROOM
        self.zeroed = False

    def part(self, offset: int = 0, nbytes: int = ROOM) -> Slice:
        """Some of its bytes; by default all that it may have."""
        return Slice(cast("Buffer", self), offset, nbytes, self.name)


class Registers(Mapping[str, Slice]):
    """Slices of registers by name, made when they are first asked for; those of ``kept`` are
    memory that outlives the launches. A name may stand for one value after another: its lifetimes
    are found afterwards (`lower.lifetimes`)."""

    def __init__(self, kept: Mapping[str, Slice]) -> None:
        self.kept = kept
        self.made: list[Register] = []
        self._slices: dict[str, Slice] = {}

    def new(self, name: str) -> Register:
        """A register of its own, not found by its name."""
        register = Register(len(self.made), name)
        self.made.append(register)
        return register

    def zeroed(self, name: str) -> Slice:
        """Memory that is zeros at first and that launches leave so; while a workspace is measured
        (`lower.measure`), a register that notes how much there is to be."""
        if name not in self.kept and name not in self._slices:
            register = self.new(name)
            register.zeroed = True
            self._slices[name] = register.part()
        return self[name]

    def __getitem__(self, name: str) -> Slice:
        found = self._slices.get(name)
        if found is None:
            found = self.kept[name] if name in self.kept else self.new(name).part()
            self._slices[name] = found
        return found

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str)

    def __iter__(self) -> Iterator[str]:
        return iter(self._slices)

    def __len__(self) -> int:
        return len(self._slices)


class Overlaid(Mapping[str, Region]):
    """What ``parts`` have by name, and ``rest`` otherwise."""

    def __init__(self, parts: Mapping[str, Region], rest: Mapping[str, Region]) -> None:
        self._parts, self._rest = parts, rest

    def __getitem__(self, name: str) -> Region:
        return self._parts[name] if name in self._parts else self._rest[name]

    def __contains__(self, name: object) -> bool:
        return name in self._parts or name in self._rest

    def __iter__(self) -> Iterator[str]:
        return iter({**dict.fromkeys(self._parts), **dict.fromkeys(self._rest)})

    def __len__(self) -> int:
        return len({*self._parts, *self._rest})


def register_of(slice_: object) -> Register | None:
    """The register of a slice; None for what has a place, and for numbers."""
    buffer = slice_.buffer if isinstance(slice_, Slice) else None
    return buffer if isinstance(buffer, Register) else None
