"""Mixes of each token with the one before it (RWKV)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.kernels.recurrent.rows import RecurrentRows
from urdir.ptxgen.limits import POSITIVE, limited, up_to
from urdir.ptxgen.spec import Access, Array, LaunchShape, Param, Tolerance, ceil_div

THREADS = 128
#: Vectors of four values that a thread has of a row while it computes a norm.
MAX_VECTORS = 16


@dataclass(frozen=True)
class TokenShift(RecurrentRows):
    """y<i>[t] = n[t] + mix<i> * (n[t - 1] - n[t]), for each of ``mixes``; n is x, or of rows
    without segments its ``norm``.

    ``shift`` has n of each sequence's last token; before the first one n is 0. The launch updates
    it if it ``stores``. With ``dynamic`` mixes of each row, these are added: mix<i> + dynamic<i>.
    """

    channels: int
    mixes: int
    dynamic: bool = False
    stores: bool = True
    norm: Norm | None = None

    name = "token_shift"
    limits = limited(**RecurrentRows.limits, channels=POSITIVE, mixes=up_to(8))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.norm is not None and not self.can_norm(self.channels, self.segments):
            raise PtxgenError(
                f"token_shift: a norm of {self.channels} values in {self.segments} segments: "
                f"multiples of 4 up to {4 * THREADS * MAX_VECTORS}, no segments"
            )

    @staticmethod
    def can_norm(channels: int, segments: int) -> bool:
        """Whether a launch can compute the norm: each CTA of a row does."""
        return not segments and channels % 4 == 0 and channels <= 4 * THREADS * MAX_VECTORS

    @property
    def vectors(self) -> int:
        """Vectors of four values of a row for each thread."""
        return ceil_div(self.channels, 4 * THREADS)

    @property
    def params(self) -> tuple[Param, ...]:
        matrix, vector = ("rows", "channels"), ("channels",)
        norm, own = self.norm, range(self.mixes)
        access = Access.INOUT if self.stores else Access.IN
        return Param.given(
            Param("x", "f32", matrix, Access.IN),
            norm and norm.weight and Param("weight", "f32", vector, Access.IN),
            norm and norm.bias and Param("bias", "f32", vector, Access.IN),
            *(Param(f"mix{i}", "f32", vector, Access.IN) for i in own),
            *(Param(f"dynamic{i}", "f32", matrix, Access.IN) for i in own if self.dynamic),
            *self.row_params,
            Param("shift", "f32", ("sequences", "channels"), access),
            *(Param(f"y{i}", "f32", matrix, Access.OUT) for i in own),
        )

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(
            grid=(ceil_div(self.channels, THREADS), self.rows, 1), block=(THREADS, 1, 1)
        )

    @property
    def tolerance(self) -> Tolerance:
        return Tolerance(rtol=2e-6 if self.norm is None else 1e-5)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        x = inputs["x"].astype(np.float64)
        if self.norm is not None:
            x = self.norm(x, inputs.get("weight"), inputs.get("bias"))
        shifts = inputs["shift"].astype(np.float64)
        before, idle = np.zeros_like(x), np.ones(self.rows, np.bool_)
        for row, sequence, is_first in self.tokens(inputs):
            before[row] = shifts[sequence] * (not is_first)
            shifts[sequence] = x[row]
            idle[row] = False
        found = {"shift": shifts.astype(np.float32)} if self.stores else {}
        for i in range(self.mixes):
            mix = inputs[f"mix{i}"].astype(np.float64)
            if self.dynamic:
                mix = mix + inputs[f"dynamic{i}"]
            y = x + mix * (before - x)
            y[idle] = 0.0
            found[f"y{i}"] = y.astype(np.float32)
        return found

    @classmethod
    def examples(cls) -> dict[str, TokenShift]:
        layer, rms = Norm("layer", 1e-5, bias=True), Norm("rms", 1e-6)
        return {
            "one row": cls(1, 2, 64, 0, channels=130, mixes=6),
            "rows": cls(6, 5, 64, 0, channels=37, mixes=1),
            "a norm": cls(1, 1, 64, 0, channels=512, mixes=6, norm=layer),
            "norms of rows": cls(5, 4, 64, 0, channels=644, mixes=2, norm=rms),
            "dynamic": cls(3, 3, 64, 0, channels=132, mixes=5, dynamic=True),
            "a prompt": cls(37, 3, 64, 1, channels=130, mixes=2),
            "segments": cls(45, 4, 64, 3, channels=40, mixes=1, stores=False),
            "dynamic segments": cls(45, 4, 64, 3, channels=140, mixes=3, dynamic=True),
        }

    def flops(self) -> int:
        return 3 * self.rows * self.mixes * self.channels
