"""Convolutions within blocks of drafts, with weights that depend on the row (DFlash2)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.limits import GRID_ROWS, POSITIVE, limited, up_to
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, Tolerance, ceil_div

CTA_THREADS = 128


@dataclass(frozen=True)
class BlockConv(KernelSpec):
    """y[r, c] = the sum over taps t of (base[side, t, c] + dynamic[r, side, t, c / group]) *
    x[r - t * stride, c], x and y (rows, width) f32.

    The rows of a block are ``stride`` rows apart: a tap that reaches back beyond row 0 adds
    nothing. ``base`` (2, taps, width) f32 has the weights of both sides, ``dynamic`` (rows, 2,
    taps, groups) f32 what the row adds to those of each group of ``group`` columns.
    """

    width: int
    taps: int
    group: int
    side: int = 0
    rows: int = 1
    stride: int = 1

    name = "block_conv"
    limits = limited(
        width=POSITIVE, group=POSITIVE, taps=up_to(16), side=(0, 1), rows=GRID_ROWS, stride=POSITIVE
    )
    params = (
        Param("x", "f32", ("rows", "width"), Access.IN),
        Param("base", "f32", ("base_size",), Access.IN),
        Param("dynamic", "f32", ("rows", "dynamic_size"), Access.IN),
        Param("y", "f32", ("rows", "width"), Access.OUT),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % self.group:
            raise PtxgenError(f"block_conv: {self.width} columns in groups of {self.group}")

    @property
    def groups(self) -> int:
        """Groups of columns."""
        return self.width // self.group

    @property
    def base_size(self) -> int:
        """Weights of both sides that all rows have."""
        return 2 * self.taps * self.width

    @property
    def dynamic_size(self) -> int:
        """What a row adds to weights."""
        return 2 * self.taps * self.groups

    @property
    def launch_shape(self) -> LaunchShape:
        grid = (ceil_div(self.width, CTA_THREADS), self.rows, 1)
        return LaunchShape(grid=grid, block=(CTA_THREADS, 1, 1))

    @property
    def tolerance(self) -> Tolerance:
        """A sum of a product for each tap, of sums of two."""
        return Tolerance.of_sum("f32", 2 * self.taps)

    def reference(self, **inputs: Array) -> dict[str, Array]:
        return {"y": self.convolved(**inputs).astype(np.float32)}

    def convolved(self, x: Array, base: Array, dynamic: Array) -> Array:
        """y, f64."""
        x = x.astype(np.float64)
        fixed = base.astype(np.float64).reshape(2, self.taps, self.width)[self.side]
        added = dynamic.astype(np.float64).reshape(self.rows, 2, self.taps, self.groups)
        weights = fixed + np.repeat(added[:, self.side], self.group, axis=2)
        y = np.zeros_like(x)
        for tap in range(self.taps):
            back = min(tap * self.stride, self.rows)
            y[back:] += weights[back:, tap] * x[: self.rows - back]
        return y

    @classmethod
    def examples(cls) -> dict[str, BlockConv]:
        return {
            "a block": cls(128, 3, 32, rows=5),
            "after a network": cls(384, 2, 16, side=1, rows=8),
            "blocks side by side": cls(130, 4, 10, rows=12, stride=3),
            "fewer rows than taps reach": cls(64, 4, 64, side=1, rows=2),
        }

    def flops(self) -> int:
        return 3 * self.rows * self.taps * self.width
