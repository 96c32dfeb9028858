"""The last matrices of the experts that a few rows chose, weighted and added to the residual."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.kernels.experts.tiled import ExpertsSpec
from urdir.ptxgen.spec import Access, Array, Param
from urdir.ptxgen.weights.formats import FORMATS


@dataclass(frozen=True)
class ExpertsDown(ExpertsSpec):
    """y[b] = sum over slots s of weight[b, s] * D x[b, s], D of the expert that row b has there.

    The experts' matrices stand side by side: one product with ``used`` times ``cols`` columns.
    ``weighted`` off: all weights are 1. ``bias``: D x + the expert's. ``residual`` is added to y.
    ``early``: the experts were chosen before the launch before this one, which waited for that. The
    first weights are then loaded while that launch runs.
    """

    weighted: bool = True
    bias: bool = False
    residual: bool = False
    early: bool = False

    name = "experts_down"
    template = ("urdir.templates", "experts/down.ptx.j2")

    @property
    def alone(self) -> bool:  # type: ignore[override]
        """Whether activations are loaded before weights."""
        return not self.early

    @property
    def grid_rows(self) -> int:
        return self.batch

    @property
    def blocks(self) -> int:
        return self.used * self.layout.row_tiles

    @property
    def params(self) -> tuple[Param, ...]:
        params = [
            self._matrix("weights"),
            Param("expert", "u32", ("batch", "used"), Access.IN),
        ]
        if self.weighted:
            params.append(Param("weight", "f32", ("batch", "used"), Access.IN))
        params.append(Param("x", "f32", ("batch", "used", "cols"), Access.IN))
        if self.bias:
            params.append(Param("bias", "f32", ("experts", "rows"), Access.IN))
        if self.residual:
            params.append(Param("residual", "f32", ("batch", "rows"), Access.IN))
        params.append(Param("y", "f32", ("batch", "rows"), Access.OUT))
        return tuple(params)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        chosen = inputs["expert"]
        weights = self.weights_of(inputs["weights"])[chosen]
        y = np.einsum("bsrc,bsc->bsr", weights, inputs["x"].astype(np.float64))
        if self.bias:
            y += inputs["bias"][chosen]
        if self.weighted:
            y *= inputs["weight"][:, :, None]
        total = y.sum(axis=1)
        if self.residual:
            total += inputs["residual"]
        return {"y": total.astype(np.float32)}

    @classmethod
    def examples(cls) -> Mapping[str, ExpertsDown]:
        q8, q4_k, q6_k = (FORMATS[name] for name in ("Q8_0", "Q4_K", "Q6_K"))
        f16, f32, q5_1 = (FORMATS[name] for name in ("F16", "F32", "Q5_1"))
        return {
            "smallest": cls(q8, 2, 1, 16, 32, weighted=False),
            "residual i16": cls(q4_k, 5, 3, 48, 512, residual=True, activations="i16"),
            "bias": cls(q8, 4, 2, 32, 288, bias=True, residual=True, activations="i16"),
            "early": cls(q8, 5, 2, 48, 544, batch=2, residual=True, activations="i16", early=True),
            "F32": cls(f32, 3, 2, 16, 37, batch=3, bias=True),
            "F16": cls(f16, 3, 3, 32, 96, residual=True, weighted=False),
            "rows": cls(q6_k, 4, 2, 32, 768, batch=2, bias=True, activations="i16"),
            "passes": cls(q5_1, 3, 2, 80, 608, sms=1, per_pass=2, groups=2, split=3, residual=True),
        }
