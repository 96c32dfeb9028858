"""What products of a few rows with experts share: tiles pass through rings as in `Gemv`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.experts.spec import ExpertsProduct, check_experts
from urdir.ptxgen.kernels.linear.cut import WARPS, Cut, CutOptions, Footprint, cut_launch
from urdir.ptxgen.kernels.linear.epilogue.bias import Bias
from urdir.ptxgen.kernels.linear.products.gemv_room import LEAST_WARPS, RECORD_NBYTES, Activations
from urdir.ptxgen.kernels.linear.steps import check_steps
from urdir.ptxgen.spec import LaunchShape, Tolerance, ceil_div
from urdir.ptxgen.weights.grids import SharedGrids, entries_nbytes
from urdir.ptxgen.weights.layout import TILE_COLS, TILE_ROWS, TILE_UNITS, Layout
from urdir.ptxgen.weights.tiles import Tile

#: Registers of a thread that may be needed for activations, at most.
MAX_REGISTERS = 232
#: The most warps of a CTA where they have as many blocks each. On an H200 a step of gpt-oss-20b,
#: with 12 and 48 blocks, takes 1,064 us in place of 1,115 with six and eight warps, one of
#: qwen3-30b-a3b, with 24 blocks of down, 1,086 in place of 1,098 (2026-11-29). Those of 22, where
#: a shared expert stands beside ten, would else have two warps. One of kimi-linear-48b-a3b, with 9
#: blocks of gate and up, takes 1,133 us in place of 1,161 with six warps (2026-11-30).
EVEN_WARPS = (12, 11, 9)


@dataclass(frozen=True)
class ExpertsSpec(ExpertsProduct):
    """A kernel whose rows read, or choose, their experts on the device; ``activations`` are those
    of `Gemv`.

    The CTAs of a launch are cut, as ``options`` say, for their SMs all together. Raises PtxgenError
    for a cut that is impossible.
    """

    batch: int = 1
    activations: Activations = "f32"
    options: CutOptions = field(default_factory=CutOptions)

    # Read by the macros of linear kernels.
    alone = True
    loads_late = starts_next = ordered = False

    @classmethod
    def of(cls, *fields: Any, **named: Any) -> Self:
        """See `Product.of`; options of the cut are keywords, too."""
        return super().of(*fields, **CutOptions().within(named))

    @property
    def tiles_left(self) -> int:
        """Tiles of a warp to be loaded with which the next launch may start, after the wait."""
        return 1

    def __post_init__(self) -> None:
        check_experts(self)
        if self.activations == "i16" and self.format.arithmetic != "integers":
            raise PtxgenError(f"{self.name}: 16-bit activations are for quantised weights only")
        if self.options.cluster != 1 or self.options.fill:
            raise PtxgenError(f"{self.name}: cluster and fill are not for experts")
        _ = self.layout  # refuses odd shapes
        check_steps(self)
        self.cut.check(self.name, self.options)
        _check_ranks(self)

    @property
    def grid_rows(self) -> int:
        """Products that have CTAs of their own."""
        raise NotImplementedError

    @property
    def blocks(self) -> int:
        """Blocks of columns of such a product."""
        raise NotImplementedError

    @cached_property
    def grids(self) -> SharedGrids:
        """The codebook, if its entries are in shared memory."""
        formats = self.formats if self.activations == "i16" else ()
        return SharedGrids.of(formats, self.cut.memory.nbytes)

    @property
    def record_nbytes(self) -> int:
        """Bytes of a unit's activations."""
        return RECORD_NBYTES[self.activations]

    @cached_property
    def cut(self) -> Cut:
        """How the CTAs of one product are cut."""
        return _cut(self)

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(
            grid=(self.cut.rows.clusters, self.grid_rows, 1),
            block=(32 * self.cut.warps, 1, 1),
            shared_bytes=max(self.grids.end, self.options.least_shared),
            resident=self.options.resident,
            prefers_shared=True,
        )

    @property
    def tolerance(self) -> Tolerance:
        """As `Gemv`'s; a product of two sums, or a sum of several experts, is off by more."""
        if self.activations == "i16":
            return Tolerance(rtol=3e-4, atol=1e-3)
        return Tolerance(rtol=1e-5, atol=5e-6)

    def bytes_moved(self) -> int:
        """Those of the chosen experts, each read for each row, and of the activations."""
        matrices = len(self.matrices)
        chosen = self.pairs * self.layout.tiles_nbytes // self.experts
        rest = sum(self.nbytes(p) for p in self.params if p.dtype != "u8")
        return matrices * chosen + rest


def _check_ranks(of: ExpertsSpec) -> None:
    """Raise PtxgenError if those of the experts have no room where tiles will be."""
    ring = of.cut.warps * of.cut.ring.slots * of.cut.ring.tile_nbytes
    if of.row_experts.chosen_together and ring < 8 * (of.experts + 8):
        raise PtxgenError(f"{of.name}: {ring} bytes of tiles for ranks of {of.experts} experts")


def _footprint(of: ExpertsSpec) -> Footprint:
    """What a CTA keeps in shared memory."""
    most_warps = next((warps for warps in EVEN_WARPS if of.blocks % warps == 0), WARPS)
    # Before records there is x as it is, where it is brought into an order.
    record_nbytes = max(of.record_nbytes, 4 * 32 * of.ordered)
    # Before activations there are each warp's sums of logits in parts.
    sums = 0 if of.logit_parts is None else 4 * of.experts * most_warps
    # Where biases or CTAs that choose need it, what slots have, at most, and what groups have.
    together = of.row_experts.chosen_together
    keeps = together or (of.selection is not None and of.steps.has(Bias))
    choice = 8 * of.used + 32 + 256 * together if keeps else 0
    return Footprint(
        tile=of.layout.tile_nbytes,
        sums=4 * TILE_ROWS,
        warp_squares=8 if of.steps.norm and not of.steps.norm.is_factor else 4,
        activations=max(record_nbytes * TILE_UNITS * of.blocks, sums),
        tables=choice + (entries_nbytes(of.formats) if of.activations == "i16" else 0),
        warps=most_warps,
    )


def _cut(of: ExpertsSpec) -> Cut:
    """The cut of one product, whose tiles are those of the matrices of all experts."""
    product = Layout(of.format, of.rows, of.blocks * TILE_COLS)
    ctas = max(1, of.options.sms // of.grid_rows)
    tiles, pair = (of.options.tiles_each or ceil_div(of.bands, ctas),), of.steps.pair
    cut = cut_launch(of.options, (product,), _footprint(of), tiles, pair, even=True)
    parts = tuple(dataclasses.replace(p, tile=Tile(of.layout)) for p in cut.rows.parts)
    return dataclasses.replace(
        cut,
        columns=dataclasses.replace(cut.columns, is_ragged=of.cols % TILE_COLS > 0),
        rows=dataclasses.replace(cut.rows, parts=parts),
    )


def fits(product: ExpertsSpec) -> bool:
    """Whether enough warps have room, and registers for the activations: as `has_room` says of
    `Gemv`."""
    warps = _footprint(product).most_warps(product.options.shared)
    most = min(MAX_REGISTERS, 2048 // (warps * max(1, product.options.resident)))
    return warps >= LEAST_WARPS and 8 * ceil_div(product.blocks, warps) + 24 <= most
