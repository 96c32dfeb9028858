"""The index of the largest logit: greedy sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, ceil_div


@dataclass(frozen=True)
class Argmax(KernelSpec):
    """The index of the largest of ``n`` logits, the lowest one among equals.

    NaN counts as -inf; where all are -inf the index is 0.
    """

    n: int

    name = "argmax"
    template = ("urdir.templates", "argmax.ptx.j2")

    #: Vectors of four that a thread loads before it looks at them.
    unroll = 4

    def __post_init__(self) -> None:
        if not 1 <= self.n < 2**30:
            raise PtxgenError(f"argmax: n must be in 1 ... 2^30 - 1, not {self.n}")

    @property
    def params(self) -> tuple[Param, ...]:
        return (
            Param("logits", "f32", ("n",), Access.IN),
            Param("index", "u32", (1,), Access.OUT),
        )

    @property
    def launch_shape(self) -> LaunchShape:
        warps = min(32, ceil_div(self.n, 4 * 32))
        return LaunchShape(grid=(1, 1, 1), block=(32 * warps, 1, 1))

    def reference(self, **inputs: Any) -> dict[str, Array]:
        logits = inputs["logits"]
        best = np.argmax(np.where(np.isnan(logits), -np.inf, logits))
        return {"index": np.array([best], np.uint32)}

    @classmethod
    def examples(cls) -> Sequence[Argmax]:
        return (
            cls(n=1),
            cls(n=33),
            cls(n=130),
            cls(n=1003),
            cls(n=20_001),  # full rounds, left vectors and last elements
            cls(n=151_936),
        )

    def flops(self) -> int:
        return self.n

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Logits on a coarse grid, so that the largest is there more than once, and some NaN."""
        logits = np.round(4 * rng.standard_normal(self.n)).astype(np.float32)
        logits[rng.random(self.n) < 0.01] = np.nan
        logits[rng.random(self.n) < 0.01] = -np.inf
        return {"logits": logits}
