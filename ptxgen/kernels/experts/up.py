"""The first matrices of the experts that a few rows chose, and the activation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.experts.tiled import ExpertsSpec
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.spec import Access, Array, Param
from urdir.ptxgen.weights.formats import FORMATS


@dataclass(frozen=True)
class ExpertsUp(ExpertsSpec):
    """y[b, s] = f(G x[b]) * (U x[b]) with the matrices G, U of the expert that row b has in slot s.

    ``gated`` off: y = f(G x). ``activation`` None: y = G x, not gated. ``norm``: x is normalised
    first. ``weighted``: the products are multiplied with the weight of the expert. ``bias``: each
    expert has one for each of its matrices, added last before f. ``in_turn``: there is no
    ``expert``, row b has number b % experts: heads with matrices of their own.
    """

    gated: bool = True
    activation: Activation | None = field(default_factory=Activation)
    norm: Norm | None = None
    weighted: bool = False
    bias: bool = False
    in_turn: bool = False

    name = "experts_up"
    template = ("urdir.templates", "experts/up.ptx.j2")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_activation()
        if self.in_turn and (self.used > 1 or self.weighted):
            raise PtxgenError("experts_up: experts in turn are one a row, without weights")

    @property
    def grid_rows(self) -> int:
        return self.batch * self.used

    @property
    def blocks(self) -> int:
        return self.layout.row_tiles

    @property
    def params(self) -> tuple[Param, ...]:
        params = [self._matrix("weights")]
        if self.gated:
            params.append(self._matrix("up"))
        if not self.in_turn:
            params.append(Param("expert", "u32", ("batch", "used"), Access.IN))
        if self.weighted:
            params.append(Param("weight", "f32", ("batch", "used"), Access.IN))
        params.append(Param("x", "f32", ("batch", "cols"), Access.IN))
        params += self.norm_params
        for name in ("bias", "up_bias") if self.gated else ("bias",):
            if self.bias:
                params.append(Param(name, "f32", ("experts", "rows"), Access.IN))
        params.append(Param("y", "f32", ("batch", "used", "rows"), Access.OUT))
        return tuple(params)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        x = self.multiplied(**inputs)
        chosen = np.arange(self.batch)[:, None] % self.experts
        if not self.in_turn:
            chosen = inputs["expert"]

        def product(matrix: str, bias: str) -> Array:
            y: Array = np.einsum("bsrc,bc->bsr", self.weights_of(inputs[matrix])[chosen], x)
            if self.weighted:
                y = y * inputs["weight"][:, :, None]
            return y + inputs[bias][chosen] if self.bias else y

        y = product("weights", "bias")
        if self.gated and self.activation is not None:
            y = self.activation.gated(y, product("up", "up_bias"))
        elif self.activation is not None:
            y = self.activation(y)
        return {"y": y.astype(np.float32)}

    @classmethod
    def examples(cls) -> Mapping[str, ExpertsUp]:
        q8, q4_k, q6_k = (FORMATS[name] for name in ("Q8_0", "Q4_K", "Q6_K"))
        f16, f32, q5_1 = (FORMATS[name] for name in ("F16", "F32", "Q5_1"))
        oai = Activation("swiglu_oai", limit=7.0)
        return {
            "smallest": cls(q8, 2, 1, 16, 32, gated=False, activation=None),
            "gated norm i16": cls(q4_k, 5, 3, 48, 512, activations="i16", norm=Norm("rms", 1e-6)),
            "biases": cls(q8, 4, 2, 32, 288, activation=oai, bias=True, activations="i16"),
            "weighted": cls(q6_k, 3, 1, 32, 256, weighted=True, bias=True, norm=Norm("rms", 1e-5)),
            "rows": cls(
                q4_k, 6, 2, 16, 768, batch=3, activations="i16", norm=Norm("rms", 1e-5, False)
            ),
            "layer norm": cls(q8, 3, 2, 16, 544, norm=Norm("layer", 1e-5, bias=True)),
            "in turn": cls(
                q8, 3, 1, 32, 64, batch=7, gated=False, activation=None, in_turn=True
            ),
            "in turn i16": cls(
                q8, 2, 1, 128, 512, batch=4, gated=False, activation=None, in_turn=True,
                activations="i16",
            ),
            "ungated relu2": cls(
                f16, 3, 2, 32, 70, batch=2, gated=False, activation=Activation("relu2")
            ),
            "F32 gelu": cls(f32, 3, 2, 16, 37, activation=Activation("gelu"), weighted=True),
            "clamped passes": cls(
                q5_1, 3, 2, 80, 608, sms=2, per_pass=2, groups=2, split=2, activations="i16",
                activation=Activation("silu", limit=2.5, clamp="activated"),
            ),
            "clamped inputs": cls(
                q8, 3, 2, 48, 1088, sms=4, per_pass=1, norm=Norm("rms", 1e-5),
                activation=Activation("relu", limit=1.5),
            ),
        }  # fmt: skip
