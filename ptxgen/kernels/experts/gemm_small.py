"""Products of a few rows with their experts, each expert read once for up to four of its rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.experts.examples import gemm_small_examples
from urdir.ptxgen.kernels.experts.gemm import DOWN, UP
from urdir.ptxgen.kernels.experts.quartet_memory import MAX_WARPS, QuartetMemory
from urdir.ptxgen.kernels.experts.reference import ended, matrices_of
from urdir.ptxgen.kernels.experts.selection import MAX_EXPERTS, MAX_USED
from urdir.ptxgen.kernels.experts.spec import ExpertsProduct, check_experts
from urdir.ptxgen.kernels.linear.cut import MAX_SLOTS, MIN_SLOTS
from urdir.ptxgen.kernels.linear.epilogue.bias import Bias
from urdir.ptxgen.kernels.linear.epilogue.weighted import Weighted
from urdir.ptxgen.kernels.linear.products.gemm_small_cut import Lanes
from urdir.ptxgen.kernels.linear.prologue.norm import Normed
from urdir.ptxgen.kernels.linear.reference import multiplied
from urdir.ptxgen.kernels.linear.spec import MAX_BATCH, SHARED_NBYTES, SMS
from urdir.ptxgen.kernels.linear.steps import Reference, check_steps
from urdir.ptxgen.kernels.pairs import most_tiles
from urdir.ptxgen.spec import Access, Array, LaunchShape, Param, Tolerance, ceil_div
from urdir.ptxgen.weights.grids import SharedGrids
from urdir.ptxgen.weights.layout import TILE_COLS
from urdir.ptxgen.weights.tiles import Tile

#: Pairs that are multiplied together: each has two of the eight columns of an ``mma``.
QUARTET = 4


@dataclass(frozen=True)
class Quartets:
    """The ``most`` quartets that there can be. Their units, ``bands`` of each of ``splits``, are
    dealt out over CTAs on ``sms``."""

    most: int
    splits: int
    bands: int
    sms: int

    @property
    def units(self) -> int:
        """Bands of quartets and splits, at most."""
        return self.most * self.splits * self.bands

    @property
    def ctas(self) -> int:
        """A CTA for each SM, or more, so that each takes at most as many bands as a quartet has:
        its bands are then of at most two quartets."""
        return self.sms * ceil_div(self.most * self.splits, self.sms)


@dataclass(frozen=True)
class ExpertsGemmSmall(ExpertsProduct):
    """y = W x for pairs of a row and a slot, then the ``epilogue``, W (rows, cols) of the pair's
    expert.

    The launch finds out which rows chose the same expert. A quartet is an expert and up to four of
    its pairs: its tiles are read once for these. Bands of quartets are dealt out evenly over the
    CTAs, and those of a CTA over its warps.

    Going up, x (batch, cols) has the rows' activations, or ``by_pair`` those of pairs, y is (batch,
    used, rows), and the epilogue is `UP`. ``down``: x (batch, used, cols) has the pairs', the
    epilogue is `DOWN`, and the columns may be cut in ``splits``, each with a product of its own: y
    (batch, used * splits, rows), of which the first has the bias. ``early``: as in `ExpertsDown`.

    ``warps`` of a CTA and ``stages`` of a ring are the most, in ``shared`` bytes; there are
    ``sms``.

    Results of padding rows are left as they are.

    Activations are rounded as in `GemmSmall`, and tiles multiplied in the same way. A pair's result
    has the same bits whatever other pairs there are.

    Raises PtxgenError for unquantised types, for norms that subtract the mean or add a bias, and
    where shared memory is too small.
    """

    down: bool = False
    early: bool = False
    splits: int = 1
    warps: int = MAX_WARPS
    stages: int = MAX_SLOTS
    shared: int = SHARED_NBYTES
    sms: int = SMS

    prologues = (Normed,)
    epilogues = UP
    name = "experts_gemm_small"

    def __post_init__(self) -> None:
        check_experts(self)
        if self.experts > MAX_EXPERTS:
            raise PtxgenError(f"{self.name}: {self.experts} experts: {MAX_EXPERTS} at most")
        if self.batch > MAX_BATCH:
            raise PtxgenError(f"{self.name}: {self.batch} rows: 1 to {MAX_BATCH}")
        if self.format.arithmetic != "integers":
            raise PtxgenError(f"{self.name}: the weights must be quantised")
        check_steps(self, DOWN if self.down else UP)
        if self.prologue and (self.down or not (self.steps.norm and self.steps.norm.is_factor)):
            raise PtxgenError(f"{self.name}: {self.steps.norm} must be a launch of its own")
        if self.splits < 1 or self.layout.row_tiles % self.splits:
            raise PtxgenError(
                f"{self.name}: {self.layout.row_tiles} blocks of columns in {self.splits} splits"
            )
        if self.splits > 1 and not (self.down and self.slots <= MAX_USED):
            raise PtxgenError(f"{self.name}: splits are for what goes down, {MAX_USED} slots of y")
        if not 1 <= self.memory.cta_warps <= 32 or self.memory.ring_slots < MIN_SLOTS:
            raise PtxgenError(
                f"{self.name}: {self.memory.cta_warps} warps with {MIN_SLOTS} tiles each and the "
                f"activations of {2 * self.memory.blocks} blocks are more than {self.shared} bytes"
            )
        numbers = (self.quartets.units * self.quartets.ctas, self.pairs * self.splits * self.rows)
        if max(numbers) >= 2**32:
            raise PtxgenError(f"{self.name}: {self.pairs} pairs of {self.rows} rows are too many")

    @property
    def slots(self) -> int:
        """Products of a row in y."""
        return self.used * self.splits

    @cached_property
    def quartets(self) -> Quartets:
        """Those of any choice, and how they are dealt out."""
        most = most_tiles(self.batch, self.experts, self.used, QUARTET)
        return Quartets(most, self.splits, self.bands, self.sms)

    # ---- read by the macros of `GemmSmall`: see there ----

    lanes = Lanes(1, QUARTET)

    @property
    def grids(self) -> SharedGrids:
        """The codebook, whose entries are in shared memory."""
        return self.memory.grids

    @cached_property
    def memory(self) -> QuartetMemory:
        """The CTA's shared memory."""
        chooses = self.selection is not None and self.steps.has(Weighted)
        return QuartetMemory(
            *(self.shared, self.warps, self.stages, self.steps.pair),
            tile=Tile(self.layout),
            blocks=self.layout.row_tiles // self.splits,
            experts=self.experts,
            quartets=self.quartets.most,
            normed=self.steps.normed,
            weight_nbytes=4 * self.pairs if chooses else 0,
        )

    @property
    def params(self) -> tuple[Param, ...]:
        of_pairs = ("used",) if self.down or self.by_pair else ()
        return (
            *self.weight_params,
            *self.row_experts.params,
            *(self.params_of(Weighted) if self.selection is None else ()),
            Param("x", "f32", ("batch", *of_pairs, "cols"), Access.IN),
            *self.params_of(Normed, Bias),
            Param("y", "f32", ("batch", "slots", "rows"), Access.OUT),
        )

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(
            grid=(self.quartets.ctas, 1, 1),
            block=(32 * self.memory.cta_warps, 1, 1),
            shared_bytes=self.memory.nbytes,
            resident=1,
            prefers_shared=True,
        )

    @property
    def tolerance(self) -> Tolerance:
        """As `GemmSmall`'s; a weight may be several times another one."""
        return Tolerance(rtol=3e-4, atol=1e-3)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        inputs = self.row_experts.chosen(inputs)
        experts, of = inputs["expert"].reshape(-1), Reference(self, self.parts[0], inputs, {})
        pairs = np.arange(self.pairs)
        x = multiplied(inputs["x"], of).reshape(-1, self.cols)[
            pairs if self.down or self.by_pair else pairs // self.used
        ]
        matrices = matrices_of(self, inputs)
        y = np.empty((self.pairs, self.splits, self.rows), np.float32)
        for split in range(self.splits):
            width = self.memory.blocks * TILE_COLS
            columns = slice(split * width, (split + 1) * width)
            products = [np.einsum("prc,pc->pr", m[experts][..., columns], x[:, columns])
                        for m in matrices]  # fmt: skip
            made = np.stack(products) if self.steps.gated else products[0]
            steps = [s for s in self.epilogue if split == 0 or not isinstance(s, Bias)]
            y[:, split] = ended(self, made, experts, pairs, inputs, steps)
        return {"y": y.reshape(self.batch, self.slots, self.rows)}

    @classmethod
    def examples(cls) -> dict[str, ExpertsGemmSmall]:
        return gemm_small_examples(cls)

    def bytes_moved(self) -> int:
        """Those of as many experts as rows that choose at random have, each read once, and of the
        activations."""
        chosen = expected_experts(self.batch, self.experts, self.used)
        matrices = round(self.steps.pair * chosen * self.layout.nbytes / self.experts)
        return matrices + sum(self.nbytes(p) for p in self.params if p.dtype != "u8")


def expected_experts(rows: int, experts: int, used: int) -> float:
    """How many experts rows choose together, on average, each ``used`` of them at random."""
    return float(experts * (1 - (1 - used / experts) ** rows))
