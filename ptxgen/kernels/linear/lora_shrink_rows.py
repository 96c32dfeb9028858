"""The first product of low-rank adapters for many rows, as prompts have: see `LoraShrink`."""

from __future__ import annotations

from dataclasses import dataclass

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.lora_examples import row_shrink_examples
from urdir.ptxgen.kernels.linear.lora_shrink import LoraShrink
from urdir.ptxgen.spec import LaunchShape, ceil_div

#: Rows from which on it is used: with fewer, neighbours are sequences with adapters of their own.
LEAST_ROWS = 64
#: Rows and ranks of a CTA: a sum of each pair is in a register.
TILE_ROWS, TILE_RANKS = 8, 8


@dataclass(frozen=True)
class LoraShrinkRows(LoraShrink):
    """The same with `TILE_ROWS` rows and ``each`` ranks for a CTA, which reads an A once for all of
    its rows that have the adapter: of rows of one prompt all."""

    each: int = TILE_RANKS

    name = "lora_shrink_rows"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.experts or self.each > TILE_RANKS or self.batch < TILE_ROWS:
            raise PtxgenError(
                f"{self.name}: {self.batch} rows, {self.each} ranks a CTA, {self.experts} experts"
            )

    @property
    def tile(self) -> int:
        """Rows of a CTA."""
        return TILE_ROWS

    @property
    def launch_shape(self) -> LaunchShape:
        grid = (self.width // self.each, ceil_div(self.batch, self.tile), 1)
        # 168 registers a thread
        return LaunchShape(grid=grid, block=(32 * self.warps, 1, 1), resident=12 // self.warps)

    @property
    def warps(self) -> int:
        """At least two: a thread for each sum of the CTA. At most eight: each has registers for all
        of these sums."""
        return max(2, min(8, ceil_div(self.cols, 32 * 32)))

    def bytes_moved(self) -> int:
        """With few adapters."""
        return 4 * self.batch * (self.cols + self.width)

    @classmethod
    def examples(cls) -> dict[str, LoraShrinkRows]:
        return row_shrink_examples(cls)
