"""Places for buffers that live at different times: lifetimes -> offsets in one allocation.

Two buffers may share bytes only if every launch that uses the one is complete before the first
launch that uses the other begins. "Before" is a matter of the graph of launches, not of their
order in the list: launches without a path between them may run at the same time.

The planner works in two steps. In the order of their first launch, buffers of one kind and size
take turns in *slots*, as a linear scan allocates registers (Poletto and Sarkar, "Linear scan
register allocation", 1999). Then slots whose buffers are in use together get offsets, the largest
first, each in the smallest gap that holds it: "greedy by size" of Pisarchyk and Lee, "Efficient
memory management for deep neural net inference", 2020. Layers that are alike use the same slots:
some twenty of them, however many buffers a step has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

#: Alignment of every place, as `driver.memory.Arena` has it.
ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A buffer of ``nbytes`` and the launches that use it, by number: ``first`` and ``last``, and
    all of them as the bits of ``users``. ``earlier`` has a bit for each launch that is complete
    before the first one begins. A buffer with an ``offset`` has its place already. Buffers of a
    ``kind`` may take turns."""

    nbytes: int
    first: int
    last: int
    users: int
    earlier: int
    offset: int | None = None
    kind: str = ""

    def follows(self, other: Lifetime) -> bool:
        """Whether the other buffer is not used any more once this one is."""
        return not other.users & ~self.earlier


@dataclass(frozen=True, slots=True)
class Places:
    """The ``offsets`` of buffers, in their order, and the bytes that an allocation needs for them.
    ``bound``: the most bytes of buffers that are in use at one launch, below which no plan is."""

    offsets: tuple[int, ...]
    nbytes: int
    bound: int


def aligned(nbytes: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(slots=True)
class _Slot:
    """Bytes that buffers use one after the other; ``beside`` are the numbers of the slots, and
    ``fixed`` those of the buffers with a place, that are in use together with one of these."""

    nbytes: int
    beside: set[int] = field(default_factory=set)
    fixed: set[int] = field(default_factory=set)


def place(lifetimes: Sequence[Lifetime]) -> Places:
    """A place for every buffer. Raises ValueError for a buffer without bytes."""
    for index, of in enumerate(lifetimes):
        if of.nbytes < 1:
            raise ValueError(f"buffer {index} has {of.nbytes} bytes")
    slots, slot_of = _slots(lifetimes)
    at = _offsets(slots, lifetimes)
    offsets = tuple(
        at[slot_of[index]] if of.offset is None else of.offset for index, of in enumerate(lifetimes)
    )
    ends = (offset + of.nbytes for offset, of in zip(offsets, lifetimes, strict=True))
    return Places(offsets, aligned(max(ends, default=0)), _bound(lifetimes))


def _slots(lifetimes: Sequence[Lifetime]) -> tuple[list[_Slot], dict[int, int]]:
    """Assign slots: the slots, and the number of the slot of each buffer without a place."""
    fixed = [index for index, of in enumerate(lifetimes) if of.offset is not None]
    order = [index for index, of in enumerate(lifetimes) if of.offset is None]
    order.sort(key=lambda index: (lifetimes[index].first, -lifetimes[index].nbytes))
    slots: list[_Slot] = []
    slot_of: dict[int, int] = {}
    known: dict[tuple[str, int], list[int]] = {}
    used: list[int] = []
    for index, safe in zip(order, _complete([lifetimes[i].earlier for i in order]), strict=True):
        of = lifetimes[index]
        used = [other for other in used if lifetimes[other].users & ~safe]
        beside = {slot_of[other] for other in used if not of.follows(lifetimes[other])}
        alike = known.setdefault((of.kind, of.nbytes), [])
        number = next((slot for slot in alike if slot not in beside), len(slots))
        if number == len(slots):
            slots.append(_Slot(of.nbytes))
            alike.append(number)
        slot_of[index] = number
        slots[number].beside |= beside
        for other in beside:
            slots[other].beside.add(number)
        for other in fixed:
            if not of.follows(lifetimes[other]) and not lifetimes[other].follows(of):
                slots[number].fixed.add(other)
        used.append(index)
    return slots, slot_of


def _offsets(slots: Sequence[_Slot], lifetimes: Sequence[Lifetime]) -> dict[int, int]:
    """The offset of each slot."""
    found: dict[int, int] = {}
    for number in sorted(range(len(slots)), key=lambda number: -slots[number].nbytes):
        slot = slots[number]
        placed = [(found[other], slots[other].nbytes) for other in slot.beside if other in found]
        for other in slot.fixed:
            placed.append((lifetimes[other].offset or 0, lifetimes[other].nbytes))
        taken = sorted((start, start + nbytes) for start, nbytes in placed)
        found[number] = _smallest_gap(taken, slot.nbytes)
    return found


def _complete(earlier: Sequence[int]) -> list[int]:
    """For each buffer the launches that are complete before it and before all later buffers."""
    found, rest = [], -1
    for mask in reversed(earlier):
        rest &= mask
        found.append(rest)
    return found[::-1]


def _smallest_gap(taken: Iterable[tuple[int, int]], nbytes: int) -> int:
    """The start of the smallest gap between intervals, in the order of their starts, that holds so
    many bytes; after all of them if none does."""
    best, size, end = -1, 0, 0
    for start, stop in taken:
        gap = start - end
        if gap >= nbytes and (best < 0 or gap < size):
            best, size = end, gap
        end = max(end, aligned(stop))
    return end if best < 0 else best


def _bound(lifetimes: Iterable[Lifetime]) -> int:
    """The most bytes in use at one launch, in the order of the list."""
    changes: dict[int, int] = {}
    for of in lifetimes:
        nbytes = aligned(of.nbytes)
        changes[of.first] = changes.get(of.first, 0) + nbytes
        changes[of.last + 1] = changes.get(of.last + 1, 0) - nbytes
    most = now = 0
    for launch in sorted(changes):
        now += changes[launch]
        most = max(most, now)
    return most
