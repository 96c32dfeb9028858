"""Description of a normalisation, shared by kernels and models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from urdir.ptxgen.spec import Array


@dataclass(frozen=True, slots=True)
class Norm:
    """Normalisation of each row of x: times a weight per column and plus a bias, if it has them.

    - rms: x / sqrt(mean(x^2) + eps) (Zhang & Sennrich 2019, eq. 4);
    - layer: (x - mean(x)) / sqrt(var(x) + eps) (Ba et al. 2016, arXiv 1607.06450).
    """

    kind: Literal["rms", "layer"]
    eps: float
    weight: bool = True
    bias: bool = False

    @property
    def is_factor(self) -> bool:
        """Whether, its weights apart, it is a factor of each vector, which may follow a product."""
        return self.kind == "rms" and not self.bias

    def __call__(self, x: Array, weight: Array | None = None, bias: Array | None = None) -> Array:
        """The norm of the last axis in float64."""
        x = np.asarray(x, np.float64)
        if self.kind == "layer":
            x = x - x.mean(axis=-1, keepdims=True)
        y: Array = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.eps)
        if weight is not None:
            y = y * weight
        return y if bias is None else y + bias
