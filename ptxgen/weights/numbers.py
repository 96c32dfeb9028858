"""Unpacking of the groups' scales or minimums from items of their planes: shifts and masks of
registers that put each number into a byte of a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal

from urdir.ptxgen.weights.fields import Part, Plane

Number = Literal["scale", "minimum"]


@dataclass(frozen=True, slots=True)
class Moves:
    """Shifts of a register with items of ``plane``: (bits to the left, mask of the shifted
    bits)."""

    plane: Plane
    by_distance: tuple[tuple[int, int], ...]

    @property
    def masks(self) -> tuple[tuple[int, int], ...]:
        """The same with masks for after the shift: (bits to the left, mask)."""
        return tuple((d, m << d if d > 0 else m >> -d) for d, m in self.by_distance)

    @property
    def is_whole(self) -> bool:
        """Whether these are all bits of the items of two units."""
        nbytes = self.plane.nbytes * (2 if self.plane.units == 1 else 1)
        return sum(mask for _, mask in self.by_distance) == (1 << 8 * nbytes) - 1


@dataclass(frozen=True, eq=False)
class GroupNumbers:
    """The "scale" or the "minimum" of groups, and how a lane unpacks those it has loaded.

    ``parts`` make up the number; a unit has ``unit_groups`` groups; stored numbers have an offset
    of ``stored_offset``.
    """

    parts: tuple[tuple[Plane, Part], ...]
    unit_groups: int
    stored_offset: int

    @cache  # noqa: B019  there are as many objects as types
    def of_group(self, group: int) -> tuple[Moves, ...]:
        """The shifts that move the number of a unit's group to byte 0."""
        return self._moves(lambda plane, part: [part.target.position(group)])

    @cached_property
    def of_rows(self) -> tuple[Moves, ...]:
        """The shifts for two groups of two rows, whose items are in the two halves of a register.
        The groups are those of a unit, or of two units of one group and one byte each."""

        def places(_: Plane, part: Part) -> Iterable[int]:
            position = part.target.position
            second = position(1) if self.unit_groups == 2 else 8 + position(0)
            return (16 * row + at for row in range(2) for at in (position(0), second))

        return self._moves(places)

    # ---- of two neighbouring units; number n, times 2 to the power of ``lift``, is in byte n ----

    @property
    def count(self) -> int:
        """Groups of two units."""
        return 2 * self.unit_groups

    @cached_property
    def lift(self) -> int:
        """The least with which no bits are shifted right."""
        moves = self._moves(self._in_units)
        return -min(0, *(distance for move in moves for distance, _ in move.by_distance))

    @property
    def offset(self) -> int:
        """What is to be subtracted from a byte."""
        return self.stored_offset << self.lift

    @cached_property
    def of_units(self) -> tuple[Moves, ...]:
        """The shifts for both units, items side by side; a plane's parts are shifted together."""
        found: dict[Plane, dict[int, int]] = {}
        for move in self._moves(self._in_units, self.lift):
            masks = found.setdefault(move.plane, {})
            for distance, mask in move.by_distance:
                masks[distance] = masks.get(distance, 0) | mask
        return tuple(Moves(plane, tuple(sorted(masks.items()))) for plane, masks in found.items())

    def _in_units(self, plane: Plane, part: Part) -> Iterable[int]:
        for n in range(self.count):
            item, index = divmod(n, part.count)
            yield 8 * plane.nbytes * item + part.target.position(index)

    def _moves(
        self, places: Callable[[Plane, Part], Iterable[int]], lift: int = 0
    ) -> tuple[Moves, ...]:
        """The shifts of each part. ``places``: the bits where numbers 0, 1, ... begin; they go to
        bytes 0, 1, ..., ``lift`` bits further left."""
        moves = []
        for plane, part in self.parts:
            masks: dict[int, int] = {}
            for n, position in enumerate(places(plane, part)):
                up = 8 * n + part.shift - position + lift
                masks[up] = masks.get(up, 0) | part.source.mask << position
            moves.append(Moves(plane, tuple(masks.items())))
        return tuple(moves)
