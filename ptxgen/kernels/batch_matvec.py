"""Matrix-vector products of a small batch with quantised weights, on integer tensor cores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.formats import FORMATS
from urdir.ptxgen.kernels._fused_product import MAX_BATCH, odd_cols
from urdir.ptxgen.kernels._tiled_product import MIN_SLOTS, TiledProduct
from urdir.ptxgen.kernels._weight_tiles import Tile
from urdir.ptxgen.layout import TILE_COLS, TILE_UNITS, Layout
from urdir.ptxgen.spec import Tolerance, ceil_div

#: Tiles of a warp, the last of a block, that are asked for behind its next block's activations: it
#: is these that would wait else. On an H200 a step of 4 and of 8 sequences of an 8B Q4_K_M model
#: takes 1.52 and 1.76 ms with none, 1.50 and 1.75 with one, 1.48 and 1.73 with two or three.
LATE_TILES = 2


@dataclass(frozen=True)
class BatchMatvec(TiledProduct):
    """1 to 8 activation vectors times quantised weights, on integer tensor cores.

    Activations (after ``norm``) are rounded to 16-bit multiples of the largest in each 256 columns,
    relative error 3e-5. Products are exact, and so are the sums of a row's 256 columns if the
    type's group scales are integers; other sums are f32. y[b] has the same bits in every batch,
    whatever the other vectors are.

    Raises PtxgenError for other batches and for unquantised types.
    """

    resident: int = 1  # targets before sm_90 need the registers, and run no launch ahead
    batch: int = MAX_BATCH

    name = "batch_matvec"
    template = ("urdir.templates", "batch_matvec.ptx.j2")

    def __post_init__(self) -> None:
        if not 1 <= self.batch <= MAX_BATCH:
            raise PtxgenError(f"batch_matvec: batch is {self.batch}: 1 to {MAX_BATCH}")
        if any(fmt.is_float for fmt in self.formats):
            raise PtxgenError("batch_matvec: the weights must be quantised")
        super().__post_init__()

    @cached_property
    def k_warps(self) -> int:
        """As many as there are: rounding activations takes longer than their tiles' memory."""
        return self.split or self._most_parts

    @property
    def lane_vectors(self) -> int:
        """Vectors of which a lane has sums, those of two columns of an ``mma``. Up to four vectors
        have two columns, of high and of low bytes; more have one, and an ``mma`` for each byte."""
        return 1 if self.batch <= MAX_BATCH // 2 else 2

    @property
    def sum_lanes(self) -> int:
        """Of the four lanes of a row, those whose vectors exist."""
        return ceil_div(self.batch, self.lane_vectors)

    @property
    def lane_units(self) -> int:
        """Units of a block that a lane rounds: two lanes share a vector that has two columns."""
        return TILE_UNITS // 2 * self.lane_vectors

    @property
    def partial_nbytes(self) -> int:
        """Sums of two rows and a lane's vectors, eight times."""
        return 8 * 8 * self.lane_vectors * self.sum_lanes

    @property
    def most_groups(self) -> int:
        """Groups of a unit, at most: as many sums of it are in registers."""
        return max(fmt.unit_groups for fmt in self.formats)

    def activations_nbytes(self, warps: int) -> int:
        """The norm's weights of a block, for each warp; activations are in registers."""
        return warps * 4 * TILE_COLS if self.normed else 0

    def squares_nbytes(self, warps: int) -> int:
        return warps * 4 * MAX_BATCH

    @cached_property
    def tile_nbytes(self) -> int:
        tiles = [Tile(Layout(fmt, 1, self.cols)) for fmt in self.formats]
        alignment = max(tile.alignment for tile in tiles)
        return ceil_div(max(tile.nbytes for tile in tiles), alignment) * alignment

    def partials_most(self) -> int:
        """All that two slots a warp leave: a pass more may mean to round all activations again."""
        warps = self.cta_warps
        rings = warps * MIN_SLOTS * self.tile_nbytes
        return self.shared - self.squares_nbytes(warps) - self.activations_nbytes(warps) - rings

    @property
    def pace(self) -> int:
        """One: more activations than of one vector would queue behind tiles. With two, on an H200,
        four sequences of an 8B Q4_K_M model take 1.74 ms a step in place of 1.68, eight 1.88 in
        place of 1.85."""
        return 1

    @property
    def late_rounds(self) -> int:
        """Rounds of tiles, one of each matrix, that a warp asks for behind each of its blocks'
        activations: see `LATE_TILES`. None where it has but one block."""
        if self.warp_blocks == 1:
            return 0
        return min(min(LATE_TILES, self.slots - 1) // self.pair, self.warp_tiles)

    @property
    def filled_slots(self) -> int:
        """Those of the late tiles are filled behind the first block's activations."""
        return self.slots - self.pair * self.late_rounds

    @property
    def tolerance(self) -> Tolerance:
        """A step is the largest of 256 / 32639: of standard normal activations 3.0, of products of
        two (with ``norm``) 5.0. The RMS error, 1 / sqrt(12) of it, is 3e-5 or 5e-5 of theirs, and
        the worst of many products is off by as much of the largest one; three times that where
        there are few. Gated, the relative errors of both factors add up.
        """
        return Tolerance(rtol=3e-4 if self.gated else 1.5e-4, atol=5e-4)

    @classmethod
    def examples(cls) -> Sequence[BatchMatvec]:
        quantised = [f for f in FORMATS.values() if not f.is_float]
        q8, q4_k, q6_k, q5_0 = (FORMATS[n] for n in ("Q8_0", "Q4_K", "Q6_K", "Q5_0"))
        each = [
            cls(f, 16 + 9 * i, odd_cols(f), bias=i % 2 == 0, batch=1 + i % 8)
            for i, f in enumerate(quantised)
        ]
        wide = [
            cls(f, 33, 1024, batch=8 - i % 8, residual=i % 2 == 0, tiles_each=1 + i % 3)
            for i, f in enumerate(quantised)
        ]
        return (
            cls(q8, 3, 32, batch=2),
            *each,
            *wide,
            cls(q4_k, 40, 2304, eps=1e-5, split=2, tiles_each=3, per_pass=2, bias=True),
            cls(q4_k, 40, 768, gated=True, eps=1e-5, batch=4),
            cls(q6_k, 23, 1536, gated=True, batch=3, split=2, groups=1, stages=2),
            cls(q5_0, 17, 1376, gated=True, eps=1e-6, batch=7, stages=3, tiles_each=2),
            cls(q4_k, 64, 1024, eps=1e-5, others=((q6_k, 17), (q8, 5)), batch=5, tiles_each=2),
            cls(q4_k, 9, 4864, residual=True, batch=8, stages=4),
            cls(q6_k, 20, 1280, eps=1e-6, batch=3, split=1, groups=2),
            cls(q5_0, 40, 1376, batch=5, split=2, groups=1, tiles_each=2),
            cls(q4_k, 40, 2304, residual=True, batch=8, cluster=2),
            cls(q4_k, 40, 4352, bias=True, eps=1e-5, batch=5, cluster=4, tiles_each=4, per_pass=2),
            cls(q6_k, 50, 1280, gated=True, eps=1e-6, batch=3, cluster=2, split=1, groups=2),
            cls(q4_k, 35, 768, eps=1e-5, others=((q8, 17),), batch=2, cluster=2),
            cls(q4_k, 70, 1280, gated=True, eps=1e-5, split=2, groups=1, tiles_each=5, per_pass=3),
            cls(q6_k, 70, 1280, residual=True, batch=4, split=2, groups=1, tiles_each=5),
            cls(q8, 70, 480, eps=1e-5, batch=6, tiles_each=5, per_pass=2),
        )
