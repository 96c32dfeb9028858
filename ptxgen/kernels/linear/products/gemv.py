"""Matrix-vector products (GEMV) of one vector, tile by tile, for decode steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.cut import Cut, cut_launch, even_tiles
from urdir.ptxgen.kernels.linear.epilogue.activation import Activated, Bounded, Gated, SigmoidScaled
from urdir.ptxgen.kernels.linear.epilogue.adapted import Adapted
from urdir.ptxgen.kernels.linear.epilogue.bias import Bias
from urdir.ptxgen.kernels.linear.epilogue.router import RouterParts
from urdir.ptxgen.kernels.linear.epilogue.self_adapted import SelfAdapted
from urdir.ptxgen.kernels.linear.epilogue.send import Send
from urdir.ptxgen.kernels.linear.epilogue.then import Continued
from urdir.ptxgen.kernels.linear.products.gemv_examples import gemv_examples
from urdir.ptxgen.kernels.linear.products.gemv_loads import GemvLoads
from urdir.ptxgen.kernels.linear.products.gemv_room import (
    GRID_SLOTS,
    RECORD_NBYTES,
    Activations,
    codebooks,
    footprint,
    has_room_for_norm,
)
from urdir.ptxgen.kernels.linear.products.tiled import TiledSpec
from urdir.ptxgen.kernels.linear.prologue.gate import Gate
from urdir.ptxgen.kernels.linear.prologue.norm import Normed
from urdir.ptxgen.kernels.linear.prologue.own import OwnVectors
from urdir.ptxgen.kernels.linear.prologue.sum import DeferredAdd, NormedAdd, RankAdd
from urdir.ptxgen.kernels.linear.spec import EPILOGUES
from urdir.ptxgen.spec import Tolerance
from urdir.ptxgen.weights.grids import SharedGrids


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

    def __post_init__(self) -> None:
        super().__post_init__()
        of = {"i16": "integers", "f16": "e4m3"}.get(self.activations)
        if of is not None and any(fmt.arithmetic != of for fmt in self.formats):
            raise PtxgenError(f"gemv: {self.activations} activations are for weights of {of} only")
        if self.steps.norm and not self.steps.norm.is_factor and self.cluster > 1:
            raise PtxgenError(f"gemv: {self.steps.norm} is for one CTA's columns: cluster is 1")
        if len([step for step in self.prologue if not isinstance(step, Normed)]) > 1:
            raise PtxgenError("gemv: a gate, or one deferred add")

    @cached_property
    def grids(self) -> SharedGrids:
        given = (self.formats, self.cols, self.cluster, self.activations)
        return codebooks(*given, self.options.shared, self.cut.memory.nbytes)

    @cached_property
    def loads(self) -> GemvLoads:
        """When tiles are loaded, and made weights of."""
        steps = self.steps
        given = (self.cols, self.prologue, self.cut, steps.pair, self.grids, steps.has(Continued))
        return GemvLoads(self.activations, self.alone, *given)

    @property
    def record_nbytes(self) -> int:
        """Bytes of a unit's activations."""
        return RECORD_NBYTES[self.activations]

    @property
    def loads_late(self) -> bool:
        """Whether the norm's weights are loaded only when those of a deferred add have been used: a
        thread has no registers for both."""
        return self.steps.has(DeferredAdd) and not has_room_for_norm(self.cut, self.prologue)

    @cached_property
    def cut(self) -> Cut:
        given = (self.formats, self.cols, self.cluster, self.activations)
        room = footprint(*given, self.options.shared)
        sums = 1 + sum(step.warp_sums for step in self.prologue)
        shared = sum(step.shared_nbytes for step in self.epilogue)
        room = replace(room, warp_squares=4 * sums, shared=shared)
        if self.activations == "i16" and all(fmt.grid for fmt in self.formats):
            room = replace(room, slots=GRID_SLOTS)
        tiles = even_tiles(self.options, self.layouts)
        return cut_launch(self.options, self.layouts, room, tiles, self.steps.pair, even=True)

    @property
    def tolerance(self) -> Tolerance:
        """f32: rounding of the sums, see `GemvF32`. i16: standard normal activations are off by
        2e-5 of their size, a product by as much of its own, several times that where few rows
        cancel. f16: tensor cores drop bits of sums."""
        then, gate = self.steps.has(Continued), self.steps.find(Gated)
        if self.activations == "i16":
            curved = then or self.steps.has(Activated) or (gate is not None and gate != Gated())
            return Tolerance(rtol=3e-4 if curved else 1.5e-4, atol=5e-4)
        if self.activations == "f16":
            return Tolerance(rtol=2e-5, atol=2e-6)
        smaller = self.steps.f is not None or then or self.steps.has(Bounded)
        return Tolerance(rtol=5e-6 if smaller else 2e-6, atol=2e-6)

    @classmethod
    def examples(cls) -> dict[str, Gemv]:
        return gemv_examples(cls)
