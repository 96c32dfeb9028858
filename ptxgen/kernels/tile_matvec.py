"""Matrix-vector products (GEMV) of one vector, tile by tile, as decode steps have them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.formats import FORMATS, UNIT, Format
from urdir.ptxgen.kernels._fused_product import SHARED_NBYTES, SMS, FusedProduct, Part, odd_cols
from urdir.ptxgen.kernels._weight_tiles import Tile
from urdir.ptxgen.layout import TILE_ROWS, TILE_UNITS, Layout
from urdir.ptxgen.spec import LaunchShape, Tolerance, ceil_div

#: Warps of a CTA, one CTA an SM: half of the SM's registers at 128 a thread, so that the next
#: launch's CTA is there early.
WARPS = 8
#: With fewer, `Matvec` is better off: each would have many activations to round.
LEAST_WARPS = 4
#: Registers of a thread, at most: with more, older assemblers' code spills.
MAX_REGISTERS = 170
#: Slots of a warp's ring, at least and at most.
MIN_SLOTS, MAX_SLOTS = 2, 4
#: Tiles that a warp has yet to ask for when the next launch may start: its CTAs take a while to be
#: there, and earlier their loads would only delay this launch's. Measured on an H200, 8B Q4_K_M.
TILES_LEFT = 1
#: Bytes of partial sums in shared memory, at most.
PARTIALS_NBYTES = 16 * 1024
#: Bytes of a unit's activations in shared memory: see templates/_tile_x.j2.
RECORD_NBYTES = {"f32": 144, "i16": 80}

Activations = Literal["f32", "i16"]


@dataclass(frozen=True, slots=True)
class TilePart(Part):
    """A part with its tiles."""

    tile: Tile


@dataclass(frozen=True)
class TileMatvec(FusedProduct):
    """One activation vector times weights of any type.

    ``activations``: "f32", or "i16" for quantised weights: rounded to 16-bit multiples of the
    largest in each 32 columns, relative error 2e-5, and multiplied with the quants exactly on
    tensor cores. Sums are f32.

    A launch is cut by shape where a field is 0: ``split`` parts of the columns times ``groups`` of
    the rows are the warps of a CTA; it takes ``tiles_each`` tiles of 16 rows, ``per_pass`` before
    the parts' sums meet; ``stages`` tiles are in a warp's ring. ``shared``: bytes of shared memory
    that a CTA may take, and ``least_shared`` those that it takes even if it needs fewer;
    ``resident``: CTAs that an SM has registers for.

    One CTA an SM is what the launch is cut for (``sms`` of them). ``fill``: if that leaves a few
    SMs over, CTAs without rows of their own keep them busy (see `fills_sms`).

    Raises PtxgenError for "i16" with unquantised types.
    """

    activations: Activations = "f32"
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

    name = "tile_matvec"
    template = ("urdir.templates", "tile_matvec.ptx.j2")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.activations == "i16" and any(fmt.is_float for fmt in self.formats):
            raise PtxgenError("tile_matvec: 16-bit activations are for quantised weights only")
        if not 1 <= self.k_warps <= self.blocks:
            raise PtxgenError(f"tile_matvec: split is {self.split} of {self.blocks} blocks")
        if not 1 <= self.cta_warps <= 32:
            raise PtxgenError(f"tile_matvec: {self.cta_warps} warps: 1 to 32")
        if self.slots < MIN_SLOTS:
            raise PtxgenError(
                f"tile_matvec: two tiles ({self.tile_nbytes} bytes) of {self.cta_warps} warps and "
                f"{self.cols} activations are more than the {self.shared} bytes of shared memory"
            )

    @staticmethod
    def fits(formats: Iterable[Format], cols: int, activations: Activations, shared: int) -> bool:
        """Whether so much shared memory has room for the activations and the tiles of enough warps,
        and these have registers for the activations.
        """
        tile = max(Tile(Layout(fmt, 1, cols)).nbytes for fmt in formats)
        blocks = ceil_div(cols, UNIT * TILE_UNITS)
        room = shared - PARTIALS_NBYTES - RECORD_NBYTES[activations] * TILE_UNITS * blocks
        warps = min(WARPS, room // (MIN_SLOTS * tile))
        return warps >= LEAST_WARPS and 8 * ceil_div(blocks, warps) + 16 <= min(
            MAX_REGISTERS, 1024 // warps
        )

    @cached_property
    def matrices(self) -> tuple[TilePart, ...]:
        """The parts with their tiles."""
        return tuple(
            TilePart(p.number, p.layout, p.first_cta, p.ctas, Tile(p.layout)) for p in self.parts
        )

    @property
    def _pair(self) -> int:
        return 2 if self.gated else 1

    # ---- how it is cut ----

    @property
    def blocks(self) -> int:
        """Blocks of a row: 8 units, the last one perhaps less."""
        return ceil_div(self.row_units, TILE_UNITS)

    @cached_property
    def k_warps(self) -> int:
        """Parts of the columns: as many as there are warps, if they have about the same share."""
        if self.split:
            return self.split
        most = min(self._most_warps, self.blocks)
        taken = {k: k * ceil_div(self.blocks, k) for k in range(1, most + 1)}
        return max(k for k in taken if 16 * taken[k] <= 17 * min(taken.values()))

    @property
    def row_warps(self) -> int:
        """Parts of the rows."""
        return self.groups or max(1, self._most_warps // self.k_warps)

    @property
    def _most_warps(self) -> int:
        """Warps that have room for a ring each."""
        room = self.shared - self._records_nbytes - PARTIALS_NBYTES
        return max(1, min(WARPS, room // (MIN_SLOTS * self.tile_nbytes)))

    @property
    def cta_warps(self) -> int:
        """Warps of a CTA."""
        return self.k_warps * self.row_warps

    @property
    def warp_blocks(self) -> int:
        """Blocks of a warp, at most."""
        return ceil_div(self.blocks, self.k_warps)

    @cached_property
    def _tiles_wanted(self) -> int:
        rows = (self.rows, *(rows for _, rows in self.others))
        return self.tiles_each or ceil_div(sum(ceil_div(r, TILE_ROWS) for r in rows), self.sms)

    @cached_property
    def pass_tiles(self) -> int:
        """Tiles of a CTA before the sums meet: of all its warps' parts of the rows."""
        fitting = PARTIALS_NBYTES // (4 * TILE_ROWS * self.k_warps * self._pair)
        most = max(1, min(self.per_pass or fitting, fitting) // self.row_warps)
        each = ceil_div(self._tiles_wanted, self.row_warps)
        return self.row_warps * ceil_div(each, ceil_div(each, most))

    @property
    def passes(self) -> int:
        """How often they meet."""
        return ceil_div(self._tiles_wanted, self.pass_tiles)

    @property
    def tiles(self) -> int:
        """Tiles of a CTA, the last ones perhaps beyond the rows."""
        return self.passes * self.pass_tiles

    @property
    def cta_rows(self) -> int:
        return TILE_ROWS * self.tiles

    @property
    def tiles_left(self) -> int:
        """See `TILES_LEFT`."""
        return TILES_LEFT

    @property
    def grid_ctas(self) -> int:
        """CTAs of the grid; those that have no rows work on the last tile instead."""
        filled = self.fill and self.ctas > self.sms // 2
        return max(self.ctas, self.sms) if filled else self.ctas

    @property
    def has_partial_rows(self) -> bool:
        """Whether there are tiles beyond a matrix' last."""
        return self.grid_ctas > self.ctas or any(
            part.layout.bands % self.tiles for part in self.parts
        )

    # ---- shared memory: rings, records, sums of squares, partial sums ----

    @cached_property
    def tile_nbytes(self) -> int:
        """Bytes of a slot."""
        return max(Tile(Layout(fmt, 1, self.cols)).nbytes for fmt in self.formats)

    @property
    def slots(self) -> int:
        """Slots of a warp's ring: all but one are filled when a tile is waited for."""
        room = (self.shared - self._rest_nbytes) // (self.cta_warps * self.tile_nbytes)
        tiles = self.warp_blocks * self.tiles * self._pair // self.row_warps
        return min(self.stages or MAX_SLOTS, room, tiles + 1)

    @property
    def _rest_nbytes(self) -> int:
        partials = 4 * self.k_warps * self._pair * TILE_ROWS * self.pass_tiles
        return self._records_nbytes + 16 * ceil_div(self.cta_warps, 4) + partials

    @property
    def record_nbytes(self) -> int:
        """Bytes of a unit's activations."""
        return RECORD_NBYTES[self.activations]

    @property
    def _records_nbytes(self) -> int:
        return self.record_nbytes * TILE_UNITS * self.blocks

    @property
    def records_offset(self) -> int:
        """Where the activations begin."""
        return self.cta_warps * self.slots * self.tile_nbytes

    @property
    def squares_offset(self) -> int:
        """Where the warps' sums of squares begin."""
        return self.records_offset + self._records_nbytes

    @property
    def partials_offset(self) -> int:
        """Where the warps' partial sums begin: (k_warps, matrices, rows of a pass) f32."""
        return self.squares_offset + 16 * ceil_div(self.cta_warps, 4)

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(
            grid=(self.grid_ctas, 1, 1),
            block=(32 * self.cta_warps, 1, 1),
            shared_bytes=max(self.records_offset + self._rest_nbytes, self.least_shared),
            resident=self.resident,
            prefers_shared=True,
        )

    @property
    def tolerance(self) -> Tolerance:
        """f32: rounding of the sums, see `Matvec`. i16: standard normal activations are off by 2e-5
        of their size, a product by as much of its own, several times that where few rows cancel."""
        if self.activations == "i16":
            return Tolerance(rtol=1.5e-4, atol=5e-4)
        return Tolerance(rtol=5e-6 if self.gated else 2e-6, atol=2e-6)

    @classmethod
    def examples(cls) -> Sequence[TileMatvec]:
        formats = FORMATS.values()
        q8, q4_k, q6_k, q3_k = (FORMATS[n] for n in ("Q8_0", "Q4_K", "Q6_K", "Q3_K"))
        f16, f32 = FORMATS["F16"], FORMATS["F32"]
        each = [cls(f, 17, odd_cols(f), bias=i % 2 == 0) for i, f in enumerate(formats)]
        rounded = [
            cls(f, 17, odd_cols(f), bias=i % 2 == 0, activations="i16")
            for i, f in enumerate(f for f in formats if not f.is_float)
        ]
        return (
            cls(q8, 3, 64),
            *each,
            *rounded,
            cls(q4_k, 9, 2304, split=2, tiles_each=1, stages=2, residual=True, activations="i16"),
            cls(q6_k, 40, 768, split=3, groups=2, tiles_each=4, per_pass=2, eps=1e-5),
            cls(q3_k, 33, 1280, split=2, groups=1, tiles_each=3, residual=True, activations="i16"),
            cls(q4_k, 35, 512, gated=True, eps=1e-6, tiles_each=3, per_pass=1, activations="i16"),
            cls(q8, 21, 1088, gated=True, split=3, groups=1, activations="i16"),
            cls(q8, 40, 288, residual=True, activations="i16", sms=4, fill=True),
            cls(q4_k, 19, 768, bias=True, others=((q4_k, 5), (q6_k, 7)), activations="i16"),
            cls(f16, 35, 1120, eps=1e-5, others=((q8, 3), (f16, 9)), split=2),
            cls(f32, 18, 293, gated=True, eps=1e-5),
        )
