"""The first product of low-rank adapters of packed activations: see `LoraShrink`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.lora_examples import packed_shrink_examples
from urdir.ptxgen.kernels.linear.lora_shrink import LoraShrink, shrunk
from urdir.ptxgen.render.kernel import field_values
from urdir.ptxgen.spec import Access, Array, LaunchShape, Param, Tolerance, ceil_div
from urdir.ptxgen.target import since
from urdir.ptxgen.weights.packed import GROUP, pack, packed_shape, unpack

#: Ranks of a CTA, columns of a warp at a time, and rows among which it looks for those of its slot.
TILE_RANKS, HALF, CHUNK = 16, 128, 32
#: The most CTAs of a cluster, and warps of a CTA.
MOST_CTAS, MOST_WARPS = 8, 16


@dataclass(frozen=True)
class LoraShrinkPacked(LoraShrink):
    """The same on tensor cores, of the packed f16 x that the products take, after its norm; of x
    before the factor of a norm that has begun (`BegunNorm`) a is without it, too.

    The CTAs of a ``cluster`` have a slot, and 16 ranks of one of the matrices: they multiply all
    rows that have it, and add up the columns that each of them has.
    """

    cluster: int = 1

    name = "lora_shrink_packed"

    def __post_init__(self) -> None:
        super().__post_init__()
        plain = self.norm is None and not self.experts and self.each == 1
        if not plain or self.element != "f16" or not self.serves(self.cols):
            given = field_values(self)
            raise PtxgenError(
                f"{self.name}: {given}: f16 of multiples of 4 columns, no norm, no experts"
            )
        if self.cluster not in (1, 2, 4, 8):
            raise PtxgenError(f"{self.name}: clusters of {self.cluster}: up to {MOST_CTAS}")

    @staticmethod
    def serves(cols: int) -> bool:
        """Whether A may have this many columns."""
        return cols % 4 == 0

    @classmethod
    def cluster_for(cls, cols: int, most: int) -> int:
        """CTAs of a cluster, where a device has up to ``most``: each has at least four half tiles
        of the columns."""
        cluster = min(most, MOST_CTAS)
        while cluster > 1 and (cluster & cluster - 1 or ceil_div(cols, HALF) < 4 * cluster):
            cluster -= 1
        return cluster

    @property
    def halves(self) -> int:
        """Half tiles of the columns."""
        return ceil_div(self.cols, HALF)

    @property
    def warps(self) -> int:
        """Warps per CTA: at least one thread for each sum."""
        return max(4, min(MOST_WARPS, ceil_div(self.halves, self.cluster)))

    @property
    def holds(self) -> bool:
        """Whether a warp has one half tile at most, and loads its A before x is there."""
        return self.warps * self.cluster >= self.halves

    @property
    def rank_tiles(self) -> int:
        """Tiles of ranks of a matrix."""
        return ceil_div(self.rank, TILE_RANKS)

    @property
    def tiles(self) -> int:
        """Tiles of ranks of all matrices."""
        return self.matrices * self.rank_tiles

    @property
    def chunk(self) -> int:
        """Rows among which a CTA looks for those of its slot: a lane looks at one."""
        return CHUNK

    @property
    def groups(self) -> int:
        """Groups of eight vectors of x."""
        return ceil_div(self.batch, GROUP)

    @property
    def b_lines(self) -> tuple[int, ...]:
        """Lines of 128 bytes of B of a slot, of each matrix."""
        return tuple(ceil_div(2 * rows * self.rank, 128) for rows in self.outs)

    @property
    def params(self) -> tuple[Param, ...]:
        _, *others = super().params
        return (Param("x", "f16", packed_shape(self.batch, self.cols), Access.IN), *others)

    @property
    def launch_shape(self) -> LaunchShape:
        grid = (self.cluster * self.slots * self.tiles, ceil_div(self.batch, CHUNK), 1)
        block = (32 * self.warps, 1, 1)
        return LaunchShape(grid=grid, block=block, cluster=(self.cluster, 1, 1))

    @property
    def tolerance(self) -> Tolerance:
        return Tolerance(rtol=1e-5)

    @property
    def targets(self) -> tuple[str, ...]:
        return since(90 if self.cluster > 1 else 75)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        return shrunk(self, unpack(inputs["x"], self.batch, self.cols), inputs)

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        inputs = super().make_inputs(rng)
        return {**inputs, "x": pack(rng.standard_normal((self.batch, self.cols)))}

    @classmethod
    def examples(cls) -> dict[str, LoraShrinkPacked]:
        return packed_shrink_examples(cls)
