"""Sums of scaled rows: y[r] = scale * (x[r][0] + x[r][1] + ...)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.spec import Access, KernelSpec, LaunchShape, Param, Tolerance


@dataclass(frozen=True)
class ScaledSum(KernelSpec):
    """The sum of each row of a matrix, times a number; a warp a row."""

    rows: int
    cols: int

    name = "scaled_sum"
    template = ("scaled_sum", "scaled_sum.ptx.j2")
    params = (
        Param("x", "f32", ("rows", "cols"), Access.IN),
        Param("y", "f32", ("rows",), Access.OUT),
        Param("scale", "f32"),
    )

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(grid=(self.rows, 1, 1), block=(32, 1, 1))

    @property
    def tolerance(self) -> Tolerance:
        # random rows cancel, so that their sum may be smaller than its terms
        return Tolerance(rtol=Tolerance.of_sum("f32", terms=self.cols).rtol, atol=1e-6)

    def reference(self, **inputs: Any) -> dict[str, Any]:
        exact = inputs["x"].astype(np.float64).sum(axis=1) * np.float64(inputs["scale"])
        return {"y": exact.astype(np.float32)}

    @classmethod
    def examples(cls) -> Mapping[str, ScaledSum]:
        return {
            "one value": cls(1, 1),
            "short rows": cls(3, 31),
            "a warp's rows": cls(2, 32),
            "long rows": cls(5, 1000),
        }

    def flops(self) -> int:
        return self.rows * (self.cols + 1)
