"""Columns of rows in another order: those of activations for weights whose columns were sorted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.limits import GRID_ROWS, limited
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, ceil_div

CTA_THREADS = 128


@dataclass(frozen=True)
class Reorder(KernelSpec):
    """y[r, c] = x[r, order[c]], x and y (rows, cols) f32, order (cols,) f32: column numbers.

    A number of ``cols`` or more reads nothing and gives a zero.
    """

    cols: int
    rows: int = 1

    name = "reorder"
    #: f32 counts columns.
    limits = limited(cols=range(1, 1 << 24), rows=GRID_ROWS)
    params = (
        Param("x", "f32", ("rows", "cols"), Access.IN),
        Param("order", "f32", ("cols",), Access.IN),
        Param("y", "f32", ("rows", "cols"), Access.OUT),
    )

    @property
    def launch_shape(self) -> LaunchShape:
        grid = (ceil_div(self.cols, CTA_THREADS), self.rows, 1)
        return LaunchShape(grid=grid, block=(CTA_THREADS, 1, 1))

    def reference(self, **inputs: Any) -> dict[str, Array]:
        order = inputs["order"].astype(np.int64)
        inside = order < self.cols
        return {"y": np.where(inside, inputs["x"][:, np.where(inside, order, 0)], np.float32(0))}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Any order, of several columns the last number beyond them."""
        order = rng.permutation(self.cols).astype(np.float32)
        if self.cols > 1:
            order[-1] = self.cols
        x = rng.standard_normal((self.rows, self.cols)).astype(np.float32)
        return {"x": x, "order": order}

    @classmethod
    def examples(cls) -> dict[str, Reorder]:
        return {"one": cls(1), "a row": cls(516), "rows": cls(257, 3)}
