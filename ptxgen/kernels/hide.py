"""Columns of an array that get the lowest number: logits of tokens that are never chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, ceil_div

THREADS = 128


@dataclass(frozen=True)
class Hide(KernelSpec):
    """y[r, first + c] = the lowest f32 number for c < ``count``; y (rows, cols) f32 is changed in
    place."""

    cols: int
    first: int
    count: int
    rows: int = 1

    name = "hide"
    params = (Param("y", "f32", ("rows", "cols"), Access.INOUT),)

    def __post_init__(self) -> None:
        inside = self.first >= 0 and 1 <= self.count <= self.cols - self.first
        if not inside or not 1 <= self.rows <= 65535 or self.cols >= 2**30:
            raise PtxgenError(
                f"hide: {self.count} columns from {self.first} on of {self.rows} rows of "
                f"{self.cols}: columns of the array, and 1 to 65535 rows"
            )

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(
            grid=(ceil_div(self.count, THREADS), self.rows, 1), block=(THREADS, 1, 1)
        )

    def reference(self, **inputs: Any) -> dict[str, Array]:
        y = inputs["y"].copy()
        y[:, self.first : self.first + self.count] = np.finfo(np.float32).min
        return {"y": y}

    @classmethod
    def examples(cls) -> dict[str, Hide]:
        return {
            "some of a row": cls(cols=517, first=4, count=300),
            "the last of rows": cls(cols=37, first=36, count=1, rows=3),
            "all": cls(cols=5, first=0, count=5, rows=2),
        }

    def bytes_moved(self) -> int:
        """Bytes that are written."""
        return 4 * self.rows * self.count
