"""Products of a few rows with experts: division into quartets, splits and warps, and layout of a
CTA's shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from urdir.ptxgen.kernels.experts.spec import ExpertsProduct
from urdir.ptxgen.kernels.linear.cut import PACE_NBYTES
from urdir.ptxgen.kernels.linear.spec import MAX_BATCH, SHARED_NBYTES, SMS
from urdir.ptxgen.kernels.pairs import most_tiles
from urdir.ptxgen.spec import ceil_div
from urdir.ptxgen.weights.formats import Format
from urdir.ptxgen.weights.grids import ENTRIES, aligned, with_entries
from urdir.ptxgen.weights.layout import TILE_UNITS
from urdir.ptxgen.weights.tiles import Tile

#: Pairs that are multiplied together: each has two of the eight columns of an ``mma``.
QUARTET = 4
#: Warps of a CTA, at most and at least.
MAX_WARPS, LEAST_WARPS = 16, 8
#: Slots of a warp's ring, at most and at least.
MAX_SLOTS, MIN_SLOTS = 6, 2


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
        return aligned(self.list_at + self.list_nbytes)

    # ---- shared memory: rings, activations, their sums of squares, the quartets ----

    @property
    def slot_nbytes(self) -> int:
        """Bytes of a slot of a ring."""
        return ceil_div(self.layout.tile_nbytes, self.tile.alignment) * self.tile.alignment

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

    @property
    def activation_nbytes(self) -> int:
        """Bytes of the activations of two quartets."""
        return max(2 * self.split_blocks * self.block_nbytes, self.table_nbytes)

    @property
    def square_nbytes(self) -> int:
        """Bytes of the sums of squares of each block and vector."""
        return 2 * self.split_blocks * 4 * MAX_BATCH if self.normed else 0

    @property
    def list_nbytes(self) -> int:
        """Bytes of the quartets, eight each, after how many those of each 32 experts are; and of
        the pairs' weights that are made here."""
        weights = 4 * self.pairs if self.selection is not None and self.weighted else 0
        return 64 + 8 * self.quartets + weights

    @property
    def weights_at(self) -> int:
        """Where the pairs' weights begin."""
        return self.list_at + 64 + 8 * self.quartets

    @property
    def ring_nbytes(self) -> int:
        """Bytes that are left for rings."""
        others = self.activation_nbytes + self.square_nbytes + self.list_nbytes
        return self.shared - with_entries(others, self.shared_grids)

    @cached_property
    def cta_warps(self) -> int:
        """Warps of a CTA: as many as have two slots each."""
        room = self.ring_nbytes // (MIN_SLOTS * self.slot_nbytes)
        return min(self.warps, max(1, room))

    @property
    def fits(self) -> bool:
        """Whether there is room for enough warps."""
        return self.cta_warps >= LEAST_WARPS

    @cached_property
    def ring_slots(self) -> int:
        """Slots of a warp's ring, the same number for each matrix of a pair."""
        room = self.ring_nbytes // (self.cta_warps * self.slot_nbytes)
        return min(self.stages, room) // self.pair * self.pair

    @property
    def pace(self) -> int:
        """Tiles of a warp that are loaded before the activations: see `PACE_NBYTES`."""
        paced = PACE_NBYTES // (self.cta_warps * self.slot_nbytes) // self.pair * self.pair
        return min(max(self.pair, paced), self.ring_slots)

    @property
    def activations_at(self) -> int:
        """Where the activations begin."""
        return self.cta_warps * self.ring_slots * self.slot_nbytes

    @property
    def squares_at(self) -> int:
        """Where the sums of squares begin."""
        return self.activations_at + self.activation_nbytes

    @property
    def list_at(self) -> int:
        """Where the list of quartets begins."""
        return self.squares_at + self.square_nbytes
