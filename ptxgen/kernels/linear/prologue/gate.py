"""A gate of the vector of a product, and a norm of each head before it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.linear.steps import Product, Prologue, Reference
from urdir.ptxgen.spec import Access, Array, Param

#: Neighbouring values that a lane has of a block, and values of a block, which a warp has.
LANE_VALUES, BLOCK_VALUES = 8, 256


@dataclass(frozen=True, slots=True)
class Gate(Prologue):
    """x' = norm(x) * f(gate), norm(v) = v / sqrt(mean(v^2) + eps) * head_norm of each head of
    ``head`` neighbouring values, which have the same weights; x * f(gate) where ``head`` is 0."""

    activation: Activation
    head: int = 0
    eps: float = 0.0

    stem = "gate"

    def __post_init__(self) -> None:
        if not self.serves(self.head):
            raise PtxgenError(
                f"a gate before a product: heads of {self.head} values: powers of two from "
                f"{LANE_VALUES} to {BLOCK_VALUES}"
            )

    @staticmethod
    def serves(head: int) -> bool:
        """Whether neighbouring lanes of a warp can hold heads of ``head`` values."""
        return not head or (LANE_VALUES <= head <= BLOCK_VALUES and not head & (head - 1))

    @property
    def lanes(self) -> int:
        """Neighbouring lanes that have a head."""
        return self.head // LANE_VALUES

    @property
    def vectors(self) -> int:
        return 1

    @property
    def held_vectors(self) -> int:
        return 1

    @property
    def text(self) -> str:
        """What x is, for a template's contract."""
        norm = f"norm of heads of {self.head} values, head_norm: ({self.head}) f32; "
        return f"{norm if self.head else ''}x * {self.activation.kind}(x_gate), x_gate: (cols) f32"

    def check(self, product: Product) -> None:
        if product.cols % max(1, self.head):
            raise PtxgenError(
                f"{product.name}: a gate of {product.cols} columns in heads of {self.head}"
            )

    def params(self, product: Product) -> tuple[Param, ...]:
        weights = (Param("head_norm", "f32", (self.head,), Access.IN),) if self.head else ()
        return (Param("x_gate", "f32", ("batch", "cols"), Access.IN), *weights)

    def apply(self, x: Array, of: Reference) -> Array:
        y: Array = x.astype(np.float64)
        if self.head:
            heads = y.reshape(-1, self.head)
            lengths = np.sqrt(np.mean(heads * heads, axis=1, keepdims=True) + self.eps)
            y = (heads / lengths * of.inputs["head_norm"]).reshape(y.shape)
        return y * self.activation(of.inputs["x_gate"])
