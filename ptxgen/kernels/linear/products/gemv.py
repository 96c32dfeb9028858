"""Matrix-vector products (GEMV) of one vector, tile by tile, for decode steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.cut import Cut, TilePart, cut_launch, even_tiles
from urdir.ptxgen.kernels.linear.epilogue.activation import (
    Activated,
    Bounded,
    Gated,
    SigmoidScaled,
)
from urdir.ptxgen.kernels.linear.epilogue.adapted import Adapted
from urdir.ptxgen.kernels.linear.epilogue.bias import Bias
from urdir.ptxgen.kernels.linear.epilogue.router import RouterParts
from urdir.ptxgen.kernels.linear.epilogue.self_adapted import SelfAdapted
from urdir.ptxgen.kernels.linear.epilogue.send import Send
from urdir.ptxgen.kernels.linear.epilogue.then import Continued
from urdir.ptxgen.kernels.linear.product import EPILOGUES
from urdir.ptxgen.kernels.linear.products.gemv_examples import gemv_examples
from urdir.ptxgen.kernels.linear.products.gemv_room import (
    RECORD_NBYTES,
    Activations,
    footprint,
    grid_entries,
    has_room_ahead,
    most_registers,
)
from urdir.ptxgen.kernels.linear.products.tiled import TiledSpec
from urdir.ptxgen.kernels.linear.prologue.gate import Gate
from urdir.ptxgen.kernels.linear.prologue.norm import Normed
from urdir.ptxgen.kernels.linear.prologue.own import OwnVectors
from urdir.ptxgen.kernels.linear.prologue.sum import (
    OTHER_REGISTERS,
    DeferredAdd,
    NormedAdd,
    RankAdd,
)
from urdir.ptxgen.spec import Tolerance, ceil_div
from urdir.ptxgen.weights.formats import Format
from urdir.ptxgen.weights.layout import TILE_COLS

#: Types of which a warp holds the tile that it multiplies next in registers (`Gemv.refill`).
HELD = frozenset({"Q8_0", "IQ2_XS"})


@dataclass(frozen=True)
class Gemv(TiledSpec):
    """One activation vector times weights of any type.

    ``activations``: "f32", or "i16" for quantised weights: rounded to multiples of the largest in
    each 32 columns / 32639, relative error 2e-5, and multiplied with the quants exactly on tensor
    cores; or "f16" for E4M3 quants: sums of two such numbers, of 22 bits (from 0.001 to 1,048,064),
    on tensor cores. Sums are f32. ``alone``: the launch overlaps no earlier one, and loads
    activations before weights.

    Raises PtxgenError for "i16" and "f16" with other types, and for norms and sums of all columns
    in a cluster.
    """

    activations: Activations = "f32"
    alone: bool = False

    prologues = (NormedAdd, RankAdd, Gate, OwnVectors, Normed)
    epilogues = (
        *(SigmoidScaled, Bias, Adapted, SelfAdapted),
        *EPILOGUES[2:],
        *(Continued, Send, RouterParts),
    )
    name = "gemv"
    template = ("urdir.templates", "linear/products/gemv.ptx.j2")

    def __post_init__(self) -> None:
        super().__post_init__()
        of = {"i16": "integers", "f16": "e4m3"}.get(self.activations)
        if of is not None and any(fmt.arithmetic != of for fmt in self.formats):
            raise PtxgenError(f"gemv: {self.activations} activations are for weights of {of} only")
        if self.norm_first and self.cluster > 1:
            raise PtxgenError(f"gemv: {self.norm} is for one CTA's columns: cluster is 1")
        if len([step for step in self.prologue if not isinstance(step, Normed)]) > 1:
            raise PtxgenError("gemv: a gate, or one deferred add")

    @property
    def add(self) -> DeferredAdd | None:
        """The residual add that the launch does first."""
        return self.find(DeferredAdd)

    @property
    def shared_grids(self) -> tuple[Format, ...]:
        return super().shared_grids if self.activations == "i16" else ()

    @property
    def grid_entries(self) -> int:
        return grid_entries(
            self.formats, self.cols, self.cluster, self.activations, self.options.shared
        )

    @property
    def asks_further(self) -> bool:
        """Whether the tiles that follow those of the ring come to the L2 cache while the CTA
        prepares x: of E4M3, whose rings have 66 KB, where those of Q4_K have 74 to 110. On an H200
        an 8B model of FP8 with a scale a row decodes at 477.0 tokens/s so, 85.2 % of the bandwidth,
        else at 468.1, 84.0 %.
        """
        return self.activations == "f16" and not self.alone

    def makes_ahead(self, part: TilePart) -> bool:
        """Whether warps make weights of a tile of ``part`` beside the products of the one before:
        of types with signs and 32 copies of their codebook's entries. With fewer look-ups wait for
        each other, and are faster between products. On an H200 an 8B model of IQ3_XXS decodes at
        825 tokens/s so, else at 783; of IQ2_XXS at 982 and 945; with 16 copies of IQ2_XS at 878 and
        873, of IQ3_S at 674 and 751.
        """
        grid = part.layout.format.grid
        if grid is None or grid.signs == "none" or not self.shared_grids:
            return False
        return grid.copies(self.grid_entries) == 32

    def makes_first(self, part: TilePart) -> bool:
        """Whether they make those of their first tile before they wait for earlier launches:
        registers have room beside the activations."""
        if self.alone or self.passes > 1 or not self.makes_ahead(part):
            return False
        return has_room_ahead(self.cols, self.cluster, self.prologue, self.cut.warps)

    def refill(self, part: TilePart) -> Literal["multiplied", "fetched", "held"]:
        """When the slot of a tile of ``part`` is filled again: once the tile was multiplied; once
        it is in registers; or the tile multiplied next is held in registers, the first one from
        before the wait for earlier launches, and its slot is filled again meanwhile.

        Tokens/s of 8B models, an H200: NVFP4 792.9, 798.7 and 791.4; Q4_K_M 776.3, 777.6 and 770.9;
        Q8_0 488.3, 492.0 and 500.0, IQ2_XS 872.8, 863.5 and 880.3, IQ1_S with `Grid.fields` 995.8,
        986.2 and 1,003.9. Tiles are held only where registers have room and all warps have tiles
        for all slots: they read one more than they have.
        """
        if self.activations != "i16":
            return "multiplied"
        if part.layout.format.has_e4m3_factors:
            return "fetched"
        fmt, entries = part.layout.format, self.grid_entries
        held = fmt.name in HELD or (fmt.grid is not None and fmt.grid.has_fields(entries))
        return "held" if held and self._can_hold(part) else "multiplied"

    def _can_hold(self, part: TilePart) -> bool:
        if self.alone or self.has(Continued):
            return False
        columns, rows = self.cut.columns, self.cut.rows
        blocks = columns.blocks // (columns.cluster * columns.warps)
        if blocks * part.warp_tiles * self.pair * rows.passes < self.cut.ring.slots:
            return False
        tile = ceil_div(part.layout.tile_nbytes, 4 * 32)
        given = (self.cols, self.cluster, self.prologue, self.cut.warps, tile)
        return not self.makes_ahead(part) and has_room_ahead(*given)

    @property
    def late_slots(self) -> int:
        """Slots that are filled only when activations have been asked for. On an H200 an 8B NVFP4
        model decodes at 801.4 tokens/s with one, else at 798.7."""
        e4m3 = self.activations == "i16" and all(fmt.has_e4m3_factors for fmt in self.formats)
        return 1 if e4m3 and not self.alone else 0

    @property
    def record_nbytes(self) -> int:
        """Bytes of a unit's activations."""
        return RECORD_NBYTES[self.activations]

    @property
    def add_place(self) -> int:
        """Sums of each warp before those of ``add``: of squares, and of a layer norm's values."""
        return 2 if self.norm_first else 1

    @property
    def has_warp_sums(self) -> bool:
        """Whether warps add squares in shared memory."""
        return self.normed or self.has(NormedAdd)

    @property
    def loads_late(self) -> bool:
        """Whether the norm's weights are loaded only when those of ``add`` have been used: a thread
        has no registers for both."""
        if self.add is None:
            return False
        vectors = 2 + sum(step.vectors for step in self.prologue)
        registers = 8 * vectors * self.lane_blocks + OTHER_REGISTERS
        return registers > most_registers(2 * ceil_div(self.cut.warps, 2))

    @property
    def lane_blocks(self) -> int:
        """Blocks whose activations a warp prepares, eight of each block in a lane."""
        return ceil_div(self.cut.columns.cta_blocks, self.cut.warps)

    @property
    def has_partial_blocks(self) -> bool:
        """Whether the warps' last blocks, or units of the last block, are beyond the row."""
        blocks = self.cut.columns.cta_blocks
        return bool(blocks % self.cut.warps or self.cols % (TILE_COLS * self.cluster))

    @cached_property
    def cut(self) -> Cut:
        given = (self.formats, self.cols, self.cluster, self.activations)
        room = footprint(*given, self.options.shared)
        sums = 1 + sum(step.warp_sums for step in self.prologue)
        shared = sum(step.shared_nbytes for step in self.epilogue)
        room = replace(room, warp_squares=4 * sums, shared=shared)
        tiles = even_tiles(self.options, self.layouts)
        return cut_launch(self.options, self.layouts, room, tiles, self.pair, even=True)

    @property
    def tolerance(self) -> Tolerance:
        """f32: rounding of the sums, see `GemvF32`. i16: standard normal activations are off by
        2e-5 of their size, a product by as much of its own, several times that where few rows
        cancel. f16: tensor cores drop bits of sums."""
        then, gate = self.has(Continued), self.find(Gated)
        if self.activations == "i16":
            curved = then or self.has(Activated) or (gate is not None and gate != Gated())
            return Tolerance(rtol=3e-4 if curved else 1.5e-4, atol=5e-4)
        if self.activations == "f16":
            return Tolerance(rtol=2e-5, atol=2e-6)
        smaller = self.f is not None or then or self.has(Bounded)
        return Tolerance(rtol=5e-6 if smaller else 2e-6, atol=2e-6)

    @classmethod
    def examples(cls) -> Mapping[str, Gemv]:
        return gemv_examples(cls)
