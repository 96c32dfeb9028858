"""What the experts of a row made, added up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.experts.selection import MAX_USED
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, Tolerance, ceil_div

THREADS = 128


@dataclass(frozen=True)
class CombineExperts(KernelSpec):
    """y[b] = the sum over slots s of x[b, s] (+ residual[b]), slot by slot."""

    rows: int
    used: int
    cols: int
    residual: bool = False

    name = "combine_experts"
    template = ("urdir.templates", "experts/combine.ptx.j2")

    def __post_init__(self) -> None:
        if not 1 <= self.used <= MAX_USED or not 1 <= self.rows <= 65535 or self.cols < 1:
            raise PtxgenError(
                f"combine_experts: {self.rows} rows of {self.used} x {self.cols}: 1 to 65535 rows, "
                f"1 to {MAX_USED} slots"
            )
        if self.cols % 4:
            raise PtxgenError(f"combine_experts: {self.cols} columns: a multiple of 4")

    @property
    def params(self) -> tuple[Param, ...]:
        residual = (Param("residual", "f32", ("rows", "cols"), Access.IN),) if self.residual else ()
        return (
            Param("x", "f32", ("rows", "used", "cols"), Access.IN),
            *residual,
            Param("y", "f32", ("rows", "cols"), Access.OUT),
        )

    @property
    def launch_shape(self) -> LaunchShape:
        grid = (ceil_div(self.cols, 4 * THREADS), self.rows, 1)
        return LaunchShape(grid=grid, block=(THREADS, 1, 1))

    @property
    def tolerance(self) -> Tolerance:
        return Tolerance.of_sum("f32", self.used + self.residual)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        y = inputs["x"].astype(np.float64).sum(axis=1)
        if self.residual:
            y += inputs["residual"]
        return {"y": y.astype(np.float32)}

    @classmethod
    def examples(cls) -> Mapping[str, CombineExperts]:
        return {
            "smallest": cls(1, 1, 4),
            "odd": cls(3, 5, 36, residual=True),
            "several CTAs": cls(2, 8, 1028, residual=True),
            "32 slots": cls(2, 32, 68),
        }

    def flops(self) -> int:
        return self.rows * self.used * self.cols
