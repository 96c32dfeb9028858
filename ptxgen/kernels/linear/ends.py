"""What stands before and after a product: checks, and words for templates' contracts."""

from __future__ import annotations

from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.spec import Access, Array, KernelSpec, Param
from urdir.ptxgen.weights.layout import Layout


class Ends(KernelSpec):
    """A product of x, or two of them joined by a gate, which may have a norm in front and an
    activation after it: fields of the kernels that can."""

    gated: bool = False
    activation: Activation | None = None
    norm: Norm | None = None

    @property
    def layout(self) -> Layout:
        """How the (first) weights lie in memory."""
        raise NotImplementedError

    @property
    def row_units(self) -> int:
        """Units of a row of a matrix."""
        return self.layout.row_units

    @property
    def pair(self) -> int:
        """Matrices that are multiplied together: two if gated."""
        return 2 if self.gated else 1

    @property
    def normed(self) -> bool:
        """Whether x is normalised first."""
        return self.norm is not None

    @property
    def scales_x(self) -> bool:
        """Whether x is to be multiplied with the norm's weights."""
        return self.norm is not None and self.norm.weight

    @property
    def norm_text(self) -> str:
        """What x' is, for a template's contract."""
        return norm_text(self.norm)

    @property
    def norm_params(self) -> tuple[Param, ...]:
        """The norm's weights and bias, if it has them."""
        has_bias = self.norm is not None and self.norm.bias
        given = (("norm", self.scales_x), ("norm_bias", has_bias))
        return tuple(Param(name, "f32", ("cols",), Access.IN) for name, has in given if has)

    def multiplied(self, **inputs: Any) -> Array:
        """The vectors that the weights multiply, f64: x, normalised where there is a norm."""
        x: Array = inputs["x"].astype(np.float64)
        if self.norm is None:
            return x
        return self.norm(x, inputs.get("norm"), inputs.get("norm_bias"))


def check_ends(spec: Any) -> None:
    """Raise PtxgenError for bounds below 0 and for an activation that needs a gate."""
    if not (spec.softcap >= 0 and spec.clamp >= 0):
        raise PtxgenError(f"{spec.name}: softcap {spec.softcap}, clamp {spec.clamp}: 0 is none")
    f, gated = spec.activation, getattr(spec, "gated", False)
    if f is not None and not gated and (f.limit or f.kind == "swiglu_oai"):
        raise PtxgenError(f"{spec.name}: {f.kind} with limit {f.limit} is for gated products")


def is_first(norm: Norm) -> bool:
    """Whether a norm must be complete before the product. Without a mean and a bias it is a factor
    of each vector, and may follow."""
    return norm.kind == "layer" or norm.bias


def norm_text(norm: Norm | None, weights: str = "norm") -> str:
    """A norm as a template's contract has it; ``weights`` is the name of its parameter."""
    if norm is None:
        return "x"
    centred = "x" if norm.kind == "rms" else "(x - mean(x))"
    measure = "mean(x^2)" if norm.kind == "rms" else "var(x)"
    weight = f" * {weights}, {weights} (cols) f32" if norm.weight else ""
    bias = f" + {weights}_bias" if norm.bias else ""
    return f"{centred} / sqrt({measure} + eps){weight}{bias}"


def end_text(spec: Any) -> str:
    """What follows a product, as a template's contract has it."""
    f = spec.activation.kind if spec.activation else "silu" if spec.f else ""
    steps = [
        *([f"f: {f}"] if f else []),
        *([f"* {spec.scale}"] if spec.scale != 1 else []),
        *([f"soft cap {spec.softcap}"] if spec.softcap else []),
        *([f"within {spec.clamp}"] if spec.clamp else []),
    ]
    return f"; end: {', '.join(steps)}" if steps else "; end(s) = s"
