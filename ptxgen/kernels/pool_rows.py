"""Mean of the rows of each text: pooled embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.limits import GRID_ROWS, POSITIVE, POSITIVE_31_BITS, limited
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, Tolerance, ceil_div


@dataclass(frozen=True)
class PoolRows(KernelSpec):
    """y[t] = the mean of rows ``segment[t, 0]`` ... ``segment[t, 1]`` - 1 of x.

    x is (height, cols), y (rows, cols) f32, segment (rows, 2) u32. Sums are f32, in the order of
    the rows. A text without rows, or with rows beyond ``height``, gives zeros.
    """

    cols: int
    height: int
    rows: int = 1

    name = "pool_rows"
    limits = limited(cols=POSITIVE, height=POSITIVE_31_BITS, rows=GRID_ROWS)
    params = (
        Param("x", "f32", ("height", "cols"), Access.IN),
        Param("segment", "u32", ("rows", 2), Access.IN),
        Param("y", "f32", ("rows", "cols"), Access.OUT),
    )
    tolerance = Tolerance(rtol=2.0**-22)
    #: Rows that a thread loads before it adds them.
    ahead = 8

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(grid=(ceil_div(self.cols, 128), self.rows, 1), block=(128, 1, 1))

    def reference(self, **inputs: Any) -> dict[str, Array]:
        y = np.zeros((self.rows, self.cols), np.float32)
        for text, (first, end) in enumerate(inputs["segment"].tolist()):
            if first < end <= self.height:
                y[text] = inputs["x"][first:end].astype(np.float64).mean(axis=0)
        return {"y": y}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Texts anywhere, the last two of several empty and too long."""
        segment = np.sort(rng.integers(0, self.height + 1, (self.rows, 2)), axis=1)
        segment = segment.astype(np.uint32)
        if self.rows > 2:
            segment[-2:] = ((3, 3), (0, self.height + 1))
        x = rng.uniform(0.5, 2, (self.height, self.cols)).astype(np.float32)
        return {"x": x, "segment": segment}

    @classmethod
    def examples(cls) -> dict[str, PoolRows]:
        return {
            "one text": cls(cols=256, height=33),
            "odd columns": cls(cols=37, height=50, rows=5),
            "short texts": cls(cols=130, height=6, rows=9),
        }

    def flops(self) -> int:
        return self.height * self.cols

    def bytes_moved(self) -> int:
        """Bytes of all rows and of the means."""
        return 4 * self.cols * (self.height + self.rows)
