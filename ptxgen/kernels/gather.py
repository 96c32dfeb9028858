"""Gather rows of an array: those of a prompt's chunk whose results are needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.kernels.row_threads import VectorThreads
from urdir.ptxgen.limits import GRID_ROWS, POSITIVE, POSITIVE_31_BITS, limited
from urdir.ptxgen.spec import Access, Array, KernelSpec, Param


@dataclass(frozen=True)
class Gather(VectorThreads, KernelSpec):
    """y[r] = x[index[r]], x (height, cols) and y (rows, cols) f32, index (rows,) u32.

    An index of ``height`` or more reads nothing and gives zeros. y may be x if ``rows`` is 1.
    """

    cols: int
    height: int
    rows: int = 1

    name = "gather"
    limits = limited(cols=POSITIVE, height=POSITIVE_31_BITS, rows=GRID_ROWS)
    launch_fields = frozenset({"rows"})
    params = (
        Param("x", "f32", ("height", "cols"), Access.IN),
        Param("index", "u32", ("rows",), Access.IN),
        Param("y", "f32", ("rows", "cols"), Access.OUT),
    )

    def reference(self, **inputs: Any) -> dict[str, Array]:
        x, index = inputs["x"], inputs["index"]
        y = np.zeros((self.rows, self.cols), np.float32)
        inside = index < self.height
        y[inside] = x[index[inside]]
        return {"y": y}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Any rows, the last of several beyond the array."""
        index = rng.integers(0, self.height, self.rows).astype(np.uint32)
        if self.rows > 1:
            index[-1] = 0xFFFFFFFF
        x = rng.standard_normal((self.height, self.cols)).astype(np.float32)
        return {"x": x, "index": index}

    @classmethod
    def examples(cls) -> dict[str, Gather]:
        return {
            "the last row": cls(cols=516, height=9),
            "odd columns": cls(cols=37, height=5, rows=3),
            "rows of one value": cls(cols=1, height=3, rows=2),
            "some rows": cls(cols=132, height=70, rows=7),
        }

    def bytes_moved(self) -> int:
        """Bytes of the gathered rows."""
        return self.rows * (4 + 8 * self.cols)
