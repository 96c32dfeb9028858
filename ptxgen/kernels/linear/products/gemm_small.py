"""Matrix products (GEMM) of 1 to 8 vectors, on tensor cores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.balance import balanced
from urdir.ptxgen.kernels.linear.cut import (
    Cut,
    CutOptions,
    Footprint,
    cut_launch,
    even_tiles,
)
from urdir.ptxgen.kernels.linear.epilogue.norm import BeginNorm
from urdir.ptxgen.kernels.linear.epilogue.pack import PackedOutput
from urdir.ptxgen.kernels.linear.products.gemm_small_examples import gemm_small_examples
from urdir.ptxgen.kernels.linear.products.tiled import TiledSpec
from urdir.ptxgen.kernels.linear.prologue.norm import BegunNorm, Normed
from urdir.ptxgen.kernels.linear.prologue.packed import PackedInput
from urdir.ptxgen.kernels.linear.spec import MAX_BATCH, LinearSpec
from urdir.ptxgen.spec import Tolerance, ceil_div
from urdir.ptxgen.target import since
from urdir.ptxgen.weights.format import UNIT, Format
from urdir.ptxgen.weights.grids import entries_nbytes
from urdir.ptxgen.weights.halves import Halves
from urdir.ptxgen.weights.layout import TILE_COLS, TILE_UNITS, Layout
from urdir.ptxgen.weights.packed_few import Order
from urdir.ptxgen.weights.tiles import Tile

#: How many of a block's last tiles a warp loads only after its next block's activations, which
#: would otherwise wait for them. On an H200 a step of 4 and of 8 sequences of an 8B Q4_K_M model
#: takes 1.52 and 1.76 ms with none, 1.50 and 1.75 with one, 1.48 and 1.73 with two or three.
LATE_TILES = 2
#: Warps of the columns of BF16 and F16 matrices, at most: their tiles are large, so that rings of
#: four warps keep 64 to 96 KB in flight, and leave room for sums of all tiles of a CTA. Tiles of
#: E4M3 are half as large: products of the layers of an 8B model with 8 vectors take 2.40 ms with
#: four warps on an H200, 2.22 with six, 2.18 with eight.
FLOAT_WARPS = 4


@dataclass(frozen=True)
class GemmSmall(TiledSpec):
    """1 to 8 activation vectors times weights, on tensor cores.

    With quantised weights activations (after ``norm``) are rounded to 16-bit multiples of the
    largest in each 256 columns, relative error 3e-5. Products are exact, and so are the sums of a
    row's 256 columns if the type's group scales are integers; other sums are f32. y[b] has the same
    bits in every batch, whatever the other vectors are.

    With a `PackedInput` sums are f32, and weights are rounded to f16 as in `PackedProduct`, unless
    their quants `stay_whole` or `factors_are_exact`.

    BF16 and F16 weights are multiplied as they are, with activations that are each the sum of two
    such numbers: of 16 bits, or of 22 (from 0.001 to 1,048,064).

    Raises PtxgenError for other batches, for F32 weights, for floats beside quantised weights, for
    rows of floats that are no whole units, and for norms that subtract the mean or add a bias; of
    packed vectors, for a norm that has not begun, and for float weights.
    """

    options: CutOptions = field(default_factory=lambda: CutOptions(resident=1))
    batch: int = MAX_BATCH

    #: Before sm_90 no launch starts early, and the registers are needed.
    resident = 1
    prologues = (PackedInput, BegunNorm, Normed)
    epilogues = (*LinearSpec.epilogues, BeginNorm, PackedOutput)
    name = "gemm_small"
    template = ("urdir.templates", "linear/products/gemm_small.ptx.j2")

    def __post_init__(self) -> None:
        if not takes(self.formats, self.cols):
            names = ", ".join(fmt.name for fmt in self.formats)
            raise PtxgenError(
                "gemm_small: the weights must be quantised, or BF16 and F16 of multiples of "
                f"{UNIT} columns: {names}, {self.cols} columns"
            )
        if self.has(PackedInput) and self.format.is_float:
            raise PtxgenError("gemm_small: packed_input is for quantised weights")
        if self.norm is not None and not self.norm.is_factor:
            raise PtxgenError(f"gemm_small: {self.norm} must be a launch of its own")
        if self.norm is not None and (self.has(PackedInput) or self.has(BegunNorm)):
            raise PtxgenError("gemm_small: packed_input and begun_norm go without a norm")
        super().__post_init__()

    @property
    def targets(self) -> tuple[str, ...]:
        since_80 = (self.has(PackedInput) or self.multiplies_floats) and self.cluster == 1
        return since(80) if since_80 else super().targets

    @property
    def multiplies_floats(self) -> bool:
        """Whether the weights or quants are floats."""
        return self.format.arithmetic != "integers"

    @property
    def order(self) -> Order:
        """That of packed x: the first matrix decides."""
        return Halves(self.format).order

    @cached_property
    def cut(self) -> Cut:
        """With as many warps as possible: rounding activations takes longer than loading their
        tiles. All shared memory that is left is for partial sums: in a further pass activations may
        have to be rounded again.
        """
        footprint = Footprint(
            tile=self._slot_nbytes,
            sums=self.partial_nbytes,
            warp_squares=4 * MAX_BATCH,
            warp_activations=4 * TILE_COLS
            if self.norm and self.norm.weight
            else 0,  # the norm's weights of a block
            tables=entries_nbytes(self.formats),
            partials=None,
        )
        options = self.options
        if self.format.is_float and not options.split:
            blocks = max(1, self.layout.row_tiles // options.cluster)
            warps = min(FLOAT_WARPS, footprint.most_warps(options.shared))
            options = replace(options, split=min(blocks, warps))
        cut = cut_launch(
            *(options, self.layouts, footprint, self._tiles, self.pair),
            even=False,
            tile_of=self._tile_of,
        )
        # No sharers where x is normalised: each would count the squares of the block.
        sharers = 1 if self.normed else _sharers(cut)
        # Of weights as halves, and of floats of eight bits, packed activations are loaded a block
        # ahead: no tile delays them. On an H200 a step of 8 sequences of an 8B Q4_K_M model takes
        # 2.54 ms so, else 2.59.
        ahead = self.has(PackedInput) and all(p.tile.as_halves for p in cut.rows.parts)
        # Nor of floats, whose tiles are as large as activations. On an H200 a step of 8 sequences
        # of an 8B BF16 model takes 4.304 ms so, else 4.337.
        none = ahead or self.multiplies_floats
        late = 0 if none else self.pair * _late_rounds(cut, self.pair, sharers)
        # One tile at a time is in flight: with more, the activations of several vectors would wait.
        # On an H200 a step of 4 sequences of an 8B Q4_K_M model takes 1.68 ms with one tile, 1.74
        # with two; a step of 8 sequences 1.85 and 1.88.
        ring = replace(cut.ring, pace=1, filled=cut.ring.slots - late)
        return replace(cut, ring=ring, sharers=sharers)

    @property
    def _tiles(self) -> tuple[int, ...]:
        """Tiles that a CTA should take: fewer of a matrix of a larger type, which take longer."""
        if self.options.tiles_each or not self.others:
            return even_tiles(self.options, self.layouts)
        costs = [layout.tile_nbytes for layout in self.layouts]
        return balanced([layout.bands for layout in self.layouts], costs, self.options.clusters)

    def _tile_of(self, layout: Layout) -> Tile:
        return Tile(
            layout, as_halves=self.has(PackedInput) and not Halves(layout.format).stay_whole
        )

    @property
    def _slot_nbytes(self) -> int:
        tiles = [self._tile_of(layout) for layout in self.layouts]
        alignment = max(tile.alignment for tile in tiles)
        return ceil_div(max(tile.nbytes for tile in tiles), alignment) * alignment

    @property
    def late_rounds(self) -> int:
        """Rounds of a block's tiles (one of each matrix of a pair) that a warp loads after its next
        block's activations: see `LATE_TILES`."""
        return (self.cut.ring.slots - self.cut.ring.filled) // self.pair

    @property
    def biased_grids(self) -> bool:
        return self.has(PackedInput)

    @property
    def lane_vectors(self) -> int:
        """Vectors of which a lane has sums, those of two columns of an ``mma``. Up to four vectors
        have two columns, of high and of low bytes; more have one, and an ``mma`` for each byte;
        packed ones, and those for float weights, have one."""
        both_bytes = (
            self.batch <= MAX_BATCH // 2
            and not self.has(PackedInput)
            and not self.multiplies_floats
        )
        return 1 if both_bytes else 2

    @property
    def sum_lanes(self) -> int:
        """How many of a row's four lanes have vectors."""
        return ceil_div(self.batch, self.lane_vectors)

    @property
    def lane_units(self) -> int:
        """Units of a block that a lane rounds: two lanes share a vector that has two columns."""
        return TILE_UNITS // 2 * self.lane_vectors

    @property
    def has_partial_block(self) -> bool:
        """Whether the last block of a row has units beyond it."""
        return self.layout.row_units % TILE_UNITS != 0

    @property
    def partial_nbytes(self) -> int:
        """Sums of two rows and a lane's vectors, eight times."""
        return 8 * 8 * self.lane_vectors * self.sum_lanes

    @property
    def most_groups(self) -> int:
        """Groups of a unit, at most: as many sums of it are in registers."""
        return max(fmt.unit_groups for fmt in self.formats)

    @property
    def tolerance(self) -> Tolerance:
        """Activations are rounded to multiples of the largest of 256 / 32639. The largest is about
        3.0 if they are standard normal, 5.0 if they are products of two such (with ``norm``). The
        RMS error, 1 / sqrt(12) of a multiple, is 3e-5 or 5e-5 of them. The worst of many products
        is off by as much of the largest product, of few by three times that. Gated, the relative
        errors of both factors add up. Packed ones: see `PackedProduct`. With float weights each is
        rounded to 16 bits of its own, with E4M3 quants to f16, by up to 2^-11. Quants that stay
        whole are subnormal: tensor cores align products by exponents and drop bits below 2^-24 of
        the largest, of which such a quant has up to ten leading zeros. An activation that is many
        times the others (a first token's) leaves that much: 1.3e-5 was measured on an H200.
        """
        packing = 2.0**-11 * self.has(PackedOutput)
        if self.has(PackedInput):
            made = [Halves(fmt) for fmt in self.formats]
            exact = [of.stay_whole or of.factors_are_exact for of in made]
            roundings = max(0 if e else of.roundings for e, of in zip(exact, made, strict=True))
            return Tolerance(rtol=2.0**-11 * roundings + packing + 2.0**-14)
        if self.multiplies_floats:
            least = 2e-5 if self.format.is_float else 2.0**-11
            return Tolerance(rtol=least * self.pair + packing)
        return Tolerance(rtol=(3e-4 if self.f else 1.5e-4) + packing, atol=5e-4)

    @classmethod
    def examples(cls) -> Mapping[str, GemmSmall]:
        return gemm_small_examples(cls)


