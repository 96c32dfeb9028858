"""Products of a few rows with their experts, each expert read once for up to four of its rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.experts.gemm import DOWN, UP
from urdir.ptxgen.kernels.experts.quartets import MIN_SLOTS, QuartetProduct
from urdir.ptxgen.kernels.experts.selection import MAX_EXPERTS, MAX_USED, Selection
from urdir.ptxgen.kernels.linear.epilogue.activation import Activated, Gated
from urdir.ptxgen.kernels.linear.epilogue.bias import Bias
from urdir.ptxgen.kernels.linear.epilogue.weighted import Weighted
from urdir.ptxgen.kernels.linear.prologue.norm import Normed
from urdir.ptxgen.kernels.linear.spec import MAX_BATCH
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.spec import Access, Array, LaunchShape, Param, Tolerance
from urdir.ptxgen.weights.formats import FORMATS
from urdir.ptxgen.weights.grids import with_entries
from urdir.ptxgen.weights.layout import TILE_COLS


@dataclass(frozen=True)
class ExpertsGemmSmall(QuartetProduct):
    """y = W x for pairs of a row and a slot, then the ``epilogue``, W (rows, cols) of the pair's
    expert.

    The launch finds out which rows chose the same expert. A quartet is an expert and up to four of
    its pairs: its tiles are read once for these. Bands of quartets are dealt out evenly over the
    CTAs, and those of a CTA over its warps.

    Going up, x (batch, cols) has the rows' activations, y is (batch, used, rows), and the epilogue
    is `UP`. ``down``: x (batch, used, cols) has the pairs', the epilogue is `DOWN`, and the columns
    may be cut in ``splits``, each with a product of its own: y (batch, used * splits, rows), of
    which the first has the bias. ``early``: as in `ExpertsDown`.

    Activations are rounded as in `GemmSmall`, and tiles multiplied in the same way. A pair's result
    has the same bits whatever other pairs there are.

    Raises PtxgenError for unquantised types, for norms that subtract the mean or add a bias, and
    where shared memory is too small.
    """

    prologues = (Normed,)
    epilogues = UP
    name = "experts_gemm_small"
    template = ("urdir.templates", "experts/gemm_small.ptx.j2")

    def __post_init__(self) -> None:
        if not 1 <= self.used <= min(self.experts, MAX_USED) or self.experts > MAX_EXPERTS:
            raise PtxgenError(
                f"{self.name}: {self.used} of {self.experts} experts: 1 to {MAX_USED} of "
                f"{MAX_EXPERTS} at most"
            )
        if not 1 <= self.batch <= MAX_BATCH:
            raise PtxgenError(f"{self.name}: {self.batch} rows: 1 to {MAX_BATCH}")
        self.check_selection()
        if self.format.arithmetic != "integers":
            raise PtxgenError(f"{self.name}: the weights must be quantised")
        self.check_steps(DOWN if self.down else UP)
        if self.prologue and (self.down or self.norm_first):
            raise PtxgenError(f"{self.name}: {self.norm} must be a launch of its own")
        if self.splits < 1 or self.layout.row_tiles % self.splits:
            raise PtxgenError(
                f"{self.name}: {self.layout.row_tiles} blocks of columns in {self.splits} splits"
            )
        if self.splits > 1 and not (self.down and self.slots <= MAX_USED):
            raise PtxgenError(f"{self.name}: splits are for what goes down, {MAX_USED} slots of y")
        if not 1 <= self.cta_warps <= 32 or self.ring_slots < MIN_SLOTS:
            raise PtxgenError(
                f"{self.name}: {self.cta_warps} warps with {MIN_SLOTS} tiles each and the "
                f"activations of {2 * self.split_blocks} blocks are more than {self.shared} bytes"
            )
        if self.most_units * self.ctas >= 2**32 or self.pairs * self.splits * self.rows >= 2**32:
            raise PtxgenError(f"{self.name}: {self.pairs} pairs of {self.rows} rows are too many")

    @property
    def params(self) -> tuple[Param, ...]:
        of_pairs = ("used",) if self.down else ()
        return (
            *self.weight_params,
            *self.choice_params,
            *(self.params_of(Weighted) if self.selection is None else ()),
            Param("x", "f32", ("batch", *of_pairs, "cols"), Access.IN),
            *self.params_of(Normed, Bias),
            Param("y", "f32", ("batch", "slots", "rows"), Access.OUT),
        )

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(
            grid=(self.ctas, 1, 1),
            block=(32 * self.cta_warps, 1, 1),
            shared_bytes=with_entries(self.list_at + self.list_nbytes, self.shared_grids),
            resident=1,
            prefers_shared=True,
        )

    @property
    def tolerance(self) -> Tolerance:
        """As `GemmSmall`'s; a weight may be several times another one."""
        return Tolerance(rtol=3e-4, atol=1e-3)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        inputs = self.chosen(inputs)
        chosen, x = inputs["expert"].reshape(-1), self.multiplied(inputs, {})
        pairs = np.arange(self.pairs)
        x = x.reshape(-1, self.cols)[pairs if self.down else pairs // self.used]
        matrices = self.matrices_of(inputs)
        y = np.empty((self.pairs, self.splits, self.rows), np.float32)
        for split in range(self.splits):
            first = split * self.split_blocks * TILE_COLS
            columns = slice(first, first + self.split_blocks * TILE_COLS)
            products = [np.einsum("prc,pc->pr", m[chosen][..., columns], x[:, columns])
                        for m in matrices]  # fmt: skip
            made = np.stack(products) if self.gated else products[0]
            steps = [s for s in self.epilogue if split == 0 or not isinstance(s, Bias)]
            y[:, split] = self.ended(made, chosen, pairs, inputs, steps)
        return {"y": y.reshape(self.batch, self.slots, self.rows)}

    @classmethod
    def examples(cls) -> Mapping[str, ExpertsGemmSmall]:
        q8, q4_k, q6_k = (FORMATS[name] for name in ("Q8_0", "Q4_K", "Q6_K"))
        mxfp4, q5_0, q5_1 = (FORMATS[name] for name in ("MXFP4", "Q5_0", "Q5_1"))
        oai, rms = Gated(Activation("swiglu_oai", limit=7.0)), Normed(Norm("rms", 1e-5))
        plain, bias, weighted = Normed(Norm("rms", 1e-6, False)), Bias(), Weighted()
        gelu, relu2 = Activation("gelu", limit=2.5, clamp="activated"), Activation("relu2")
        parts = {"down": True, "early": True, "splits": 2, "sms": 4, "stages": 2}
        return {
            "smallest": cls(q8, 2, 1, 16, 32, 2, sms=2),
            "one row": cls.of(q4_k, 5, 3, 48, 512, 1, rms, Gated(), sms=3, stages=4),
            "one expert": cls.of(q4_k, 1, 1, 48, 768, 8, plain, sms=5),
            "gpt-oss": cls.of(mxfp4, 9, 2, 32, 288, 5, rms, bias, oai, sms=7),
            "weighted up": cls.of(
                q5_0, 3, 1, 32, 512, 7, weighted, bias, Gated(gelu), sms=2, warps=2
            ),
            "relu2": cls.of(q5_1, 40, 4, 16, 96, 8, Activated(relu2), sms=4, stages=3),
            "down": cls.of(q8, 6, 4, 48, 544, 6, bias, weighted, down=True, sms=3),
            "down early": cls(q4_k, 4, 2, 80, 1024, 3, down=True, early=True, sms=4, warps=3),
            "parts": cls.of(q6_k, 3, 2, 48, 1024, 8, bias, weighted, **parts),
            "integers": cls.of(FORMATS["W4G128"], 5, 2, 48, 384, 3, rms, Gated(), sms=3),
            "codebook": cls.of(FORMATS["IQ3_S"], 4, 2, 48, 512, 3, rms, Gated(), sms=3),
            "chooses": cls.of(
                *(q4_k, 33, 4, 32, 512, 7, rms, Gated()),
                **{"sms": 3, "selection": Selection(33, 4, "softmax_selected")},
            ),
            "chooses, weighted": cls.of(
                *(q8, 70, 8, 32, 288, 8, bias, weighted),
                **{"down": True, "early": True, "sms": 4, "warps": 3},
                selection=Selection(70, 8, normalised=True, scale=2.5),
            ),
            "chooses, selected": cls.of(
                *(q6_k, 128, 4, 16, 512, 5, weighted),
                **{"down": True, "early": True, "splits": 2, "sms": 5},
                selection=Selection(128, 4, "softmax_selected"),
            ),
            "chooses, one row": cls.of(
                *(q4_k, 5, 3, 48, 512, 1, weighted),
                **{"down": True, "sms": 3, "selection": Selection(5, 3)},
            ),
            "a part a block": cls.of(mxfp4, 5, 2, 16, 736, 4, bias, down=True, splits=3, sms=9),
        }

    def bytes_moved(self) -> int:
        """Those of as many experts as rows that choose at random have, each read once, and of the
        activations."""
        chosen = expected_experts(self.batch, self.experts, self.used)
        matrices = round(self.pair * chosen * self.layout.nbytes / self.experts)
        return matrices + sum(self.nbytes(p) for p in self.params if p.dtype != "u8")


def expected_experts(rows: int, experts: int, used: int) -> float:
    """How many experts rows choose together, on average, each ``used`` of them at random."""
    return float(experts * (1 - (1 - used / experts) ** rows))
