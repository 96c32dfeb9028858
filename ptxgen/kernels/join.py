"""Concatenate two arrays row by row, such as parts of heads from separate products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, ceil_div

THREADS = 128


@dataclass(frozen=True)
class Join(KernelSpec):
    """y[r] = (a[r / group], b[r]), a (rows / group, first) and b (rows, second) f32, both widths
    multiples of 4: ``group`` adjacent rows have the same first part.
    """

    rows: int
    first: int
    second: int
    group: int = 1

    name = "join"
    params = (
        Param("a", "f32", ("groups", "first"), Access.IN),
        Param("b", "f32", ("rows", "second"), Access.IN),
        Param("y", "f32", ("rows", "width"), Access.OUT),
    )

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise PtxgenError(f"join: {self.rows} rows")
        if self.group < 1 or self.rows % self.group:
            raise PtxgenError(f"join: {self.rows} rows in groups of {self.group}")
        if min(self.first, self.second) < 4 or self.first % 4 or self.second % 4:
            raise PtxgenError(f"join: rows of {self.first} and {self.second}: multiples of 4")
        if self.rows * self.vectors >= 2**31:
            raise PtxgenError(f"join: {self.rows} rows of {self.width} are too many")

    @property
    def groups(self) -> int:
        """Rows of a."""
        return self.rows // self.group

    @property
    def width(self) -> int:
        """Values of a row of y."""
        return self.first + self.second

    @property
    def vectors(self) -> int:
        """Accesses of four values per row of y, one per thread."""
        return self.width // 4

    @property
    def launch_shape(self) -> LaunchShape:
        ctas = ceil_div(self.rows * self.vectors, THREADS)
        return LaunchShape(grid=(ctas, 1, 1), block=(THREADS, 1, 1))

    def reference(self, **inputs: Any) -> dict[str, Array]:
        firsts = np.repeat(inputs["a"], self.group, axis=0)
        return {"y": np.concatenate([firsts, inputs["b"]], axis=1)}

    @classmethod
    def examples(cls) -> dict[str, Join]:
        return {
            "one row": cls(1, 4, 8),
            "queries": cls(34, 64, 512),
            "odd vectors": cls(21, 12, 20),
            "exactly CTAs": cls(32, 8, 8),
            "keys of heads": cls(21, 16, 12, group=3),
        }
