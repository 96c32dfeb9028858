"""Products that are left packed as f16, for a product of packed vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.steps import Epilogue, Product, Reference
from urdir.ptxgen.spec import Access, Array, Param
from urdir.ptxgen.weights.layout import TILE_COLS
from urdir.ptxgen.weights.packed import GROUP, pack, packed_shape
from urdir.ptxgen.weights.packed_few import Order, few_shape, pack_few, with_few


@dataclass(frozen=True, slots=True)
class PackedOutput(Epilogue):
    """y, or ``scaled`` of a `BeginNorm`, is packed in an ``order`` (`weights.packed_few`); vectors
    beyond the batch stay as they were."""

    order: Order

    stem = "packed_output"

    def check(self, product: Product) -> None:
        adds = product.steps.named("residual") and product.steps.named("begin_norm") is None
        if adds or product.others or product.rows % TILE_COLS:
            raise PtxgenError(
                f"{product.name}: packed_output is of multiples of {TILE_COLS} rows of one product"
                ", with a residual only after begin_norm"
            )

    def stored(self, param: Param, product: Product) -> Param:
        if param.name != packed_param(product):
            return param
        return Param(param.name, "f16", few_shape(product.rows), Access.INOUT)

    def of(self, product: Product) -> str:
        """The parameter that is packed, for templates."""
        return packed_param(product)

    def make_inputs(self, product: Product, rng: np.random.Generator) -> dict[str, Any]:
        before = rng.standard_normal((GROUP, product.rows))
        return {packed_param(product): pack_few(before, self.order)}

    def apply(self, y: Array, of: Reference) -> Array:
        name = packed_param(of.product)
        made = of.outputs["scaled"] if name == "scaled" else y.astype(np.float32)
        of.outputs[name] = with_few(of.inputs[name], made, self.order)
        return y


@dataclass(frozen=True, slots=True)
class PackedVectors(Epilogue):
    """y, or ``scaled`` of a `BeginNorm`, is packed for the next product of many vectors
    (`weights.packed`)."""

    stem = "packed_vectors"

    @property
    def text(self) -> str:
        return "y, or scaled, is f16 (ptxgen/weights/packed.py)"

    def check(self, product: Product) -> None:
        adds = product.steps.named("residual") and product.steps.named("begin_norm") is None
        if product.others or adds or product.steps.named("weighted") is not None:
            raise PtxgenError(
                f"{product.name}: packed_vectors are of one product, without weights, with a "
                "residual only after begin_norm"
            )

    def stored(self, param: Param, product: Product) -> Param:
        if param.name != packed_param(product):
            return param
        access = Access.INOUT if product.pair_shape else Access.OUT
        return Param(param.name, "f16", packed_shape(product.vectors, product.rows), access)

    def make_inputs(self, product: Product, rng: np.random.Generator) -> dict[str, Any]:
        name = packed_param(product)
        return {name: pack(rng.standard_normal((product.vectors, product.rows)))}

    def apply(self, y: Array, of: Reference) -> Array:
        name = packed_param(of.product)
        of.outputs[name] = pack(y if name == "y" else of.outputs[name])
        return y


def packed_param(product: Product) -> str:
    """The parameter that a product leaves packed."""
    return "y" if product.steps.named("begin_norm") is None else "scaled"
