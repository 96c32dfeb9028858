"""What products with experts have before and after them: a norm, a gate, an activation."""

from __future__ import annotations

from typing import Any

import numpy as np

from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.linear.prologue.norm import norm_params, norm_text
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.spec import Array, KernelSpec, Param
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
    def eps(self) -> float:
        """That of the norm; 0 without one."""
        return 0.0 if self.norm is None else self.norm.eps

    @property
    def norm_text(self) -> str:
        """What x' is, for a template's contract."""
        return norm_text(self.norm)

    @property
    def norm_params(self) -> tuple[Param, ...]:
        """The norm's weights and bias, if it has them."""
        return () if self.norm is None else norm_params(self.norm, "norm")

    def multiplied(self, **inputs: Any) -> Array:
        """The vectors that the weights multiply, f64: x, normalised where there is a norm."""
        x: Array = inputs["x"].astype(np.float64)
        if self.norm is None:
            return x
        return self.norm(x, inputs.get("norm"), inputs.get("norm_bias"))
