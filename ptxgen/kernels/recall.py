"""A weighted sum of the stream and of streams kept before: residuals across layers (Kimi K3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, Tolerance, ceil_div

#: Most warps of a CTA, most vectors of four values that a thread has of a row, and most streams.
MAX_WARPS, MAX_VECTORS, MAX_BANKS = 16, 8, 32


@dataclass(frozen=True)
class Recall(KernelSpec):
    """y[r] = sum over i of p_i s_i[r]: s_i are the rows ``bank[i]``, and last the row of x.

    p is the softmax over i of weight . (s_i[r] / sqrt(mean(s_i[r]^2) + eps)).
    """

    rows: int
    cols: int
    banks: int
    eps: float

    name = "recall"
    template = ("urdir.templates", "recall.ptx.j2")

    def __post_init__(self) -> None:
        if self.rows < 1 or not 1 <= self.banks <= MAX_BANKS:
            raise PtxgenError(
                f"recall: {self.rows} rows of {self.banks} kept streams (1 to {MAX_BANKS})"
            )
        most = 4 * 32 * MAX_WARPS * MAX_VECTORS
        if self.cols < 4 or self.cols % 4 or self.cols > most:
            raise PtxgenError(f"recall: rows of {self.cols} values: multiples of 4 up to {most}")

    @property
    def warps(self) -> int:
        """Warps of a CTA: a vector a thread, until there are enough."""
        return min(MAX_WARPS, ceil_div(self.cols, 4 * 32))

    @property
    def vectors(self) -> int:
        """Vectors of a thread."""
        return ceil_div(self.cols, 4 * 32 * self.warps)

    @property
    def params(self) -> tuple[Param, ...]:
        return (
            Param("x", "f32", ("rows", "cols"), Access.IN),
            Param("bank", "f32", ("banks", "rows", "cols"), Access.IN),
            Param("weight", "f32", ("cols",), Access.IN),
            Param("y", "f32", ("rows", "cols"), Access.OUT),
        )

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(grid=(self.rows, 1, 1), block=(32 * self.warps, 1, 1))

    @property
    def tolerance(self) -> Tolerance:
        # exp is approximated, and scores are sums of all columns
        return Tolerance(rtol=1e-5)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        streams = np.concatenate([inputs["bank"], inputs["x"][None]]).astype(np.float64)
        rms = np.sqrt(np.mean(streams * streams, axis=2, keepdims=True) + self.eps)
        scores = np.sum(streams / rms * inputs["weight"], axis=2, keepdims=True)
        p = np.exp(scores - scores.max(axis=0))
        return {"y": np.sum(p / p.sum(axis=0) * streams, axis=0).astype(np.float32)}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Scores of about 1: else one stream would hide the others."""
        inputs = super().make_inputs(rng)
        inputs["weight"] = inputs["weight"] / np.float32(np.sqrt(self.cols))
        return inputs

    @classmethod
    def examples(cls) -> Mapping[str, Recall]:
        return {
            "one row": cls(1, 8, 1, 1e-5),
            "odd columns": cls(5, 132, 3, 1e-6),
            "many streams": cls(2, 512, 9, 1e-5),
            "a long row": cls(2, 7168, 2, 1e-5),
        }

    def flops(self) -> int:
        return 6 * self.rows * self.cols * (self.banks + 1)
