"""The residual that a product is added to."""

from __future__ import annotations

from dataclasses import dataclass

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.steps import Epilogue, Product, Reference
from urdir.ptxgen.spec import Access, Array, Param


@dataclass(frozen=True, slots=True)
class Residual(Epilogue):
    """y = ``residual`` (batch, rows) f32 + ``scale`` * y, rounded once."""

    scale: float = 1.0

    stem = "residual"
    leads = True

    @property
    def text(self) -> str:
        return f"* {self.scale}" if self.scale != 1 else ""

    def check(self, product: Product) -> None:
        if product.steps.gated or product.others:
            raise PtxgenError(f"{product.name}: residual is for one matrix that is not gated")

    def params(self, product: Product) -> tuple[Param, ...]:
        return (Param("residual", "f32", ("batch", "rows"), Access.IN),)

    def apply(self, y: Array, of: Reference) -> Array:
        added: Array = self.scale * y + of.inputs["residual"]
        return added
