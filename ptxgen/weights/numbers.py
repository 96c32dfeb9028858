"""How the scales or minimums of two neighbouring units are taken apart: to a byte each, at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from urdir.ptxgen.weights.formats import Format, Part, Plane


@dataclass(frozen=True, slots=True)
class Moves:
    """Bits of a plane's items of the two units: those of a mask go up by its distance."""

    plane: Plane
    by_distance: tuple[tuple[int, int], ...]

    @property
    def is_whole(self) -> bool:
        """Whether these are all of the items' bits."""
        nbytes = self.plane.nbytes * (2 if self.plane.units == 1 else 1)
        return sum(mask for _, mask in self.by_distance) == (1 << 8 * nbytes) - 1


@dataclass(frozen=True)
class GroupNumbers:
    """The "scale" or the "minimum" of the groups of two units, in their order.

    A word of them has number n, times 2 to the power of ``lift``, in byte n. The lift is the least
    with which no bits have to go down.
    """

    fmt: Format
    number: Literal["scale", "minimum"]

    @property
    def count(self) -> int:
        """Groups of two units."""
        return 2 * self.fmt.unit_groups

    @property
    def offset(self) -> int:
        """What is to be subtracted from a byte of the word."""
        return self.fmt.scale_offset << self.lift if self.number == "scale" else 0

    @cached_property
    def lift(self) -> int:
        """See the class."""
        return -min(0, *(distance for _, _, _, distance in self._fields()))

    @cached_property
    def moves(self) -> tuple[Moves, ...]:
        """What makes up the word, plane after plane."""
        found: dict[Plane, dict[int, int]] = {}
        for plane, part, position, distance in self._fields():
            masks = found.setdefault(plane, {})
            up = distance + self.lift
            masks[up] = masks.get(up, 0) | part.source.mask << position
        return tuple(Moves(plane, tuple(sorted(masks.items()))) for plane, masks in found.items())

    def _fields(self) -> Iterator[tuple[Plane, Part, int, int]]:
        """Every field: where it lies in the items of the two units, and how far from its place."""
        for plane, part in self.fmt.parts(self.number):
            for n in range(self.count):
                item, index = divmod(n, part.count)
                position = 8 * plane.nbytes * item + part.target.position(index)
                yield plane, part, position, 8 * n + part.shift - position
