"""Vectors of several sources side by side, each normalised: what a draft head multiplies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.kernels.normalise import MAX_COLS
from urdir.ptxgen.kernels.row_threads import RowThreads
from urdir.ptxgen.limits import POSITIVE, limited, up_to
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, Tolerance


@dataclass(frozen=True)
class Concat(RowThreads, KernelSpec):
    """y[r] = [norm(x0[r]) ; norm(x1[r]) ; ...], all x (rows, cols), y (rows, sources, cols) f32.

    The ``norm`` has a weight (cols,) for each source, and a bias where it has biases; None copies.
    """

    rows: int
    cols: int
    sources: int
    norm: Norm | None = None

    name = "concat"
    limits = limited(rows=POSITIVE, cols=up_to(MAX_COLS), sources=up_to(16))
    tolerance = Tolerance(rtol=2e-6)

    @property
    def params(self) -> tuple[Param, ...]:
        numbers, norm = range(self.sources), self.norm
        vector = ("cols",)
        weights = numbers if norm is not None and norm.weight else ()
        biases = numbers if norm is not None and norm.bias else ()
        return (
            *(Param(f"x{i}", "f32", ("rows", "cols"), Access.IN) for i in numbers),
            *(Param(f"weight{i}", "f32", vector, Access.IN) for i in weights),
            *(Param(f"bias{i}", "f32", vector, Access.IN) for i in biases),
            Param("y", "f32", ("rows", "sources", "cols"), Access.OUT),
        )

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(grid=(self.rows, self.sources, 1), block=(32 * self.warps, 1, 1))

    def reference(self, **inputs: Any) -> dict[str, Array]:
        parts = []
        for i in range(self.sources):
            x, weight, bias = (inputs.get(f"{name}{i}") for name in ("x", "weight", "bias"))
            assert x is not None
            parts.append(x if self.norm is None else self.norm(x, weight, bias))
        return {"y": np.stack(parts, axis=1).astype(np.float32)}

    @classmethod
    def examples(cls) -> dict[str, Concat]:
        rms, layer = Norm("rms", 1e-5), Norm("layer", 1e-5, bias=True)
        return {
            "two of one row": cls(rows=1, cols=260, sources=2, norm=rms),
            "two of odd rows": cls(rows=3, cols=37, sources=2, norm=rms),
            "two long rows": cls(rows=2, cols=4096, sources=2, norm=rms),
            "layer norms": cls(rows=2, cols=301, sources=2, norm=layer),
            "no weights": cls(rows=2, cols=64, sources=2, norm=Norm("rms", 1e-6, weight=False)),
            "three copied": cls(rows=2, cols=516, sources=3),
            "many copied, odd": cls(rows=3, cols=33, sources=5),
            "long, 16388 columns": cls(rows=1, cols=16388, sources=2, norm=rms),
        }

    def flops(self) -> int:
        return 4 * self.rows * self.sources * self.cols if self.norm else 0
