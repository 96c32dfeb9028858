"""Biases of a product's rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.steps import Epilogue, Part, Product, Reference
from urdir.ptxgen.spec import Access, Array, Param


@dataclass(frozen=True, slots=True)
class Bias(Epilogue):
    """``bias`` (rows,) f32 is added, to the other product of a gated pair ``up_bias``; of experts
    they are (experts, rows). ``of``: which of several matrices have one; empty: all."""

    of: tuple[bool, ...] = ()

    stem = "bias"

    @staticmethod
    def where(given: Sequence[bool]) -> tuple[Bias, ...]:
        """The step for matrices of which these have a bias; none if no matrix has one."""
        if all(given):
            return (Bias(),)
        return (Bias(tuple(given)),) if any(given) else ()

    def check(self, product: Product) -> None:
        if self.of and len(self.of) != 1 + len(product.others):
            raise PtxgenError(
                f"{product.name}: bias is {self.of} of {1 + len(product.others)} matrices"
            )

    def of_part(self, product: Product, part: Part) -> bool:
        return not self.of or self.of[part.number]

    def part_params(self, product: Product, part: Part) -> tuple[Param, ...]:
        return tuple(
            Param(name, "f32", product.bias_shape(part), Access.IN)
            for name in self.names(product, part)
        )

    def names(self, product: Product, part: Part) -> tuple[str, ...]:
        """The parameters of one of the matrices."""
        return (f"bias{part.suffix}", "up_bias")[: product.steps.pair]

    def apply(self, y: Array, of: Reference) -> Array:
        each = slice(None) if of.experts is None else of.experts
        biases = [np.atleast_2d(of.inputs[name][each]) for name in self.names(of.product, of.part)]
        added: Array = y + (np.stack(biases) if of.product.steps.gated else biases[0])
        return added
