"""Products of a few rows with experts: division into quartets, splits and warps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from urdir.ptxgen.kernels.experts.quartet_memory import MAX_WARPS, QuartetMemory
from urdir.ptxgen.kernels.experts.spec import ExpertsProduct
from urdir.ptxgen.kernels.linear.cut import MAX_SLOTS
from urdir.ptxgen.kernels.linear.spec import MAX_BATCH, SHARED_NBYTES, SMS
from urdir.ptxgen.kernels.pairs import most_tiles
from urdir.ptxgen.spec import ceil_div
from urdir.ptxgen.weights.formats import Format
from urdir.ptxgen.weights.grids import ENTRIES
from urdir.ptxgen.weights.layout import TILE_UNITS
from urdir.ptxgen.weights.tiles import Tile

#: Pairs that are multiplied together: each has two of the eight columns of an ``mma``.
QUARTET = 4


@dataclass(frozen=True)
class QuartetProduct(ExpertsProduct):
    """The fields of `ExpertsGemmSmall`, and its sizes. ``warps`` of a CTA are its most."""

    down: bool = False
    early: bool = False
    splits: int = 1
    warps: int = MAX_WARPS
    stages: int = MAX_SLOTS
    shared: int = SHARED_NBYTES
    sms: int = SMS

    @cached_property
    def tile(self) -> Tile:
        """A tile of the matrices in shared memory."""
        return Tile(self.layout)

    @property
    def split_blocks(self) -> int:
        """Blocks of columns of a split."""
        return self.layout.row_tiles // self.splits

    @property
    def slots(self) -> int:
        """Products of a row in y."""
        return self.used * self.splits

    @property
    def quartets(self) -> int:
        """Quartets of any choice, at most."""
        return most_tiles(self.batch, self.experts, self.used, QUARTET)

    @property
    def most_units(self) -> int:
        """Bands of quartets and splits, at most."""
        return self.quartets * self.splits * self.bands

    @property
    def ctas(self) -> int:
        """A CTA for each SM, or more, so that each takes at most as many bands as a quartet has:
        its bands are then of at most two quartets."""
        return self.sms * ceil_div(self.quartets * self.splits, self.sms)

    # ---- read by the macros of `GemmSmall`: see there ----

    lane_vectors, lane_units = 1, TILE_UNITS // 2

    @property
    def has_partial_block(self) -> bool:
        """Whether the last block of a row has units beyond it."""
        return self.row_units % TILE_UNITS != 0

    @property
    def most_groups(self) -> int:
        """Groups of a unit."""
        return self.format.unit_groups

    @property
    def shared_grids(self) -> tuple[Format, ...]:
        """The type, if it has a codebook, whose entries are in shared memory."""
        return (self.format,) if self.format.grid else ()

    biased_grids, grid_entries = False, ENTRIES

    @property
    def grids_at(self) -> int:
        """Where these entries begin in shared memory."""
        return self.memory.grids_at

    # ---- shared memory ----

    @property
    def block_nbytes(self) -> int:
        """Bytes of a block of a quartet's activations: in the registers of a warp's lanes two bytes
        each, their sums where the type needs them, and scales."""
        sums = 2 * self.most_groups if self.format.needs_sums else 0
        return 4 * 32 * (16 + sums + 1)

    @property
    def table_nbytes(self) -> int:
        """Bytes of a table of experts, eight each, which the activations replace."""
        return 512 * ceil_div(8 * self.experts, 512)

    @cached_property
    def memory(self) -> QuartetMemory:
        """The CTA's shared memory."""
        chooses = self.selection is not None and self.weighted
        return QuartetMemory(
            *(self.shared, self.warps, self.stages, self.pair),
            slot_nbytes=ceil_div(self.layout.tile_nbytes, self.tile.alignment)
            * self.tile.alignment,
            activation_nbytes=max(2 * self.split_blocks * self.block_nbytes, self.table_nbytes),
            square_nbytes=2 * self.split_blocks * 4 * MAX_BATCH if self.normed else 0,
            quartets=self.quartets,
            weight_nbytes=4 * self.pairs if chooses else 0,
            grids=self.shared_grids,
        )

    @property
    def cta_warps(self) -> int:
        """Warps of a CTA."""
        return self.memory.cta_warps
