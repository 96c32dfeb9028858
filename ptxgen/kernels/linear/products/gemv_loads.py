"""When a `Gemv` loads tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from urdir.ptxgen.kernels.linear.cut import Cut, TilePart
from urdir.ptxgen.kernels.linear.products.gemv_room import Activations, has_room_ahead
from urdir.ptxgen.kernels.linear.steps import Prologue
from urdir.ptxgen.spec import ceil_div
from urdir.ptxgen.weights.grids import SharedGrids

#: Types of which a warp holds the tile that it multiplies next in registers (`GemvLoads.refill`).
HELD = frozenset({"Q8_0", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"})


@dataclass(frozen=True, slots=True)
class GemvLoads:
    """When a CTA loads the tiles of a `Gemv`, whose fields these are. ``pair``: matrices that are
    multiplied together; ``continues``: what consumes the product follows in the same launch."""

    activations: Activations
    alone: bool
    cols: int
    prologue: tuple[Prologue, ...]
    cut: Cut
    pair: int
    grids: SharedGrids
    continues: bool

    @property
    def asks_further(self) -> bool:
        """Whether the tiles that follow those of the ring come to the L2 cache while the CTA
        prepares x: of E4M3, whose rings have 66 KB, where those of Q4_K have 74 to 110. On an H200
        an 8B model of FP8 with a scale a row decodes at 477.0 tokens/s so, 85.2 % of the bandwidth,
        else at 468.1, 84.0 %.
        """
        return self.activations == "f16" and not self.alone

    @property
    def late_slots(self) -> int:
        """Slots that are filled only when activations have been asked for. On an H200 an 8B NVFP4
        model decodes at 801.4 tokens/s with one, else at 798.7."""
        formats = (part.layout.format for part in self.cut.rows.parts)
        e4m3 = self.activations == "i16" and all(fmt.has_e4m3_factors for fmt in formats)
        return 1 if e4m3 and not self.alone else 0

    def refill(self, part: TilePart) -> Literal["multiplied", "fetched", "held"]:
        """When the slot of a tile of ``part`` is filled again: once the tile was multiplied; once
        it is in registers; or the tile multiplied next is held in registers, the first one from
        before the wait for earlier launches, and its slot is filled again meanwhile.

        Tokens/s of 8B models, an H200: NVFP4 792.9, 798.7 and 791.4; Q4_K_M 776.3, 777.6 and 770.9;
        Q8_0 488.3, 492.0 and 500.0, IQ1_S with `Grid.fields` 995.8, 986.2 and 1,003.9; IQ3_XXS
        828.5 with the second and 866.2 with the third, IQ2_XS 919.3 and 953.8. Tiles are held only
        where registers have room and all warps have tiles for all slots: they read one more than
        they have.
        """
        if self.activations != "i16":
            return "multiplied"
        if part.layout.format.has_e4m3_factors:
            return "fetched"
        name = part.layout.format.name
        held = name in HELD or self.grids.has_fields
        return "held" if held and self._can_hold(part) else "multiplied"

    def is_beside(self, part: TilePart) -> bool:
        """Whether sums of a tile of ``part`` meet, and its slot is filled again, beside the next
        tile's products, without branches: where instructions bind more than memory. On an H200 8B
        models of Q8_0 decode at 504.5 tokens/s so, else at 506.7, of Q4_K_M at 781.0 and 784.0, of
        NVFP4 at 817.0 and 812.5.
        """
        return self.refill(part) != "multiplied" and part.layout.format.name != "Q8_0"

    def _can_hold(self, part: TilePart) -> bool:
        if self.alone or self.continues:
            return False
        columns, rows = self.cut.columns, self.cut.rows
        blocks = columns.blocks // (columns.cluster * columns.warps)
        if blocks * part.warp_tiles * self.pair * rows.passes < self.cut.ring.slots:
            return False
        tile = ceil_div(part.layout.tile_nbytes, 4 * 32)
        return has_room_ahead(self.cols, self.cut, self.prologue, tile)
