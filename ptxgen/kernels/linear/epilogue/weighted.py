"""Weights of experts."""

from __future__ import annotations

from dataclasses import dataclass

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.steps import Epilogue, Product, Reference
from urdir.ptxgen.spec import Access, Array, Param


@dataclass(frozen=True, slots=True)
class Weighted(Epilogue):
    """y of each pair of a row and an expert is multiplied with the pair's ``weight``, f32."""

    stem = "weighted"

    @property
    def text(self) -> str:
        return "* weight f32 of the pair"

    def check(self, product: Product) -> None:
        if not product.pair_shape:
            raise PtxgenError(f"{product.name}: only products of experts have weights")

    def params(self, product: Product) -> tuple[Param, ...]:
        return (Param("weight", "f32", product.pair_shape, Access.IN),)

    def apply(self, y: Array, of: Reference) -> Array:
        weighted: Array = y * of.inputs["weight"].reshape(-1)[of.pairs, None]
        return weighted
