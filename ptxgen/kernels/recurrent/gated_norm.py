"""Gated RMSNorm: the end of a recurrent mixer, in one launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.held_rows import HeldRows
from urdir.ptxgen.spec import Access, Array, Param, Tolerance

SILU = Activation("silu")


@dataclass(frozen=True)
class GatedNorm(HeldRows):
    """y = norm(x) * f(gate), or with ``gates_first`` norm(x * f(gate)), of each row.

    norm(v) = v / sqrt(mean(v^2) + eps) * weight; row r has the weights r % weight_rows. y may be x.
    """

    rows: int
    cols: int
    eps: float
    weight_rows: int = 1
    gates_first: bool = False
    activation: Activation = SILU

    name = "gated_norm"
    template = ("urdir.templates", "recurrent/gated_norm.ptx.j2")
    tolerance = Tolerance(rtol=3e-6)

    def __post_init__(self) -> None:
        if self.rows < 1 or self.weight_rows < 1:
            raise PtxgenError(f"gated_norm: {self.rows} rows, {self.weight_rows} of weights")
        super().__post_init__()

    @property
    def params(self) -> tuple[Param, ...]:
        matrix = ("rows", "cols")
        return (
            Param("x", "f32", matrix, Access.IN),
            Param("gate", "f32", matrix, Access.IN),
            Param("weight", "f32", ("weight_rows", "cols"), Access.IN),
            Param("y", "f32", matrix, Access.OUT),
        )

    def reference(self, **inputs: Any) -> dict[str, Array]:
        x, gate = inputs["x"].astype(np.float64), self.activation(inputs["gate"])
        x = x * gate if self.gates_first else x
        y = x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + self.eps)
        y = y * inputs["weight"][np.arange(self.rows) % self.weight_rows]
        return {"y": (y if self.gates_first else y * gate).astype(np.float32)}

    @classmethod
    def examples(cls) -> Mapping[str, GatedNorm]:
        return {
            "a short row": cls(1, 8, 1e-6),
            "heads": cls(12, 128, 1e-6),
            "odd columns": cls(3, 36, 1e-5, weight_rows=3),
            "groups": cls(6, 132, 1e-5, weight_rows=2, gates_first=True),
            "sigmoid": cls(5, 64, 1e-5, activation=Activation("sigmoid")),
            "a long row": cls(2, 8192, 1e-5, gates_first=True),
            "a long row, gated after": cls(2, 5124, 1e-5),
        }

    def flops(self) -> int:
        return 9 * self.rows * self.cols
