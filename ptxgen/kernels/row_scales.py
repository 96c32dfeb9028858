"""Scales of the rows of a repacked matrix whose weights become bytes: see `weights.eights`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, Tolerance
from urdir.ptxgen.target import since
from urdir.ptxgen.weights import eights
from urdir.ptxgen.weights.formats import FORMATS, Format
from urdir.ptxgen.weights.layout import TILE_ROWS, TILE_UNITS, Layout, random_weights


@dataclass(frozen=True)
class RowScales(KernelSpec):
    """What a byte of each row of a repacked matrix (rows, cols) stands for, and what kernels
    multiply the row's factors with (`eights.row_scales`). The matrix must have its row powers.

    Raises PtxgenError for an unquantised type.
    """

    format: Format
    rows: int
    cols: int

    name = "row_scales"
    targets = since(80)
    #: Weights may be rounded twice.
    tolerance = Tolerance(rtol=4e-7)

    def __post_init__(self) -> None:
        if not eights.can_be_bytes(self.format):
            raise PtxgenError(f"row_scales: not of {self.format.name} weights")
        _ = self.layout

    @cached_property
    def layout(self) -> Layout:
        """The layout of the matrix."""
        return Layout(self.format, self.rows, self.cols)

    @property
    def padded_rows(self) -> int:
        """Rows of all bands."""
        return self.layout.bands * TILE_ROWS

    @property
    def least(self) -> float:
        """Times 1 / power: the least scale of a row."""
        return eights.least_scale(self.format)

    @property
    def power(self) -> float:
        """What a row's factors are multiplied with, times its scale."""
        return eights.row_power(self.format)

    @property
    def params(self) -> tuple[Param, ...]:
        return (
            Param("weights", "u8", (self.layout.nbytes,), Access.IN),
            Param("scales", "f32", (2, "padded_rows"), Access.OUT),
        )

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(grid=(self.layout.bands, 1, 1), block=(TILE_ROWS * TILE_UNITS, 1, 1))

    def reference(self, **inputs: Any) -> dict[str, Array]:
        return {"scales": eights.row_scales(self.layout, inputs["weights"])}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        return {"weights": random_weights(self.layout, rng)}

    @classmethod
    def examples(cls) -> dict[str, RowScales]:
        types = [f for f in FORMATS.values() if eights.can_be_bytes(f)]
        return {
            **{f.name: cls(f, 19, 3 * f.block) for f in types},
            "several tiles": cls(FORMATS["Q4_K"], 33, 256 * 5),
            "a part of a tile": cls(FORMATS["Q8_0"], 16, 800),
        }

    def flops(self) -> int:
        return 2 * self.rows * self.cols