def takes(formats: Iterable[Format], cols: int) -> bool:
    """Whether `GemmSmall` has matrices of these types, with ``cols`` columns, in one launch."""
    kinds = {fmt.arithmetic for fmt in formats}
    if kinds == {"integers"}:
        return True
    return len(kinds) == 1 and cols % UNIT == 0 and all(fmt.element != "f32" for fmt in formats)


def _late_rounds(cut: Cut, pair: int, sharers: int) -> int:
    """0 where a warp has only one block, and no more than it takes of a block that it shares."""
    if cut.columns.warp_blocks == 1:
        return 0
    fewest = min(part.warp_tiles for part in cut.rows.parts) // sharers
    return min(min(LATE_TILES, cut.ring.slots - 1) // pair, fewest)


def _sharers(cut: Cut) -> int:
    """How many warps share a block; 1 unless there is one pass and the blocks fit.

    In an 8B model's longest rows 8 warps have 28 blocks. On an H200 (Q4_K_M) a step of 4 sequences
    takes 1.44 ms with sharers and 1.48 without.
    """
    columns, rows = cut.columns, cut.rows
    over = columns.cta_blocks % columns.warps
    alike = columns.blocks % columns.cluster == 0 and columns.cta_blocks > columns.warps
    if not over or not alike or rows.passes > 1 or columns.warps % over:
        return 1
    sharers = columns.warps // over
    return 1 if any(part.warp_tiles % sharers for part in rows.parts) else sharers
