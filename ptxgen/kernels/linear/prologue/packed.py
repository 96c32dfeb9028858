"""Vectors that come packed as f16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.kernels.linear.steps import Product, Prologue, Reference
from urdir.ptxgen.spec import Access, Array, Param
from urdir.ptxgen.weights.halves import Halves
from urdir.ptxgen.weights.packed_few import few_shape, pack_few, unpack_few


@dataclass(frozen=True, slots=True)
class PackedInput(Prologue):
    """x is packed f16 (`weights.packed_few`), in the order of the first matrix' type."""

    stem = "packed_input"

    def stored(self, param: Param, product: Product) -> Param:
        if param.name != "x":
            return param
        return Param("x", "f16", few_shape(product.cols), Access.IN)

    def make_inputs(self, product: Product, rng: np.random.Generator) -> dict[str, Any]:
        return {"x": self.pack(rng.standard_normal((product.batch, product.cols)), product)}

    def pack(self, x: Array, product: Product) -> Array:
        """Vectors (batch, cols) as the product takes them."""
        return pack_few(x, Halves(product.format).order)

    def apply(self, x: Array, of: Reference) -> Array:
        return unpack_few(x, of.product.batch, of.product.cols, Halves(of.product.format).order)
