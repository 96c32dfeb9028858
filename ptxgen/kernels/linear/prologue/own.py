"""A vector for each matrix of a launch."""

from __future__ import annotations

from dataclasses import dataclass

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.steps import Product, Prologue, Reference
from urdir.ptxgen.spec import Access, Array, Param


@dataclass(frozen=True, slots=True)
class OwnVectors(Prologue):
    """Matrix n multiplies vector<n>, the first one x (RWKV)."""

    stem = "own"
    leads = True

    @property
    def text(self) -> str:
        """What x is, for a template's contract."""
        return "matrix n multiplies vector<n>: (cols) f32"

    def check(self, product: Product) -> None:
        if (
            not product.others
            or len(product.prologue) > 1
            or product.batch > 1
            or product.steps.gated
        ):
            raise PtxgenError(
                f"{product.name}: own vectors are for several matrices, one vector each, without "
                "other steps before"
            )

    def params(self, product: Product) -> tuple[Param, ...]:
        numbers = range(1, len(product.formats))
        return tuple(Param(f"vector{n}", "f32", ("batch", "cols"), Access.IN) for n in numbers)

    def apply(self, x: Array, of: Reference) -> Array:
        vector: Array = of.inputs[f"vector{of.part.number}"] if of.part.number else x
        return vector
