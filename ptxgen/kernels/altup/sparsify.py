"""Gaussian top-k: values far above the mean of their row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.kernels.altup.streams import THREADS
from urdir.ptxgen.limits import POSITIVE_31_BITS, limited
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, Tolerance


@dataclass(frozen=True)
class Sparsify(KernelSpec):
    """y = max(0, x - (mean + deviations * std)), mean and standard deviation (of cols - 1 degrees)
    being those of each row: Gaussian top-k (Gemma 3n)."""

    rows: int
    cols: int
    deviations: float

    name = "sparsify"
    limits = limited(rows=POSITIVE_31_BITS, cols=range(2, 1 << 31))
    tolerance = Tolerance(rtol=1e-5, atol=2e-6)

    @property
    def params(self) -> tuple[Param, ...]:
        matrix = ("rows", "cols")
        return Param("x", "f32", matrix, Access.IN), Param("y", "f32", matrix, Access.OUT)

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(grid=(self.rows, 1, 1), block=(THREADS, 1, 1))

    def reference(self, **inputs: Any) -> dict[str, Array]:
        return {"y": sparse(inputs["x"].astype(np.float64), self.deviations).astype(np.float32)}

    @classmethod
    def examples(cls) -> dict[str, Sparsify]:
        return {"a row": cls(1, 1031, 1.6448533535003662), "rows": cls(3, 37, 0.5)}

    def flops(self) -> int:
        return 6 * self.rows * self.cols


def sparse(x: Array, deviations: float) -> Array:
    """The values of rows that are that far above their mean, less that bound; f64."""
    bound = x.mean(axis=1, keepdims=True) + deviations * x.std(axis=1, ddof=1, keepdims=True)
    return np.asarray(np.maximum(0.0, x - bound))
