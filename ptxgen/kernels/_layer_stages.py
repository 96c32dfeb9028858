"""The stages of a persistent kernel: how CTAs share the products of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from urdir.ptxgen.kernels._weight_tiles import Run, Tile
from urdir.ptxgen.layout import Layout
from urdir.ptxgen.spec import ceil_div


@dataclass(frozen=True, slots=True)
class TileType:
    """A type of weights, and how its tiles lie in a ring."""

    number: int
    layout: Layout
    tile: Tile

    @property
    def runs(self) -> tuple[tuple[int, Run], ...]:
        """The runs that a whole warp copies, with the numbers of their planes."""
        return tuple((i, run) for i, run in enumerate(self.tile.runs) if run.copies)

    @property
    def shared(self) -> tuple[tuple[int, Run], ...]:
        """The runs that share a copy, the same way: one copy is enough for all types."""
        return tuple((i, run) for i, run in enumerate(self.tile.runs) if not run.copies)


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one matrix that CTAs share: ``tiles`` of 16 rows, from CTA ``first_cta`` on.

    ``matrix`` numbers those of a layer, ``y`` is where in the channels its first output goes.
    """

    matrix: int
    tiles: int
    first_cta: int
    y: int


@dataclass(frozen=True, slots=True)
class Stage:
    """One of the four products of a layer: a CTA takes ``each`` tiles of each of ``matrices``
    matrices (two for gate and up); ``x`` is where in the channels its activations are."""

    number: int
    blocks: int
    each: int
    x: int
    pieces: tuple[Piece, ...]
    matrices: int = 1


def share(tiles: Sequence[int], ctas: int) -> int:
    """How many tiles a CTA takes of one of several matrices with so many, for ``ctas`` to do."""
    most = range(1, sum(tiles) + 1)
    return next(each for each in most if sum(ceil_div(count, each) for count in tiles) <= ctas)
