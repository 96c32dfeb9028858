"""How launches of `GemmSmall` are cut, and what a lane has of their vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from urdir.ptxgen.kernels.linear.balance import balanced
from urdir.ptxgen.kernels.linear.cut import Cut, CutOptions, Footprint, cut_launch, even_tiles
from urdir.ptxgen.kernels.linear.prologue.norm import BegunNorm, Normed
from urdir.ptxgen.kernels.linear.prologue.packed import PackedInput
from urdir.ptxgen.kernels.linear.spec import MAX_BATCH
from urdir.ptxgen.kernels.linear.steps import Prologue, find
from urdir.ptxgen.spec import ceil_div
from urdir.ptxgen.weights.grids import entries_nbytes
from urdir.ptxgen.weights.halves import Halves
from urdir.ptxgen.weights.layout import TILE_COLS, TILE_UNITS, Layout
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


@dataclass(frozen=True, slots=True)
class Lanes:
    """Each of a row's four lanes has sums of ``vectors``, those of two columns of an ``mma``, out
    of a ``batch``. A vector with one column has an ``mma`` for each of its bytes; one with two
    has its high and its low bytes there."""

    vectors: int
    batch: int

    @property
    def busy(self) -> int:
        """How many of a row's four lanes have vectors."""
        return ceil_div(self.batch, self.vectors)

    @property
    def units(self) -> int:
        """Units of a block that a lane rounds: two lanes share a vector that has two columns."""
        return TILE_UNITS // 2 * self.vectors

    @property
    def partial_nbytes(self) -> int:
        """Sums of two rows and a lane's vectors, eight times."""
        return 8 * 8 * self.vectors * self.busy


def small_cut(
    options: CutOptions,
    layouts: Sequence[Layout],
    pair: int,
    lanes: Lanes,
    prologue: Sequence[Prologue],
) -> Cut:
    """With as many warps as possible: rounding activations takes longer than loading their tiles.
    All shared memory that is left is for partial sums: in a further pass activations may have to be
    rounded again.
    """
    first, norm = layouts[0].format, find(prologue, Normed)
    is_packed, begun = (find(prologue, kind) is not None for kind in (PackedInput, BegunNorm))

    def tile_of(layout: Layout) -> Tile:
        return Tile(layout, as_halves=is_packed and not Halves(layout.format).stay_whole)

    footprint = Footprint(
        tile=_slot_nbytes([tile_of(layout) for layout in layouts]),
        sums=lanes.partial_nbytes,
        warp_squares=4 * MAX_BATCH,
        # the norm's weights of a block
        warp_activations=4 * TILE_COLS if norm and norm.norm.weight else 0,
        tables=entries_nbytes(layout.format for layout in layouts),
        partials=None,
    )
    if first.is_float and not options.split:
        blocks = max(1, layouts[0].row_tiles // options.cluster)
        warps = min(FLOAT_WARPS, footprint.most_warps(options.shared))
        options = replace(options, split=min(blocks, warps))
    tiles = _tiles(options, layouts)
    cut = cut_launch(options, layouts, footprint, tiles, pair, even=False, tile_of=tile_of)
    # No sharers where x is normalised: each would count the squares of the block.
    sharers = 1 if norm or begun else _sharers(cut)
    # Of weights as halves, and of floats of eight bits, packed activations are loaded a block
    # ahead: no tile delays them. On an H200 a step of 8 sequences of an 8B Q4_K_M model takes
    # 2.54 ms so, else 2.59.
    ahead = is_packed and all(p.tile.as_halves for p in cut.rows.parts)
    # Nor of floats, whose tiles are as large as activations. On an H200 a step of 8 sequences
    # of an 8B BF16 model takes 4.304 ms so, else 4.337.
    none = ahead or first.arithmetic != "integers"
    late = 0 if none else pair * _late_rounds(cut, pair, sharers)
    # One tile at a time is in flight: with more, the activations of several vectors would wait.
    # On an H200 a step of 4 sequences of an 8B Q4_K_M model takes 1.68 ms with one tile, 1.74
    # with two; a step of 8 sequences 1.85 and 1.88.
    ring = replace(cut.ring, pace=1, filled=cut.ring.slots - late)
    return replace(cut, ring=ring, sharers=sharers)


def _slot_nbytes(tiles: Sequence[Tile]) -> int:
    alignment = max(tile.alignment for tile in tiles)
    return ceil_div(max(tile.nbytes for tile in tiles), alignment) * alignment


def _tiles(options: CutOptions, layouts: Sequence[Layout]) -> tuple[int, ...]:
    """Tiles that a CTA should take: fewer of a matrix of a larger type, which take longer."""
    if options.tiles_each or len(layouts) == 1:
        return even_tiles(options, layouts)
    costs = [layout.tile_nbytes for layout in layouts]
    return balanced([layout.bands for layout in layouts], costs, options.clusters)


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
