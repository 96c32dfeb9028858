"""Gated RMSNorm: the end of a recurrent mixer, in one launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.held_rows import HeldRows
from urdir.ptxgen.limits import POSITIVE, limited
from urdir.ptxgen.spec import Access, Array, Param, Tolerance
from urdir.ptxgen.weights.layout import TILE_COLS
from urdir.ptxgen.weights.packed import GROUP, pack, packed_shape

SILU = Activation("silu")


@dataclass(frozen=True)
class GatedNorm(HeldRows):
    """y = norm(x) * f(gate), or with ``gates_first`` norm(x * f(gate)), of each row.

    norm(v) = v / sqrt(mean(v^2) + eps) * weight; row r has the weights r % weight_rows. y may be x.

    ``heads``: as many rows are a vector, and the vectors, a multiple of eight, are left packed
    (`weights.packed`) in y, f16. Raises PtxgenError unless their columns are a multiple of 256.
    """

    rows: int
    cols: int
    eps: float
    weight_rows: int = 1
    gates_first: bool = False
    activation: Activation = SILU
    heads: int = 0

    name = "gated_norm"
    limits = limited(rows=POSITIVE, weight_rows=POSITIVE)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads and not self.can_pack(self.rows, self.cols, self.heads):
            raise PtxgenError(f"gated_norm: {self.rows} rows of {self.cols} by {self.heads} packed")

    @staticmethod
    def can_pack(rows: int, cols: int, heads: int) -> bool:
        """Whether vectors of as many rows can be left packed."""
        return rows % (GROUP * heads) == 0 and heads * cols % TILE_COLS == 0

    @property
    def y_shape(self) -> tuple[int, ...]:
        """The shape of y."""
        if not self.heads:
            return self.rows, self.cols
        return packed_shape(self.rows // self.heads, self.heads * self.cols)

    @property
    def tolerance(self) -> Tolerance:
        """f16 has 11 bits."""
        return Tolerance(rtol=6e-4 if self.heads else 3e-6)

    @property
    def params(self) -> tuple[Param, ...]:
        matrix = ("rows", "cols")
        return (
            Param("x", "f32", matrix, Access.IN),
            Param("gate", "f32", matrix, Access.IN),
            Param("weight", "f32", ("weight_rows", "cols"), Access.IN),
            Param("y", "f16" if self.heads else "f32", self.y_shape, Access.OUT),
        )

    def reference(self, **inputs: Any) -> dict[str, Array]:
        x, gate = inputs["x"].astype(np.float64), self.activation(inputs["gate"])
        x = x * gate if self.gates_first else x
        y = x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + self.eps)
        y = y * inputs["weight"][np.arange(self.rows) % self.weight_rows]
        y = y if self.gates_first else y * gate
        if self.heads:
            return {"y": pack(y.reshape(-1, self.heads * self.cols))}
        return {"y": y.astype(np.float32)}

    @classmethod
    def examples(cls) -> dict[str, GatedNorm]:
        return {
            "a short row": cls(1, 8, 1e-6),
            "heads": cls(12, 128, 1e-6),
            "odd columns": cls(3, 36, 1e-5, weight_rows=3),
            "groups": cls(6, 132, 1e-5, weight_rows=2, gates_first=True),
            "sigmoid": cls(5, 64, 1e-5, activation=Activation("sigmoid")),
            "a long row": cls(2, 8192, 1e-5, gates_first=True),
            "a long row, gated after": cls(2, 5124, 1e-5),
            "packed heads": cls(48, 128, 1e-6, heads=6),
            "packed groups": cls(32, 320, 1e-5, weight_rows=4, gates_first=True, heads=4),
            "packed long rows": cls(16, 4352, 1e-5, gates_first=True, heads=1),
        }

    def flops(self) -> int:
        return 9 * self.rows * self.cols
