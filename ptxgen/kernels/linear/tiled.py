"""How products whose weights come tile by tile are cut: CTAs, warps, rings, passes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.product import SHARED_NBYTES, SMS, FusedProduct, Part
from urdir.ptxgen.ptx.architecture import CLUSTERS_SINCE
from urdir.ptxgen.spec import LaunchShape, ceil_div
from urdir.ptxgen.target import since
from urdir.ptxgen.weights.layout import TILE_ROWS, TILE_UNITS, Layout
from urdir.ptxgen.weights.tiles import Tile

#: Warps of a CTA, one CTA an SM: half of the SM's registers at 128 a thread, so that the next
#: launch's CTA is there early.
WARPS = 8
#: Slots of a warp's ring, at least and at most: with four 8B Q4_K_M decodes at 756 tokens/s on an
#: H200, with six at 762.
MIN_SLOTS, MAX_SLOTS = 2, 6
#: Tiles that a warp has yet to ask for when the next launch may start: its CTAs take a while to be
#: there, and earlier their loads would only delay this launch's. Measured on an H200, 8B Q4_K_M.
TILES_LEFT = 1
#: Bytes of tiles of a CTA that are in flight before the wait, at most: whatever else is asked of a
#: busy memory queues behind them, the activations above all. On an H200 8B Q4_K_M decodes at 754
#: tokens/s with two tiles of a warp at a time, which are 37 KB, at 736 with three, 715 with four.
PACE_NBYTES = 40 * 1024
#: Bytes of shared memory that are kept for partial sums.
PARTIALS_NBYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class TilePart(Part):
    """A part with its tiles: how many a CTA takes before the sums meet, and each of its warps."""

    tile: Tile
    pass_tiles: int
    warp_tiles: int


@dataclass(frozen=True)
class TiledProduct(FusedProduct):
    """Products of weights of any type that pass through rings of tiles.

    A launch is cut by shape where a field is 0: ``split`` parts of the columns times ``groups`` of
    the rows are the warps of a CTA; it takes ``tiles_each`` tiles of 16 rows, ``per_pass`` before
    the parts' sums meet; ``stages`` tiles are in a warp's ring. ``shared``: bytes of shared memory
    that a CTA may take, and ``least_shared`` those that it takes even if it needs fewer;
    ``resident``: CTAs that an SM has registers for.

    One CTA an SM is what the launch is cut for (``sms`` of them). ``fill``: if that leaves a few
    SMs over, CTAs without rows of their own keep them busy (see `fills_sms`).

    ``cluster`` (1, 2, 4 or 8) CTAs share their rows, and each has a part of the columns, which are
    then fewer activations to stage; they add up their sums through each other's shared memory, on
    sm_90 and newer. ``parts`` then counts clusters, not CTAs.
    """

    split: int = 0
    groups: int = 0
    tiles_each: int = 0
    per_pass: int = 0
    stages: int = 0
    resident: int = 2
    shared: int = SHARED_NBYTES
    least_shared: int = 0
    sms: int = SMS
    fill: bool = False
    cluster: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cluster not in (1, 2, 4, 8):
            raise PtxgenError(f"{self.name}: cluster is {self.cluster}: 1, 2, 4 or 8")
        if not 1 <= self.k_warps * self.cluster <= self.blocks:
            parts = (
                f"{self.k_warps} in each of {self.cluster} CTAs" if self.cluster > 1 else self.split
            )
            raise PtxgenError(f"{self.name}: split is {parts} of {self.blocks} blocks")
        if not 1 <= self.cta_warps <= 32:
            raise PtxgenError(f"{self.name}: {self.cta_warps} warps: 1 to 32")
        if self.slots < MIN_SLOTS:
            raise PtxgenError(
                f"{self.name}: two tiles ({self.tile_nbytes} bytes) of {self.cta_warps} warps and "
                f"{self.cols} activations are more than the {self.shared} bytes of shared memory"
            )

    # ---- what a kernel says of itself ----

    @property
    def partial_nbytes(self) -> int:
        """Bytes of a tile's sums of a warp."""
        raise NotImplementedError

    def activations_nbytes(self, warps: int) -> int:
        """Bytes of activations in the shared memory of a CTA of so many warps."""
        raise NotImplementedError

    def squares_nbytes(self, warps: int) -> int:
        """Bytes of sums of squares there."""
        raise NotImplementedError

    def partials_most(self) -> int:
        """Bytes of partial sums there, at most."""
        return PARTIALS_NBYTES

    @property
    def targets(self) -> tuple[str, ...]:
        return since(CLUSTERS_SINCE) if self.cluster > 1 else super().targets

    # ---- how it is cut ----

    @cached_property
    def matrices(self) -> tuple[TilePart, ...]:
        """The parts with their tiles."""
        return tuple(self._with_tiles(part) for part in self.parts)

    def _with_tiles(self, part: Part) -> TilePart:
        tiles = self.pass_tiles_of(part.number)
        return TilePart(
            part.number,
            part.layout,
            part.first_cta,
            part.ctas,
            Tile(part.layout),
            tiles,
            tiles // self.row_warps,
        )

    @property
    def pair(self) -> int:
        """Matrices whose tiles are taken in turn: two if gated."""
        return 2 if self.gated else 1

    @property
    def blocks(self) -> int:
        """Blocks of a row: 8 units, the last one perhaps less."""
        return ceil_div(self.row_units, TILE_UNITS)

    @property
    def cta_blocks(self) -> int:
        """Blocks of a row that a CTA has, at most: of C in a cluster, number r has r, r + C, ..."""
        return ceil_div(self.blocks, self.cluster)

    @cached_property
    def k_warps(self) -> int:
        """Parts of a CTA's columns: one a warp, if they have about the same share."""
        if self.split:
            return self.split
        most = self._most_parts
        taken = {k: k * ceil_div(self.cta_blocks, k) for k in range(1, most + 1)}
        return max(k for k in taken if 16 * taken[k] <= 17 * min(taken.values()))

    @property
    def _most_parts(self) -> int:
        """Parts of a CTA's columns, at most: each has a block."""
        return max(1, min(self._most_warps, self.blocks // self.cluster))

    @property
    def row_warps(self) -> int:
        """Parts of the rows."""
        return self.groups or max(1, self._most_warps // self.k_warps)

    @cached_property
    def _most_warps(self) -> int:
        """Warps that have room for a ring each."""

        def taken(warps: int) -> int:
            return self.activations_nbytes(warps) + warps * MIN_SLOTS * self.tile_nbytes

        room = self.shared - PARTIALS_NBYTES
        return max((w for w in range(1, WARPS + 1) if taken(w) <= room), default=1)

    @property
    def cta_warps(self) -> int:
        """Warps of a CTA."""
        return self.k_warps * self.row_warps

    @property
    def warp_blocks(self) -> int:
        """Blocks of a warp, at most."""
        return ceil_div(self.cta_blocks, self.k_warps)

    @property
    def tiles_wanted(self) -> tuple[int, ...]:
        """Tiles that a CTA should take, of each matrix: so many that there is one CTA an SM."""
        tiles = sum(layout.bands for layout in self.layouts)
        return (self.tiles_each or ceil_div(tiles, self.clusters),) * len(self.layouts)

    @property
    def clusters(self) -> int:
        """Clusters (CTAs, where they are of one) for which the launch is cut."""
        return max(1, self.sms // self.cluster)

    @cached_property
    def pass_tiles(self) -> int:
        """Tiles of a CTA before the sums meet, of all its warps' parts of the rows, at most."""
        fitting = self.partials_most() // (self.partial_nbytes * self.k_warps * self.pair)
        most = max(1, min(self.per_pass or fitting, fitting) // self.row_warps)
        each = ceil_div(max(self.tiles_wanted), self.row_warps)
        return self.row_warps * ceil_div(each, ceil_div(each, most))

    def pass_tiles_of(self, matrix: int) -> int:
        """Those of the matrix of that number: all alike, if there are several passes."""
        if self.passes > 1:
            return self.pass_tiles
        return self.row_warps * ceil_div(self.tiles_wanted[matrix], self.row_warps)

    @property
    def pass_rows(self) -> int:
        """Rows of these tiles."""
        return TILE_ROWS * self.pass_tiles

    @property
    def warp_tiles(self) -> int:
        """Tiles of a warp among them, of one block, at most."""
        return self.pass_tiles // self.row_warps

    @property
    def sharers(self) -> int:
        """Warps that have their last block together, each with a part of its tiles."""
        return 1

    @property
    def passes(self) -> int:
        """How often they meet."""
        return ceil_div(max(self.tiles_wanted), self.pass_tiles)

    @property
    def tiles(self) -> int:
        """Tiles of a CTA, at most, the last ones perhaps beyond the rows."""
        return self.passes * self.pass_tiles

    def cta_rows_of(self, matrix: int) -> int:
        return TILE_ROWS * self.passes * self.pass_tiles_of(matrix)

    @property
    def tiles_left(self) -> int:
        """See `TILES_LEFT`."""
        return TILES_LEFT

    @property
    def grid_ctas(self) -> int:
        """CTAs of the grid; those that have no rows work on the last tile instead."""
        filled = self.fill and self.ctas > self.clusters // 2
        return self.cluster * (max(self.ctas, self.clusters) if filled else self.ctas)

    @property
    def has_partial_rows(self) -> bool:
        """Whether there are tiles beyond a matrix' last."""
        return self.grid_ctas > self.cluster * self.ctas or any(
            part.layout.bands % (self.passes * self.pass_tiles_of(part.number))
            for part in self.parts
        )

    # ---- shared memory: rings, activations, sums of squares, partial sums ----

    @cached_property
    def tile_nbytes(self) -> int:
        """Bytes of a slot."""
        return max(Tile(Layout(fmt, 1, self.cols)).nbytes for fmt in self.formats)

    @cached_property
    def slots(self) -> int:
        """Slots of a warp's ring: no more than it has tiles, but two at least."""
        room = (self.shared - self._rest_nbytes) // (self.cta_warps * self.tile_nbytes)
        tiles = self.warp_blocks * self.tiles * self.pair // self.row_warps
        return min(self.stages or MAX_SLOTS, room, max(tiles, MIN_SLOTS))

    @property
    def filled_slots(self) -> int:
        """Slots that are filled before the wait: all of them."""
        return self.slots

    @property
    def pace(self) -> int:
        """Tiles of a warp that are in flight before the wait, at most: see `PACE_NBYTES`."""
        return max(1, PACE_NBYTES // (self.cta_warps * self.tile_nbytes))

    @property
    def _rest_nbytes(self) -> int:
        warps = self.cta_warps
        partials = self.k_warps * self.pair * self.pass_tiles * self.partial_nbytes
        return self.activations_nbytes(warps) + self.squares_nbytes(warps) + partials

    @property
    def records_offset(self) -> int:
        """Where the activations begin."""
        return self.cta_warps * self.slots * self.tile_nbytes

    @property
    def squares_offset(self) -> int:
        """Where the warps' sums of squares begin."""
        return self.records_offset + self.activations_nbytes(self.cta_warps)

    @property
    def partials_offset(self) -> int:
        """Where the warps' partial sums begin: (k_warps, matrices, tiles of a pass, sums)."""
        return self.squares_offset + self.squares_nbytes(self.cta_warps)

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(
            grid=(self.grid_ctas, 1, 1),
            block=(32 * self.cta_warps, 1, 1),
            cluster=(self.cluster, 1, 1),
            shared_bytes=max(self.records_offset + self._rest_nbytes, self.least_shared),
            resident=self.resident,
            prefers_shared=True,
        )
