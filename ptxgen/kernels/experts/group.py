"""The pairs of rows and experts of many rows, sorted by expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.experts.selection import MAX_EXPERTS, MAX_USED
from urdir.ptxgen.kernels.pairs import grouped, most_places, most_tiles, random_choice
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, ceil_div

THREADS = 256


@dataclass(frozen=True)
class GroupExperts(KernelSpec):
    """The pairs of rows and slots sorted by expert, and cut into tiles of one expert.

    Pair p is slot p % used of row p / used. ``pair``: all of them, those of expert 0 first, in
    rising order of an expert; those of each begin at a multiple of ``align``, a power of two, and
    places between are
    `NO_PAIR`, as are those after the last. Pairs whose expert is from number ``experts`` on are not
    among them. ``tile_of`` (tiles, 4) u32: for up to
    ``tile`` neighbouring ones of an expert its number, the place of the first, how many, 0; how
    many is 0 after the last tile.
    """

    rows: int
    experts: int
    used: int
    tile: int
    align: int = 1

    name = "group_experts"

    def __post_init__(self) -> None:
        if not 1 <= self.used <= min(self.experts, MAX_USED) or self.experts > MAX_EXPERTS:
            raise PtxgenError(
                f"group_experts: {self.used} of {self.experts} experts: 1 to {MAX_USED} of "
                f"{MAX_EXPERTS} at most"
            )
        if self.rows < 1 or self.tile < 1 or ceil_div(self.rows, self.tile) > THREADS:
            raise PtxgenError(
                f"group_experts: {self.rows} rows in tiles of {self.tile}: 1 to {THREADS} tiles"
            )

        if self.align & (self.align - 1) or self.tile % self.align:
            raise PtxgenError(
                f"group_experts: tiles of {self.tile} begin at multiples of {self.align}: "
                f"a power of two that divides it"
            )

    @property
    def pairs(self) -> int:
        """Pairs of rows and slots."""
        return self.rows * self.used

    @property
    def places(self) -> int:
        """Places of the list of pairs."""
        return most_places(self.rows, self.experts, self.used, self.align)

    @property
    def tiles(self) -> int:
        """Tiles of the longest list."""
        return most_tiles(self.rows, self.experts, self.used, self.tile)

    @property
    def params(self) -> tuple[Param, ...]:
        return (
            Param("expert", "u32", ("rows", "used"), Access.IN),
            Param("pair", "u32", ("places",), Access.OUT),
            Param("tile_of", "u32", ("tiles", 4), Access.OUT),
        )

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(grid=(self.experts, 1, 1), block=(THREADS, 1, 1))

    @property
    def rounds(self) -> int:
        """Pairs of a lane: each warp has neighbouring ones."""
        return ceil_div(self.pairs, THREADS)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        return grouped(inputs["expert"], self.experts, self.tile, self.align)

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Some experts are chosen by most rows, some by none; the second row has none."""
        expert = random_choice(rng, self.rows, self.experts, self.used)
        expert[1:2] = self.experts
        return {"expert": expert}

    @classmethod
    def examples(cls) -> dict[str, GroupExperts]:
        return {
            "smallest": cls(1, 1, 1, 16),
            "one row": cls(1, 128, 8, 16),
            "odd": cls(37, 13, 3, 16),
            "many experts": cls(20, 512, 32, 16),
            "prompt": cls(301, 32, 4, 32),
            "all of them": cls(33, 4, 4, 16),
            "aligned": cls(37, 13, 3, 16, align=8),
            "aligned, many experts": cls(9, 300, 2, 16, align=8),
        }

    def flops(self) -> int:
        return self.experts * self.pairs
