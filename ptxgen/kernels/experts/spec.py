"""What products with the matrices of experts have in common."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.experts.ends import Ends
from urdir.ptxgen.kernels.pairs import random_choice
from urdir.ptxgen.spec import Access, Array
from urdir.ptxgen.weights.formats import Format, random_blocks
from urdir.ptxgen.weights.layout import TILE_ROWS, Layout

#: Experts of a row, at most: a lane of a warp has the number of one.
MAX_USED = 32


@dataclass(frozen=True)
class ExpertsProduct(Ends):
    """Products of ``batch`` rows with ``used`` of ``experts`` matrices (rows, cols) each.

    Raises PtxgenError where the rows of an expert are no whole bands of tiles.
    """

    format: Format
    experts: int
    used: int
    rows: int
    cols: int
    batch: int

    @cached_property
    def layout(self) -> Layout:
        """How the matrices of all experts lie in memory: as one."""
        if self.experts < 1 or self.rows < 1 or self.rows % TILE_ROWS:
            raise PtxgenError(
                f"{self.name}: {self.experts} experts of {self.rows} rows: at least one, of a "
                f"multiple of {TILE_ROWS} rows"
            )
        return Layout(self.format, self.experts * self.rows, self.cols)

    def _check_activation(self) -> None:
        """Refuse a gate without an activation, and an activation that needs a gate."""
        f = self.activation
        if self.gated and f is None:
            raise PtxgenError(f"{self.name}: gated without an activation")
        if f is not None and not self.gated and (f.limit or f.kind == "swiglu_oai"):
            raise PtxgenError(f"{self.name}: {f.kind} without a gate has no limit")

    @property
    def bands(self) -> int:
        """Bands of tiles of an expert."""
        return self.rows // TILE_ROWS

    @property
    def pairs(self) -> int:
        """Pairs of rows and slots."""
        return self.batch * self.used

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Small weights, so that sums come to where activations are curved; some experts are chosen
        by most rows, some by none."""
        inputs: dict[str, Any] = {}
        for p in self.params:
            if p.access is Access.OUT:
                continue
            if p.dtype == "u8":
                inputs[p.name] = self._random_matrices(rng, scale=0.5 / self.cols**0.5)
            elif p.name == "expert":
                inputs[p.name] = random_choice(rng, self.batch, self.experts, self.used)
            else:
                inputs[p.name] = rng.standard_normal(self.shape_of(p)).astype(np.float32)
        return inputs

    def _random_matrices(self, rng: np.random.Generator, **scale: float) -> Array:
        """A repacked matrix of every expert."""
        count = self.layout.rows * self.cols // self.format.block
        return self.layout.pack(random_blocks(self.format, count, rng, **scale))

    def flops(self) -> int:
        return 2 * self.pairs * self.rows * self.cols * self.pair
