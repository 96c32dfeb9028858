"""The index of the largest logit of each row: greedy sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, ceil_div


@dataclass(frozen=True)
class Argmax(KernelSpec):
    """The index of the largest of ``n`` logits of each row, the lowest one among equals.

    NaN counts as -inf; where all are -inf the index is 0.
    """

    n: int
    rows: int = 1

    name = "argmax"
    template = ("urdir.templates", "argmax.ptx.j2")

    #: Vectors that a thread loads before it looks at them.
    unroll = 4

    def __post_init__(self) -> None:
        if not 1 <= self.n < 2**30:
            raise PtxgenError(f"argmax: n must be in 1 ... 2^30 - 1, not {self.n}")
        if self.rows < 1:
            raise PtxgenError(f"argmax: rows must be at least 1, not {self.rows}")

    @property
    def params(self) -> tuple[Param, ...]:
        return (
            Param("logits", "f32", ("rows", "n"), Access.IN),
            Param("index", "u32", ("rows",), Access.OUT),
        )

    @property
    def vector(self) -> int:
        """Logits of one access: four where that keeps every row 16-byte aligned."""
        return 4 if self.rows == 1 or self.n % 4 == 0 else 1

    @property
    def launch_shape(self) -> LaunchShape:
        warps = min(32, ceil_div(self.n, 4 * 32))
        return LaunchShape(grid=(self.rows, 1, 1), block=(32 * warps, 1, 1))

    def reference(self, **inputs: Any) -> dict[str, Array]:
        logits = inputs["logits"]
        best = np.argmax(np.where(np.isnan(logits), -np.inf, logits), axis=1)
        return {"index": best.astype(np.uint32)}

    @classmethod
    def examples(cls) -> Sequence[Argmax]:
        return (
            cls(n=1),
            cls(n=33),
            cls(n=130),
            cls(n=1003),
            cls(n=20_001),  # full rounds, left vectors and last elements
            cls(n=151_936),
            cls(n=4100, rows=3),
            cls(n=4099, rows=3),  # rows that are not aligned: one logit at a time
        )

    def flops(self) -> int:
        return self.rows * self.n

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Logits on a coarse grid, so that the largest is there more than once, and some NaN."""
        shape = (self.rows, self.n)
        logits = np.round(4 * rng.standard_normal(shape)).astype(np.float32)
        logits[rng.random(shape) < 0.01] = np.nan
        logits[rng.random(shape) < 0.01] = -np.inf
        return {"logits": logits}
