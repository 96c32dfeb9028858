"""How the scales or minimums of groups are taken out of the items of their planes: which bits of
registers go up, and how far, so that numbers stand in the bytes of a word.
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
    """Bits of a register with items of ``plane``: those of a mask go up by its distance."""

    plane: Plane
    by_distance: tuple[tuple[int, int], ...]

    @property
    def masks(self) -> tuple[tuple[int, int], ...]:
        """(distance, mask of the bits once they have moved), the same in another way."""
        return tuple((d, m << d if d > 0 else m >> -d) for d, m in self.by_distance)

    @property
    def is_whole(self) -> bool:
        """Whether these are all bits of the items of two units."""
        nbytes = self.plane.nbytes * (2 if self.plane.units == 1 else 1)
        return sum(mask for _, mask in self.by_distance) == (1 << 8 * nbytes) - 1


@dataclass(frozen=True, eq=False)
class GroupNumbers:
    """The "scale" or the "minimum" of groups: how a lane takes those out that it has loaded.

    ``parts`` make up the number; a unit has ``unit_groups`` groups; ``stored_offset`` is what a
    stored number is too large by.
    """

    parts: tuple[tuple[Plane, Part], ...]
    unit_groups: int
    stored_offset: int

    @cache  # noqa: B019  there are as many objects as types
    def of_group(self, group: int) -> tuple[Moves, ...]:
        """That of a group of a unit, from its items, to byte 0."""
        return self._moves(lambda plane, part: [part.target.position(group)])

    @cached_property
    def of_rows(self) -> tuple[Moves, ...]:
        """Those of two groups of two rows, from items in the two halves of a register: of a unit,
        or of two units, a byte each, whose groups are as large."""

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
        """The least with which no bits have to go down."""
        moves = self._moves(self._in_units)
        return -min(0, *(distance for move in moves for distance, _ in move.by_distance))

    @property
    def offset(self) -> int:
        """What is to be subtracted from a byte."""
        return self.stored_offset << self.lift

    @cached_property
    def of_units(self) -> tuple[Moves, ...]:
        """Those of both units, from their items side by side; a plane's parts move together."""
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
        """Each part's. ``places``: the bits where numbers 0, 1, ... begin, which go to bytes 0, 1,
        ... and ``lift`` bits further."""
        moves = []
        for plane, part in self.parts:
            masks: dict[int, int] = {}
            for n, position in enumerate(places(plane, part)):
                up = 8 * n + part.shift - position + lift
                masks[up] = masks.get(up, 0) | part.source.mask << position
            moves.append(Moves(plane, tuple(masks.items())))
        return tuple(moves)
