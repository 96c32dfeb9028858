"""Products that are left packed as f16, for a product of packed vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.steps import Epilogue, Product, Reference
from urdir.ptxgen.spec import Access, Array, Param
from urdir.ptxgen.weights.layout import TILE_COLS
from urdir.ptxgen.weights.packed import GROUP
from urdir.ptxgen.weights.packed_few import Order, few_shape, pack_few, with_few


@dataclass(frozen=True, slots=True)
class PackedOutput(Epilogue):
    """y, or ``scaled`` of a `BeginNorm`, is packed in an ``order`` (`weights.packed_few`); vectors
    beyond the batch stay as they were."""

    order: Order

    stem = "packed_output"

    def check(self, product: Product) -> None:
        adds = product.residual and product.step("begin_norm") is None
        if adds or product.others or product.rows % TILE_COLS:
            raise PtxgenError(
                f"{product.name}: packed_output is of multiples of {TILE_COLS} rows of one product"
                ", with a residual only after begin_norm"
            )

    def stored(self, param: Param, product: Product) -> Param:
        if param.name != self.of(product):
            return param
        return Param(param.name, "f16", few_shape(product.rows), Access.INOUT)

    def of(self, product: Product) -> str:
        """The parameter that is packed."""
        return "y" if product.step("begin_norm") is None else "scaled"

    def make_inputs(self, product: Product, rng: np.random.Generator) -> dict[str, Any]:
        before = rng.standard_normal((GROUP, product.rows))
        return {self.of(product): pack_few(before, self.order)}

    def apply(self, y: Array, of: Reference) -> Array:
        name = self.of(of.product)
        made = of.outputs["scaled"] if name == "scaled" else y.astype(np.float32)
        of.outputs[name] = with_few(of.inputs[name], made, self.order)
        return y
