"""Attention residuals (Kimi K3): a weighted sum of the residual stream and banked streams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.kernels.held_rows import HeldRows
from urdir.ptxgen.limits import POSITIVE, limited, up_to
from urdir.ptxgen.spec import Access, Array, Param, Tolerance

#: Maximum number of banked streams.
MAX_BANKS = 32


@dataclass(frozen=True)
class Recall(HeldRows):
    """y[r] = sum over i of p_i s_i[r]: s_i are the rows ``bank[i]``, and last the row of x.

    p is the softmax over i of weight . (s_i[r] / sqrt(mean(s_i[r]^2) + eps)).
    """

    rows: int
    cols: int
    banks: int
    eps: float

    name = "recall"
    limits = limited(rows=POSITIVE, banks=up_to(MAX_BANKS))
    params = (
        Param("x", "f32", ("rows", "cols"), Access.IN),
        Param("bank", "f32", ("banks", "rows", "cols"), Access.IN),
        Param("weight", "f32", ("cols",), Access.IN),
        Param("y", "f32", ("rows", "cols"), Access.OUT),
    )
    #: exp is approximated, and scores are sums of all columns
    tolerance = Tolerance(rtol=1e-5)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        streams = np.concatenate([inputs["bank"], inputs["x"][None]]).astype(np.float64)
        rms = np.sqrt(np.mean(streams * streams, axis=2, keepdims=True) + self.eps)
        scores = np.sum(streams / rms * inputs["weight"], axis=2, keepdims=True)
        p = np.exp(scores - scores.max(axis=0))
        return {"y": np.sum(p / p.sum(axis=0) * streams, axis=0).astype(np.float32)}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Scores of about 1: otherwise one stream would hide the others."""
        inputs = super().make_inputs(rng)
        inputs["weight"] = inputs["weight"] / np.float32(np.sqrt(self.cols))
        return inputs

    @classmethod
    def examples(cls) -> dict[str, Recall]:
        return {
            "one row": cls(1, 8, 1, 1e-5),
            "odd columns": cls(5, 132, 3, 1e-6),
            "many streams": cls(2, 512, 9, 1e-5),
            "a long row": cls(2, 7168, 2, 1e-5),
        }

    def flops(self) -> int:
        return 6 * self.rows * self.cols * (self.banks + 1)
