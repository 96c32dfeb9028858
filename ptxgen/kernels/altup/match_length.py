"""Rows as long as others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.kernels.altup.streams import THREADS
from urdir.ptxgen.limits import POSITIVE, POSITIVE_31_BITS, limited
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, Tolerance


@dataclass(frozen=True)
class MatchLength(KernelSpec):
    """y[r] = x[r] * |target[r]| / |x[r]|, the lengths being those of rows."""

    rows: int
    cols: int

    name = "match_length"
    limits = limited(rows=POSITIVE_31_BITS, cols=POSITIVE)
    tolerance = Tolerance(rtol=5e-6)

    @property
    def params(self) -> tuple[Param, ...]:
        matrix = ("rows", "cols")
        return (
            Param("x", "f32", matrix, Access.IN),
            Param("target", "f32", matrix, Access.IN),
            Param("y", "f32", matrix, Access.OUT),
        )

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(grid=(self.rows, 1, 1), block=(THREADS, 1, 1))

    def reference(self, **inputs: Any) -> dict[str, Array]:
        x, target = (inputs[name].astype(np.float64) for name in ("x", "target"))
        lengths = [np.sqrt(np.sum(of * of, axis=1, keepdims=True)) for of in (target, x)]
        return {"y": (x * lengths[0] / lengths[1]).astype(np.float32)}

    @classmethod
    def examples(cls) -> dict[str, MatchLength]:
        return {"a row": cls(1, 301), "rows": cls(3, 37)}

    def flops(self) -> int:
        return 5 * self.rows * self.cols
