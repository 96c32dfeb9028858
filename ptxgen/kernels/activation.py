"""Nonlinearities of FFNs: names and definitions.

One description serves all kernels that apply one: separately, at the end of a product, or between
the two matrices of a gated FFN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.spec import Array

ActivationKind = Literal[
    "silu", "gelu", "gelu_erf", "relu", "relu2",
    "sigmoid", "tanh", "softplus", "xielu", "swiglu_oai", "situ",
]  # fmt: skip
#: Kinds with parameters, and their number.
_PARAMETERS = {"xielu": 4, "situ": 2}
#: Where a limit applies: to gate and up before the activation, or to the activated gate and up.
Clamp = Literal["inputs", "activated"]


@dataclass(frozen=True, slots=True)
class Activation:
    """f in y = f(x), or in y = f(gate) * up.

    - silu: x / (1 + exp(-x)) (SwiGLU, Shazeer 2020, arXiv 2002.05202);
    - gelu: 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) (Hendrycks 2016, arXiv 1606.08415);
    - gelu_erf: x Phi(x), Phi being the normal distribution: the GELU that the above approximates;
    - relu: max(x, 0); relu2: its square (So et al. 2021, arXiv 2109.08668);
    - sigmoid: 1 / (1 + exp(-x)); tanh; softplus: log(1 + exp(x));
    - xielu (Huang 2024, arXiv 2411.13010) with ``parameters`` (alpha_n, alpha_p, beta, eps):
      alpha_p x^2 + beta x where x > 0, else (expm1(min(x, eps)) - x) alpha_n + beta x;
    - situ (Kimi K3) with ``parameters`` (b, c): b tanh(x / b) sigmoid(x); up is replaced by
      c tanh(up / c), unless c is 0;
    - swiglu_oai (gpt-oss), gated only: gate' sigmoid(1.702 gate') * (up' + 1).

    A ``limit`` above 0 clamps. "inputs": gate' = min(gate, limit), up' = up within +- limit.
    "activated" (silu): min(f(gate), limit) times up within +- limit.
    """

    kind: ActivationKind = "silu"
    limit: float = 0.0
    clamp: Clamp = "inputs"
    parameters: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.limit >= 0:
            raise PtxgenError(f"the limit of an activation is {self.limit}: 0 is none")
        if len(self.parameters) != _PARAMETERS.get(self.kind, 0):
            raise PtxgenError(f"{self.kind} with {len(self.parameters)} parameters")

    @property
    def is_silu(self) -> bool:
        """Whether f(x) is x times a sigmoid; other kinds need no scratch register."""
        return self.kind in ("silu", "swiglu_oai")

    def __call__(self, x: Array) -> Array:
        """f(x) in float64."""
        x = np.asarray(x, np.float64)
        with np.errstate(over="ignore"):
            sigmoid: Array = 1.0 / (1.0 + np.exp(-1.702 * x if self.kind == "swiglu_oai" else -x))
        match self.kind:
            case "silu" | "swiglu_oai":
                return x * sigmoid
            case "gelu":
                tanh: Array = np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))
                return 0.5 * x * (1.0 + tanh)
            case "gelu_erf":
                tails = np.frompyfunc(math.erfc, 1, 1)(-x / np.sqrt(2.0))
                phi: Array = 0.5 * tails.astype(np.float64)
                return x * phi
            case "relu" | "relu2":
                return np.maximum(x, 0.0) ** (2 if self.kind == "relu2" else 1)
            case "sigmoid":
                return sigmoid
            case "tanh":
                return np.tanh(x)
            case "softplus":
                return np.logaddexp(0.0, x)
            case "situ":
                bound = self.parameters[0]
                return bound * np.tanh(x / bound) * sigmoid
            case "xielu":
                alpha_n, alpha_p, beta, eps = self.parameters
                negative = (np.expm1(np.minimum(x, eps)) - x) * alpha_n
                return np.where(x > 0, alpha_p * x * x, negative) + beta * x

    def gated(self, gate: Array, up: Array) -> Array:
        """f(gate) * up in float64, with the limit."""
        gate, up = np.asarray(gate, np.float64), np.asarray(up, np.float64)
        if self.limit:
            up = np.clip(up, -self.limit, self.limit)
            if self.clamp == "inputs":
                gate = np.minimum(gate, self.limit)
        if self.kind == "situ" and (bound := self.parameters[1]):
            up = bound * np.tanh(up / bound)
        activated = self(gate)
        if self.limit and self.clamp == "activated":
            activated = np.minimum(activated, self.limit)
        return activated * (up + 1.0 if self.kind == "swiglu_oai" else up)
