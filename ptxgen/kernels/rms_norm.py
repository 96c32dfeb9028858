"""RMSNorm (Zhang & Sennrich 2019, eq. 4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, Tolerance, ceil_div

#: The most columns of a row: its code is unrolled.
MAX_COLS = 1 << 20


@dataclass(frozen=True)
class RmsNorm(KernelSpec):
    """Root-mean-square normalisation of each row, times a weight per column.

    y[r, c] = x[r, c] / sqrt(mean(x[r]^2) + eps) * weight[c]
    """

    rows: int
    cols: int
    eps: float

    name = "rms_norm"
    template = ("urdir.templates", "rms_norm.ptx.j2")

    def __post_init__(self) -> None:
        if self.rows < 1 or self.cols < 1:
            raise PtxgenError(f"rms_norm: no values in {self.rows} rows of {self.cols}")
        if self.cols > MAX_COLS:
            raise PtxgenError(
                f"rms_norm: {self.cols} columns: at most {MAX_COLS}, as unrolled code"
            )

    @property
    def params(self) -> tuple[Param, ...]:
        return (
            Param("x", "f32", ("rows", "cols"), Access.IN),
            Param("weight", "f32", ("cols",), Access.IN),
            Param("y", "f32", ("rows", "cols"), Access.OUT),
        )

    @property
    def vector(self) -> int:
        """Columns of one access: four where that keeps every row 16-byte aligned."""
        return 4 if self.cols % 4 == 0 else 1

    @property
    def warps(self) -> int:
        """Warps of a CTA: about eight values a thread, at most 1024 threads."""
        return min(32, ceil_div(self.cols, 32 * 8))

    @property
    def steps(self) -> int:
        """Accesses with which a thread covers its part of a row."""
        return ceil_div(self.cols, self.vector * 32 * self.warps)

    @property
    def held(self) -> bool:
        """A thread keeps its values in registers between the two passes, or reads them again."""
        return self.vector * self.steps <= 16

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(grid=(self.rows, 1, 1), block=(32 * self.warps, 1, 1))

    @property
    def tolerance(self) -> Tolerance:
        return Tolerance(rtol=2e-6)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        x = inputs["x"].astype(np.float64)
        scale = 1.0 / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + self.eps)
        return {"y": (x * scale * inputs["weight"].astype(np.float64)).astype(np.float32)}

    @classmethod
    def examples(cls) -> Mapping[str, RmsNorm]:
        return {
            "one short row": cls(rows=1, cols=7, eps=1e-5),
            "short rows": cls(rows=3, cols=64, eps=1e-6),
            "odd columns": cls(rows=2, cols=257, eps=1e-5),
            "4096 columns": cls(rows=1, cols=4096, eps=1e-5),
            "16380 columns": cls(rows=2, cols=16380, eps=1e-5),
            "16389 columns": cls(rows=1, cols=16389, eps=1e-5),
            "20484 columns": cls(rows=2, cols=20484, eps=1e-5),
        }

    def flops(self) -> int:
        return 4 * self.rows * self.cols
