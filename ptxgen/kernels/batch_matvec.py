"""Matrix-vector products of a small batch with quantised weights, on integer tensor cores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.formats import FORMATS, UNIT, Format
from urdir.ptxgen.kernels._batch_matrix import BLOCK_ROWS, Matrix, Quads
from urdir.ptxgen.kernels.matvec import Matvec
from urdir.ptxgen.layout import Layout
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, Tolerance, ceil_div

#: Activation vectors that one launch takes at most: the columns of an ``mma`` tile.
MAX_BATCH = 8
#: Units of a row in a step of a share: a share is a whole number of steps.
STEP_UNITS = 8
#: Steps of a share at most: their activations (37 KB of eight vectors) lie in shared memory.
MAX_STEPS = 8
#: Bytes of shared memory that a CTA takes by default, which every target from sm_80 on has.
MAX_SHARED = 99 * 1024
#: SMs of a big GPU; warps of a CTA, CTAs of an SM, stages of weights of a warp by default.
SMS, WARPS, RESIDENT, STAGES = 132, 8, 2, 2
#: Microseconds: of a MB from memory and from the L2 on an H200, of a tile's end.
MEMORY_US, L2_US, TILE_US = 0.24, 0.18, 0.5


@dataclass(frozen=True)
class BatchMatvec(KernelSpec):
    """Matrix-vector products y[b] = W x[b] (+ bias) of 1 to 8 vectors on integer tensor cores.

    The same products and fused forms as ``Matvec`` (see there for ``eps``, ``residual``, ``gated``,
    ``others``) with activations "i16": 16-bit multiples of the largest in each 32, products exact,
    sums f32. y[b] has the same bits in every batch. For quantised weights of 16 rows or more, on
    sm_80 and newer.

    ``slices``: the columns are cut into so many shares, each CTA works on one; the sums of a tile
    go through ``partials`` to the warp that is the last to arrive, which adds them in order.
    ``arrived`` counts, and is all zeros before and after. Cuts that are 0 are chosen by shape:
    ``warps`` of a CTA, ``resident`` CTAs of an SM (and registers for ``room`` more, of the next
    launch), ``stages`` of weights (``blocks`` x 16 rows x 8 / ``blocks`` units each) that a warp
    has on their way.
    """

    format: Format
    rows: int
    cols: int
    bias: bool = False
    batch: int = MAX_BATCH
    eps: float | None = None
    residual: bool = False
    gated: bool = False
    others: tuple[tuple[Format, int], ...] = ()
    slices: int = 0
    warps: int = 0
    stages: int = 0
    resident: int = 0
    room: int = 0
    blocks: int = 0

    name = "batch_matvec"
    template = ("urdir.templates", "batch_matvec.ptx.j2")

    def __post_init__(self) -> None:
        if not 1 <= self.batch <= MAX_BATCH:
            raise PtxgenError(f"batch_matvec: batch is {self.batch}: 1 to {MAX_BATCH}")
        if any(fmt.is_float for fmt in self.formats):
            raise PtxgenError("batch_matvec: the weights must be quantised")
        _ = self.product  # which refuses what cannot be fused
        if self.tile_blocks not in (1, 2) or (self.gated and self.blocks == 1):
            raise PtxgenError(f"batch_matvec: blocks is {self.blocks}: 1, or 2, which gated needs")
        if min(self.all_rows) < self.tile_rows:
            raise PtxgenError(
                f"batch_matvec: {min(self.all_rows)} rows, a matrix must have {self.tile_rows}"
            )
        if not 1 <= self.cta_warps <= 32 or not 0 <= self.stages <= 8:
            raise PtxgenError(
                f"batch_matvec: warps is {self.warps} (up to 32), stages {self.stages} (up to 8)"
            )
        if self.share_steps > MAX_STEPS:
            raise PtxgenError(
                f"batch_matvec: slices is {self.slices}, {self.cols} columns need at least "
                f"{ceil_div(self.row_steps, MAX_STEPS)}"
            )

    # ---- what is computed ----

    @cached_property
    def product(self) -> Matvec:
        """The same product as another kernel makes it."""
        return Matvec(
            self.format,
            self.rows,
            self.cols,
            bias=self.bias,
            batch=self.batch,
            activations="i16",
            eps=self.eps,
            residual=self.residual,
            gated=self.gated,
            others=self.others,
        )

    @property
    def formats(self) -> tuple[Format, ...]:
        """The types of the matrices."""
        return (self.format, *(fmt for fmt, _ in self.others))

    @property
    def all_rows(self) -> tuple[int, ...]:
        """The rows of the matrices."""
        return (self.rows, *(rows for _, rows in self.others))

    @property
    def normed(self) -> bool:
        """Whether x is normalised first."""
        return self.eps is not None

    @property
    def params(self) -> tuple[Param, ...]:
        """Those of ``Matvec``, then what the slices' sums go through, if there are several."""
        params = self.product.params
        if self.share_count > 1:
            shape = ("share_count", "total_tiles", "record")
            params += (
                Param("partials", "f32", shape, Access.OUT),
                Param("arrived", "u32", ("total_tiles",), Access.INOUT),
            )
        return params

    # ---- how it is cut ----

    @property
    def minimum_sm(self) -> int:
        """Of ``cp.async`` and ``mma.m16n8k32``."""
        return 80

    @property
    def tile_blocks(self) -> int:
        """Blocks of 16 rows of a tile; of two matrices if gated."""
        return self.blocks or (2 if self.gated else 1)

    @property
    def tile_rows(self) -> int:
        """Rows of each matrix in a tile."""
        return BLOCK_ROWS * (1 if self.gated else self.tile_blocks)

    @property
    def stage_units(self) -> int:
        """Units of each row in a stage."""
        return STEP_UNITS // self.tile_blocks

    @property
    def cta_warps(self) -> int:
        """Warps of a CTA."""
        return self.warps or WARPS

    @property
    def residents(self) -> int:
        """CTAs of an SM at once."""
        return self.resident or RESIDENT

    @property
    def depth(self) -> int:
        """Stages that a warp has on their way: fewer by default where shared memory ends."""
        room = (MAX_SHARED - self.weights_at) // self.cta_warps - self._decoded_nbytes
        return self.stages or max(1, min(STAGES, room // self.stage_nbytes))

    @property
    def row_units(self) -> int:
        """Units of a row."""
        return ceil_div(self.cols, UNIT)

    @property
    def row_steps(self) -> int:
        """Steps of a row."""
        return ceil_div(self.row_units, STEP_UNITS)

    @cached_property
    def share_steps(self) -> int:
        """Steps of a CTA's share of the columns; the last share may have fewer."""
        if self.slices:
            return ceil_div(self.row_steps, self.slices)
        return min(range(1, min(MAX_STEPS, self.row_steps) + 1), key=self._microseconds)

    @property
    def share_units(self) -> int:
        """Units of a share."""
        return STEP_UNITS * self.share_steps

    @property
    def share_count(self) -> int:
        """Shares of the columns."""
        return ceil_div(self.row_steps, self.share_steps)

    def _microseconds(self, steps: int) -> float:
        """A rough prediction for eight vectors and shares of so many steps.

        What the slowest CTA reads from memory (half a byte a weight), what all read and write
        through the L2 (activations, partial results), and the ends of a warp's tiles.
        """
        slices = ceil_div(self.row_steps, steps)
        each = self._tiles_each(slices)
        ctas = SMS * self.residents
        memory = each * steps * ctas * self.tile_blocks * BLOCK_ROWS * STEP_UNITS * UNIT / 2
        l2 = 4 * MAX_BATCH * ctas * steps * STEP_UNITS * UNIT
        if slices > 1:
            l2 += 8 * slices * sum(map(self._tiles, self.all_rows)) * self.record
        ends = ceil_div(each, self.cta_warps) * TILE_US
        return (memory * MEMORY_US + l2 * L2_US) * 1e-6 + ends

    def _tiles(self, rows: int) -> int:
        return ceil_div(rows, self.tile_rows)

    def _tiles_each(self, slices: int) -> int:
        """Tiles of a CTA: the fewest with which all CTAs run at once, if that is possible."""
        tiles = [self._tiles(rows) for rows in self.all_rows]
        groups = max(SMS * self.residents // slices, len(tiles))
        each = ceil_div(sum(tiles), groups)
        while sum(ceil_div(n, each) for n in tiles) > groups:
            each += 1
        return each

    @cached_property
    def matrices(self) -> tuple[Matrix, ...]:
        """The matrices with a product of their own, side by side in the grid."""
        each = self._tiles_each(self.share_count)
        found: list[Matrix] = []
        tile = group = 0
        for number, (fmt, rows) in enumerate(zip(self.formats, self.all_rows, strict=True)):
            layout, tiles = Layout(fmt, rows, self.cols), self._tiles(rows)
            found.append(Matrix(number, layout, tiles, each, tile, group, self.stage_units))
            tile, group = tile + tiles, group + found[-1].groups
        return tuple(found)

    @property
    def has_single_pieces(self) -> bool:
        """Whether some copy has but one piece a row, which leaves half of the lanes idle."""
        return any(copy.pieces == 1 for m in self.matrices for copy in m.copies)

    @property
    def _quads(self) -> list[Quads]:
        return [copy.quads for m in self.matrices for copy in m.copies]

    @property
    def words(self) -> int:
        """Words of a row's unit that a lane holds before it has its quads: none of whole bytes."""
        parts = [q for q in self._quads if q.part.source.width < 8]
        return max((2 if q.stride >= 32 else 1 for q in parts), default=0)

    @property
    def words_combine(self) -> bool:
        """Whether quants are in two parts."""
        return any(q.part.shift for q in self._quads)

    @property
    def has_turns(self) -> bool:
        """Whether some stage is multiplied in a loop."""
        return any(m.unrolled < m.units for m in self.matrices)

    @property
    def most_groups(self) -> int:
        """Groups of a unit."""
        return max(fmt.unit_groups for fmt in self.formats)

    @property
    def total_tiles(self) -> int:
        """Tiles of all matrices."""
        return sum(m.tiles for m in self.matrices)

    @property
    def record(self) -> int:
        """Numbers of a tile's partial result: four a lane for each block, sums of squares."""
        return self.tile_blocks * 128 + (MAX_BATCH if self.normed else 0)

    # ---- shared memory ----

    @property
    def x_pitch(self) -> int:
        """Bytes between the quants of two vectors: 64 a unit, in different halves of the banks."""
        return 64 * (self.share_units | 1)

    @property
    def x_scales_at(self) -> int:
        """Where the activations' scales begin, behind the quants."""
        return self.batch * self.x_pitch

    @property
    def squares_at(self) -> int:
        """Where the warps' sums of squares begin, behind the scales."""
        return self.x_scales_at + self.share_units * 8 * MAX_BATCH * self.most_groups

    @property
    def weights_at(self) -> int:
        """Where the warps' stages begin."""
        return self.squares_at + (4 * MAX_BATCH * self.cta_warps if self.normed else 0)

    @property
    def stage_nbytes(self) -> int:
        """Bytes of a stage."""
        return self.tile_blocks * max(m.block_nbytes for m in self.matrices)

    @property
    def _decoded_nbytes(self) -> int:
        return self.tile_blocks * BLOCK_ROWS * max(m.scale_pitch for m in self.matrices)

    @property
    def warp_nbytes(self) -> int:
        """Bytes of a warp's stages and, behind them, scales of one."""
        return self.depth * self.stage_nbytes + self._decoded_nbytes

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a CTA."""
        return self.weights_at + self.cta_warps * self.warp_nbytes

    @property
    def launch_shape(self) -> LaunchShape:
        groups = sum(m.groups for m in self.matrices)
        return LaunchShape(
            grid=(groups * self.share_count, 1, 1),
            block=(32 * self.cta_warps, 1, 1),
            shared_bytes=self.shared_bytes,
            resident=self.residents + self.room,
        )

    # ---- tests ----

    @property
    def tolerance(self) -> Tolerance:
        """As of ``Matvec``: standard normal activations are off by 2e-5 of their size."""
        return self.product.tolerance

    def reference(self, **inputs: Any) -> dict[str, Array]:
        given = {p.name: inputs[p.name] for p in self.product.params if p.name in inputs}
        outputs = self.product.reference(**given)
        if self.share_count > 1:
            outputs["partials"] = self._partials(given)
            outputs["arrived"] = np.zeros_like(inputs["arrived"])
        return outputs

    def _partials(self, inputs: dict[str, Any]) -> Array:
        """Each share's sums, as the lanes of a warp hold those of a tile, (shares, tiles, record).

        Lane 4g + t: rows g and g + 8 of a block, vectors 2t and 2t + 1, or those modulo the batch.
        """
        x = np.zeros((MAX_BATCH, self.share_count * self.share_units * UNIT))
        x[:, : self.cols] = inputs["x"][np.arange(MAX_BATCH) % self.batch]
        squares = (x.reshape(MAX_BATCH, self.share_count, -1) ** 2).sum(axis=2)
        if self.normed:
            x[:, : self.cols] *= inputs["norm"]
        partials = np.zeros((self.share_count, self.total_tiles, self.record), np.float32)
        for m in self.matrices:
            names = [f"weights{m.suffix}", *(["up"] if self.gated else [])]
            weights = [m.layout.unpack(inputs[name]).astype(np.float64) for name in names]
            for share, tile in np.ndindex(self.share_count, m.tiles):
                first = share * self.share_units * UNIT
                cols = slice(first, min(first + self.share_units * UNIT, self.cols))
                row = min(tile * self.tile_rows, m.rows - self.tile_rows)
                sums = np.stack(
                    [w[row : row + self.tile_rows, cols] @ x[:, cols].T for w in weights]
                )
                lanes = sums.reshape(self.tile_blocks, 2, 8, 4, 2).transpose(0, 2, 3, 1, 4)
                to = partials[share, m.first_tile + tile]
                to[: lanes.size] = lanes.reshape(-1)
                if self.normed:
                    to[lanes.size :] = squares[:, share]
        return partials

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        inputs = self.product.make_inputs(rng)
        if self.share_count > 1:
            inputs["arrived"] = np.zeros(self.total_tiles, np.uint32)
        return inputs

    @classmethod
    def examples(cls) -> Sequence[BatchMatvec]:
        quantised = [f for f in FORMATS.values() if not f.is_float]
        each = [
            cls(f, 16 + 9 * i, f.block * 9 % 1536, bias=i % 2 == 0, batch=1 + i % 8)
            for i, f in enumerate(quantised)
        ]
        tall = [
            cls(f, 33, 1024, batch=8 - i % 8, blocks=2, slices=1 + i % 3, residual=i % 2 == 0)
            for i, f in enumerate(quantised)
        ]
        q8, q4_k, q6_k = (FORMATS[n] for n in ("Q8_0", "Q4_K", "Q6_K"))
        q5_0 = FORMATS["Q5_0"]
        return (
            cls(q8, 16, UNIT, batch=2),
            *each,
            *tall,
            cls(q4_k, 40, 2304, eps=1e-5, warps=2, slices=2, bias=True),
            cls(q4_k, 40, 768, gated=True, eps=1e-5, batch=4, slices=1),
            cls(q6_k, 23, 1536, gated=True, batch=3, warps=3, stages=1),
            cls(q5_0, 17, 1376, gated=True, eps=1e-6, batch=7, stages=3),
            cls(q4_k, 64, 1024, eps=1e-5, others=((q6_k, 17), (q8, 21)), batch=5, warps=4),
            cls(q4_k, 16, 4864, residual=True, batch=8, stages=4),
        )

    def flops(self) -> int:
        return self.product.flops()
