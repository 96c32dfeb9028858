"""Products of a few rows with their experts, each expert read once for up to four of its rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.experts.quartets import MIN_SLOTS, QuartetProduct
from urdir.ptxgen.kernels.experts.selection import MAX_EXPERTS
from urdir.ptxgen.kernels.experts.spec import MAX_USED
from urdir.ptxgen.kernels.linear.prologue.norm import is_first
from urdir.ptxgen.kernels.linear.spec import MAX_BATCH
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.spec import Access, Array, LaunchShape, Param, Tolerance
from urdir.ptxgen.weights.formats import FORMATS
from urdir.ptxgen.weights.layout import TILE_COLS


@dataclass(frozen=True)
class ExpertsGemmSmall(QuartetProduct):
    """y = W x (+ bias) for pairs of a row and a slot, W (rows, cols) of the pair's expert.

    The launch finds out which rows chose the same expert. A quartet is an expert and up to four of
    its pairs: its tiles are read once for these. Bands of quartets are dealt out evenly over the
    CTAs, and those of a CTA over its warps.

    Going up, x (batch, cols) has the rows' activations, after ``norm``, and y is (batch, used,
    rows). ``down``: x (batch, used, cols) has the pairs', and the columns may be cut in ``parts``,
    each with a product of its own: y (batch, used * parts, rows). ``weighted``: products are
    multiplied with the pair's weight, going down with the bias, going up without. ``activation``,
    of what goes up: y = f(W x). ``gated``: y = f(W x) * (U x), U with a bias of its own where W has
    one. ``early``: as in `ExpertsDown`.

    Activations are rounded as in `GemmSmall`, and tiles multiplied in the same way. A pair's result
    has the same bits whatever other pairs there are.

    Raises PtxgenError for unquantised types, for norms that subtract the mean or add a bias, and
    where shared memory is too small.
    """

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
        if self.format.is_float:
            raise PtxgenError(f"{self.name}: the weights must be quantised")
        self._check_ends()
        if self.parts < 1 or self.layout.row_tiles % self.parts:
            raise PtxgenError(
                f"{self.name}: {self.layout.row_tiles} blocks of columns in {self.parts} parts"
            )
        if self.parts > 1 and not (self.down and self.slots <= MAX_USED):
            raise PtxgenError(f"{self.name}: parts are for what goes down, {MAX_USED} slots of y")
        if not 1 <= self.cta_warps <= 32 or self.ring_slots < MIN_SLOTS:
            raise PtxgenError(
                f"{self.name}: {self.cta_warps} warps with {MIN_SLOTS} tiles each and the "
                f"activations of {2 * self.part_blocks} blocks are more than {self.shared} bytes"
            )
        if self.most_units * self.ctas >= 2**32 or self.pairs * self.parts * self.rows >= 2**32:
            raise PtxgenError(f"{self.name}: {self.pairs} pairs of {self.rows} rows are too many")

    def _check_ends(self) -> None:
        if self.down and (self.activation is not None or self.norm is not None):
            raise PtxgenError(f"{self.name}: a norm and an activation are for what goes up")
        self._check_activation()
        if self.norm is not None and is_first(self.norm):
            raise PtxgenError(f"{self.name}: {self.norm} must be a launch of its own")

    @property
    def params(self) -> tuple[Param, ...]:
        matrices = ("weights", "up")[: self.pair]
        params = [Param(name, "u8", (self.layout.nbytes,), Access.IN) for name in matrices]
        params.append(Param("expert", "u32", ("batch", "used"), Access.IN))
        if self.weighted:
            params.append(Param("weight", "f32", ("batch", "used"), Access.IN))
        of_pairs = ("used",) if self.down else ()
        params.append(Param("x", "f32", ("batch", *of_pairs, "cols"), Access.IN))
        params += self.norm_params
        for name in ("bias", "up_bias")[: self.pair]:
            if self.bias:
                params.append(Param(name, "f32", ("experts", "rows"), Access.IN))
        params.append(Param("y", "f32", ("batch", "slots", "rows"), Access.OUT))
        return tuple(params)

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(
            grid=(self.ctas, 1, 1),
            block=(32 * self.cta_warps, 1, 1),
            shared_bytes=self.list_at + self.list_nbytes,
            resident=1,
            prefers_shared=True,
        )

    @property
    def tolerance(self) -> Tolerance:
        """As `GemmSmall`'s; a weight may be several times another one."""
        return Tolerance(rtol=3e-4, atol=1e-3)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        chosen, x = inputs["expert"], self.multiplied(**inputs)
        part_cols = self.part_blocks * TILE_COLS  # of the last part perhaps fewer
        padding = [(0, 0), (0, self.parts * part_cols - self.cols)]
        x = np.pad(x.reshape(-1, self.cols), padding)
        x = x.reshape(self.batch, self.used if self.down else 1, self.parts, part_cols)

        def product(matrix: str, bias: str) -> Array:
            weights = np.pad(self.layout.unpack(inputs[matrix]).astype(np.float64), padding)
            weights = weights.reshape(self.experts, self.rows, self.parts, part_cols)[chosen]
            of_pairs = np.broadcast_to(x, (*chosen.shape, *x.shape[2:]))
            y: Array = np.einsum("bsrpc,bspc->bspr", weights, of_pairs)
            factor = inputs["weight"][:, :, None, None] if self.weighted else 1.0
            added = inputs[bias][chosen] if self.bias else np.zeros(())
            if not self.down:
                return y * factor + added[:, :, None] if self.bias else y * factor
            if self.bias:
                y[:, :, 0] += added
            return y * factor

        y = product("weights", "bias")
        if self.activation is not None:
            f = self.activation
            y = f.gated(y, product("up", "up_bias")) if self.gated else f(y)
        return {"y": y.reshape(self.batch, self.slots, self.rows).astype(np.float32)}

    @classmethod
    def examples(cls) -> Mapping[str, ExpertsGemmSmall]:
        q8, q4_k, q6_k = (FORMATS[name] for name in ("Q8_0", "Q4_K", "Q6_K"))
        mxfp4, q5_0, q5_1 = (FORMATS[name] for name in ("MXFP4", "Q5_0", "Q5_1"))
        oai, silu, rms = Activation("swiglu_oai", limit=7.0), Activation("silu"), Norm("rms", 1e-5)
        return {
            "smallest": cls(q8, 2, 1, 16, 32, 2, sms=2),
            "one row": cls(
                q4_k, 5, 3, 48, 512, 1, gated=True, activation=silu, norm=rms, sms=3, stages=4
            ),
            "one expert": cls(q4_k, 1, 1, 48, 768, 8, norm=Norm("rms", 1e-6, False), sms=5),
            "gpt-oss": cls(
                mxfp4, 9, 2, 32, 288, 5, gated=True, bias=True, activation=oai, norm=rms, sms=7
            ),
            "weighted up": cls(
                q5_0, 3, 1, 32, 512, 7, weighted=True, bias=True, gated=True, sms=2, warps=2,
                activation=Activation("gelu", limit=2.5, clamp="activated"),
            ),
            "relu2": cls(q5_1, 40, 4, 16, 96, 8, activation=Activation("relu2"), sms=4, stages=3),
            "down": cls(q8, 6, 4, 48, 544, 6, down=True, weighted=True, bias=True, sms=3),
            "down early": cls(q4_k, 4, 2, 80, 1024, 3, down=True, early=True, sms=4, warps=3),
            "parts": cls(
                q6_k, 3, 2, 48, 1024, 8, down=True, weighted=True, bias=True, early=True,
                parts=2, sms=4, stages=2,
            ),
            "a part a block": cls(mxfp4, 5, 2, 16, 736, 4, down=True, bias=True, parts=3, sms=9),
        }  # fmt: skip

    def bytes_moved(self) -> int:
        """Those of as many experts as rows that choose at random have, each read once, and of the
        activations."""
        chosen = expected_experts(self.batch, self.experts, self.used)
        matrices = round(self.pair * chosen * self.layout.nbytes / self.experts)
        return matrices + sum(self.nbytes(p) for p in self.params if p.dtype != "u8")


def expected_experts(rows: int, experts: int, used: int) -> float:
    """How many experts rows choose together, on average, each ``used`` of them at random."""
    return float(experts * (1 - (1 - used / experts) ** rows))
