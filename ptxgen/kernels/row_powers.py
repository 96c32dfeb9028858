"""Row powers of a repacked matrix: see `Layout.row_powers`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param
from urdir.ptxgen.weights.fields import Plane
from urdir.ptxgen.weights.formats import FORMATS, Format
from urdir.ptxgen.weights.layout import TILE_ROWS, TILE_UNITS, Layout, random_weights


@dataclass(frozen=True)
class RowPowers(KernelSpec):
    """The power of two of every row of a repacked matrix (rows, cols), from its tiles.

    Raises PtxgenError for a type without row powers.
    """

    format: Format
    rows: int
    cols: int

    name = "row_powers"

    #: Threads per row.
    row_threads = 8

    def __post_init__(self) -> None:
        if not self.format.has_powers:
            raise PtxgenError(f"row_powers: {self.format.name} has none")
        _ = self.layout

    @cached_property
    def layout(self) -> Layout:
        """The layout of the matrix."""
        return Layout(self.format, self.rows, self.cols)

    @property
    def plane(self) -> Plane:
        """The plane that bounds the weights: factors or exponents, or the weights themselves."""
        return self.format.factors

    @property
    def row_items(self) -> int:
        """Items per row of a tile, a power of two."""
        return TILE_UNITS // self.plane.units

    @property
    def step_tiles(self) -> int:
        """Tiles of which the threads of a row take one item each."""
        return self.row_threads // self.row_items

    @property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """For an item of a quantised type: (number, factor)."""
        numbers = self.format.largest_numbers
        if self.format.has_group_factors and not self.format.has("factor"):
            return tuple((g, numbers[0][1]) for g in range(self.format.unit_groups))
        return tuple((i, largest) for i, (_, largest) in enumerate(numbers))

    @property
    def params(self) -> tuple[Param, ...]:
        return (Param("weights", "u8", (self.layout.nbytes,), Access.INOUT),)

    @property
    def launch_shape(self) -> LaunchShape:
        block = (self.row_threads * TILE_ROWS, 1, 1)
        return LaunchShape(grid=(self.layout.bands, 1, 1), block=block)

    def bytes_moved(self) -> int:
        tiles = self.layout.bands * self.layout.row_tiles
        read = tiles * TILE_ROWS * self.row_items * self.plane.nbytes
        return read + self.layout.powers_nbytes

    def reference(self, **inputs: Any) -> dict[str, Array]:
        weights = inputs["weights"].copy()
        self.layout.powers_of(weights)[:] = self.layout.row_powers(weights)
        return {"weights": weights}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        weights = random_weights(self.layout, rng)
        self.layout.powers_of(weights)[:] = 0
        return {"weights": weights}

    @classmethod
    def examples(cls) -> dict[str, RowPowers]:
        types = [f for f in FORMATS.values() if f.has_powers]
        return {
            **{f.name: cls(f, 19, 37 if f.is_float else 3 * f.block) for f in types},
            "several steps": cls(FORMATS["Q4_K"], 33, 256 * 19),
            "several tiles": cls(FORMATS["Q5_1"], 16, 800),
            "BF16 tiles": cls(FORMATS["BF16"], 7, 523),
        }
