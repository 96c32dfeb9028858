"""Cuts of launches whose weights come tile by tile: columns, rows, rings and shared memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.spec import SHARED_NBYTES, SMS, side_by_side
from urdir.ptxgen.kernels.linear.steps import Part
from urdir.ptxgen.spec import ceil_div
from urdir.ptxgen.weights.layout import TILE_COLS, TILE_ROWS, Layout
from urdir.ptxgen.weights.tiles import Tile

#: Warps of a CTA, one CTA an SM. At 128 registers a thread these are half of the SM's registers, so
#: that a CTA of the next launch can start early.
WARPS = 8
#: The fewest and the most slots of a warp's ring. On an H200 8B Q4_K_M decodes at 756 tokens/s with
#: four slots, at 762 with six.
MIN_SLOTS, MAX_SLOTS = 2, 6
#: The most bytes of tiles that a CTA has in flight before it waits for earlier launches. Later
#: loads, above all those of activations, queue after these. On an H200 8B Q4_K_M decodes at 754
#: tokens/s with two tiles of each warp in flight (37 KB), at 736 with three, at 715 with four.
PACE_NBYTES = 40 * 1024
#: Bytes of shared memory that are kept for partial sums.
PARTIALS_NBYTES = 16 * 1024


@dataclass(frozen=True)
class CutOptions:
    """How a launch should be cut; 0 means chosen by shape.

    The warps of a CTA are ``split`` parts of the columns times ``groups`` of the rows. A CTA takes
    ``tiles_each`` tiles of 16 rows, ``per_pass`` of them before the sums of the parts are added. A
    warp's ring has ``stages`` slots. A CTA may take ``shared`` bytes of shared memory and takes at
    least ``least_shared``. ``resident``: CTAs that an SM has registers for.

    There is one CTA for each of ``sms`` SMs. ``fill``: if few SMs are left over, CTAs without rows
    of their own keep them busy (see `fills_sms`).

    The ``cluster`` CTAs (1, 2, 4 or 8) of a cluster have the same rows, and each has a part of the
    columns and of the activations. They add their sums through distributed shared memory (sm_90 and
    newer). `Part` then counts clusters, not CTAs.
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

    def within(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """Keywords of a product whose ``options`` are these, changed as those ``named`` say that
        are options. Without such ones the keywords as they are."""
        given = {field.name for field in fields(self)} & named.keys()
        others = {name: value for name, value in named.items() if name not in given}
        changed = replace(self, **{name: named[name] for name in given})
        return others | ({"options": changed} if given else {})

    def check(self, name: str) -> None:
        """Raise PtxgenError for options that no launch of kernel ``name`` can have."""
        for option, value in vars(self).items():
            if value < 0:
                raise PtxgenError(f"{name}: {option} is {value}: 0 chooses by shape")
        if self.cluster not in (1, 2, 4, 8):
            raise PtxgenError(f"{name}: cluster is {self.cluster}: 1, 2, 4 or 8")

    @property
    def clusters(self) -> int:
        """Clusters (CTAs, if a cluster is one CTA) that the launch is cut for."""
        return max(1, self.sms // self.cluster)


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that a kernel keeps in the shared memory of a CTA.

    ``tile``: a slot of a ring; ``sums``: a warp's sums of a tile; ``activations`` of the CTA and
    ``warp_activations`` of each warp; ``warp_squares``: a warp's sums of squares; ``shared``: what
    all threads read, a multiple of 16, after these; ``tables``: beside all of them, entries of
    codebooks; ``warps`` and ``slots`` of a ring: the most. ``partials``: the most for sums of all
    warps; None: all that two slots a warp leave; ``least_partials``: what warps leave for them.
    """

    tile: int
    sums: int
    warp_squares: int
    activations: int = 0
    warp_activations: int = 0
    shared: int = 0
    tables: int = 0
    warps: int = WARPS
    slots: int = MAX_SLOTS
    partials: int | None = PARTIALS_NBYTES
    least_partials: int = PARTIALS_NBYTES

    def activations_of(self, warps: int) -> int:
        """Bytes of activations of a CTA of this many warps."""
        return self.activations + self.warp_activations * warps

    def squares_of(self, warps: int) -> int:
        """Bytes of its sums of squares and of ``shared``, a multiple of 16."""
        return 16 * ceil_div(self.warp_squares * warps, 16) + self.shared

    def least(self, warps: int) -> int:
        """Bytes of its activations and of its rings, which have two slots at least."""
        return self.activations_of(warps) + warps * MIN_SLOTS * self.tile

    def most_partials(self, shared: int, warps: int) -> int:
        """Bytes of its partial sums, at most."""
        room = shared - self.squares_of(warps) - self.least(warps)
        return room if self.partials is None else min(self.partials, room)

    def most_warps(self, shared: int) -> int:
        """Warps that have room for a ring each."""
        room = shared - self.tables - self.least_partials
        return max((w for w in range(1, self.warps + 1) if self.least(w) <= room), default=1)


@dataclass(frozen=True, slots=True)
class ColumnCut:
    """How columns are cut: ``blocks`` of 8 units, the last perhaps of fewer. CTA r of a ``cluster``
    of C has blocks r, r + C, ...; ``warps`` share these. ``is_ragged``: some CTA's last block has
    fewer units, or none."""

    blocks: int
    cluster: int
    warps: int
    is_ragged: bool

    @property
    def cta_blocks(self) -> int:
        """Blocks of a row that a CTA has, at most."""
        return ceil_div(self.blocks, self.cluster)

    @property
    def warp_blocks(self) -> int:
        """Blocks of a warp, at most."""
        return ceil_div(self.cta_blocks, self.warps)


@dataclass(frozen=True, slots=True)
class TilePart(Part):
    """A part with its tiles: how many a CTA, and each of its warps, takes in a pass."""

    tile: Tile
    pass_tiles: int
    warp_tiles: int


@dataclass(frozen=True, slots=True)
class RowCut:
    """How rows are cut. A CTA takes tiles of a matrix in ``passes`` of at most ``pass_tiles``;
    after each pass the warps' sums are added. ``warps`` share the tiles of a pass. ``clusters`` are
    those of the grid; the ones without rows of their own work on the last tile."""

    warps: int
    passes: int
    pass_tiles: int
    parts: tuple[TilePart, ...]
    clusters: int

    @property
    def pass_rows(self) -> int:
        """Rows of a pass."""
        return TILE_ROWS * self.pass_tiles

    @property
    def warp_tiles(self) -> int:
        """Tiles of a warp in a pass, of one block, at most."""
        return self.pass_tiles // self.warps

    @property
    def tiles(self) -> int:
        """Tiles of a CTA, at most, the last ones perhaps beyond the rows."""
        return self.passes * self.pass_tiles

    @property
    def has_tiles_beyond(self) -> bool:
        """Whether there are tiles beyond a matrix' last."""
        return self.clusters > sum(part.ctas for part in self.parts) or any(
            part.layout.bands % (self.passes * part.pass_tiles) for part in self.parts
        )


@dataclass(frozen=True, slots=True)
class Ring:
    """A warp's ring of ``slots`` for tiles of ``tile_nbytes``. ``filled`` slots are filled before
    the wait for earlier launches, with at most ``pace`` tiles in flight (see `PACE_NBYTES`)."""

    tile_nbytes: int
    slots: int
    filled: int
    pace: int


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Offsets in a CTA's shared memory, which begins with the rings, and its size. ``partials`` are
    sums of the warps: (parts of the columns, matrices, tiles of a pass, sums)."""

    activations: int
    squares: int
    partials: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Cut:
    """How a launch is cut. ``sharers`` warps share their last block, each with a part of its
    tiles."""

    columns: ColumnCut
    rows: RowCut
    ring: Ring
    memory: SharedMemory
    sharers: int = 1

    def check(self, name: str, options: CutOptions) -> None:
        """Raise PtxgenError if it exceeds the ``options`` or what a CTA of kernel ``name`` has."""
        columns, warps = self.columns, self.columns.warps
        if not 1 <= warps * columns.cluster <= columns.blocks:
            parts = f"{warps} in each of {columns.cluster} CTAs" if columns.cluster > 1 else warps
            raise PtxgenError(f"{name}: split is {parts} of {columns.blocks} blocks")
        if not 1 <= self.warps <= 32:
            raise PtxgenError(f"{name}: {self.warps} warps: 1 to 32")
        if self.ring.slots < MIN_SLOTS:
            raise PtxgenError(
                f"{name}: two tiles ({self.ring.tile_nbytes} bytes) of {self.warps} warps and the "
                f"activations of {columns.blocks} blocks are more than {options.shared} bytes of "
                "shared memory"
            )

    @property
    def own_rows(self) -> int:
        """Rows of a pass that a CTA finishes."""
        return self.rows.pass_rows // self.columns.cluster

    @property
    def rounds(self) -> int:
        """Rows of a pass that a thread finishes, at most."""
        return ceil_div(self.own_rows, 32 * self.warps)

    @property
    def warps(self) -> int:
        """Warps of a CTA."""
        return self.columns.warps * self.rows.warps

    @property
    def lane_blocks(self) -> int:
        """Blocks whose activations a warp prepares, eight of each block in a lane."""
        return ceil_div(self.columns.cta_blocks, self.warps)

    @property
    def has_partial_blocks(self) -> bool:
        """Whether the warps' last blocks, or units of a row's last block, are beyond the row."""
        return self.columns.is_ragged or self.columns.cta_blocks % self.warps > 0


def cut_launch(
    options: CutOptions,
    layouts: Sequence[Layout],
    footprint: Footprint,
    tiles: Sequence[int],
    pair: int,
    even: bool,
    tile_of: Callable[[Layout], Tile] = Tile,
) -> Cut:
    """The cut of a launch; ``tiles``: how many tiles of each matrix a CTA should take.

    ``pair``: matrices whose tiles are taken in turn (two if gated). ``even``: only as many warps as
    have about the same share of the columns, unless too few tiles are left for them, else as many
    as possible. ``tile_of``: the tiles of a layout.
    The cut may exceed the options' limits; the spec then refuses it.
    """
    most_warps = footprint.most_warps(options.shared)
    columns = _cut_columns(options, layouts[0], most_warps, max(tiles) if even else 0)
    row_warps = options.groups or max(1, most_warps // columns.warps)
    warps = columns.warps * row_warps
    shared = options.shared - footprint.tables
    partials = footprint.most_partials(shared, warps)
    most_tiles = partials // (footprint.sums * columns.warps * pair)
    rows = _cut_rows(options, layouts, tiles, row_warps, most_tiles, tile_of)

    sums = columns.warps * pair * rows.pass_tiles * footprint.sums
    sizes = (footprint.activations_of(warps), footprint.squares_of(warps), sums)
    room = (shared - sum(sizes)) // (warps * footprint.tile)
    warp_tiles = columns.warp_blocks * rows.tiles * pair // row_warps
    slots = min(options.stages or footprint.slots, room, max(warp_tiles, MIN_SLOTS))
    pace = max(1, PACE_NBYTES // (warps * footprint.tile))
    ring = Ring(footprint.tile, slots, slots, pace)
    return Cut(columns, rows, ring, _lay_out(warps * slots * footprint.tile, *sizes))


def even_tiles(options: CutOptions, layouts: Sequence[Layout]) -> tuple[int, ...]:
    """Tiles that a CTA should take, the same number of each matrix: there is then one CTA an SM."""
    tiles = sum(layout.bands for layout in layouts)
    return (options.tiles_each or ceil_div(tiles, options.clusters),) * len(layouts)


def _cut_columns(options: CutOptions, of: Layout, most_warps: int, even_tiles: int) -> ColumnCut:
    """``even_tiles``: how many tiles a CTA has whose warps are to have even shares; 0: they need
    not."""
    blocks, is_ragged = of.row_tiles, of.cols % (TILE_COLS * options.cluster) > 0
    most = max(1, min(most_warps, blocks // options.cluster))
    if even_tiles:
        cta_blocks = ceil_div(blocks, options.cluster)
        taken = {k: k * ceil_div(cta_blocks, k) for k in range(1, most + 1)}
        most = max(k for k in taken if 16 * taken[k] <= 17 * min(taken.values()))
        # What the warp with the most takes, one block of columns of a tile after the other.
        turns = {k: ceil_div(even_tiles, most_warps // k) * taken[k] // k for k in taken}
        if even_tiles < most_warps // most and 3 * min(turns.values()) < 2 * turns[most]:
            # 11 blocks, of one tile: six warps with two in place of one with eleven
            most = min(taken, key=lambda k: (turns[k], taken[k], -k))
    return ColumnCut(blocks, options.cluster, options.split or most, is_ragged)


def _cut_rows(
    options: CutOptions,
    layouts: Sequence[Layout],
    tiles: Sequence[int],
    warps: int,
    most_tiles: int,
    tile_of: Callable[[Layout], Tile],
) -> RowCut:
    """``most_tiles``: tiles of a pass whose sums have room."""
    most = max(1, min(options.per_pass or most_tiles, most_tiles) // warps)
    each = [ceil_div(count, warps) for count in tiles]
    passes = ceil_div(max(each), most)
    if passes > 1:  # the same number for every matrix
        each = [ceil_div(max(each), passes)] * len(each)
    cta_rows = [TILE_ROWS * passes * warps * n for n in each]
    parts = tuple(
        TilePart(
            p.number,
            p.layout,
            p.first_cta,
            p.ctas,
            tile=tile_of(p.layout),
            pass_tiles=warps * n,
            warp_tiles=n,
        )
        for p, n in zip(side_by_side(layouts, cta_rows), each, strict=True)
    )
    clusters = sum(part.ctas for part in parts)
    if options.fill and clusters > options.clusters // 2:
        clusters = max(clusters, options.clusters)
    return RowCut(warps, passes, warps * max(each), parts, clusters)


def _lay_out(rings: int, activations: int, squares: int, partials: int) -> SharedMemory:
    """The offsets of neighbouring regions in this order, from their sizes in bytes."""
    squares_at = rings + activations
    partials_at = squares_at + squares
    return SharedMemory(rings, squares_at, partials_at, partials_at + partials)
