"""Rescale, cap or clamp an array: logits, embeddings, layers of some families."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.elementwise import Elementwise
from urdir.ptxgen.spec import Access, Array, Param, Tolerance


@dataclass(frozen=True)
class Rescale(Elementwise):
    """An array times a number, optionally bounded: y = scale * x, times s[0] if ``scaled``, a
    weight (1,) f32 of the model.

    A ``softcap`` above 0 bounds smoothly, y = softcap * tanh(scale * x / softcap) (Gemma 2, arXiv
    2408.00118, 2.1); a ``clamp`` above 0 cuts off what is beyond +- clamp.
    """

    scale: float = 1.0
    softcap: float = 0.0
    clamp: float = 0.0
    scaled: bool = False

    name = "rescale"
    tolerance = Tolerance(rtol=1e-6)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.softcap >= 0 and self.clamp >= 0):
            raise PtxgenError(
                f"rescale: softcap is {self.softcap}, clamp {self.clamp}: 0 is none, else above 0"
            )

    @property
    def params(self) -> tuple[Param, ...]:
        return Param.given(
            Param("x", "f32", ("n",), Access.IN),
            self.scaled and Param("s", "f32", (1,), Access.IN),
            Param("y", "f32", ("n",), Access.OUT),
        )

    def reference(self, **inputs: Any) -> dict[str, Array]:
        y = self.scale * inputs["x"].astype(np.float64)
        if self.scaled:
            y = y * inputs["s"]
        y = bounded(y, self.softcap, self.clamp)
        return {"y": y.astype(np.float32)}

    @classmethod
    def examples(cls) -> dict[str, Rescale]:
        return {
            "scaled": cls(5, scale=0.125),
            "capped": cls(1037, softcap=2.5),
            "scaled and capped": cls(515, scale=3.0, softcap=30.0),
            "clamped": cls(258, clamp=0.75),
            "by a weight": cls(130, scaled=True),
        }

    def flops(self) -> int:
        return (16 if self.softcap else 2) * self.n


def bounded(y: Array, softcap: float, clamp: float) -> Array:
    """y (f64) bounded smoothly by ``softcap``, then clamped to +- ``clamp``; 0: not bounded."""
    if softcap:
        y = softcap * np.tanh(y / softcap)
    return np.clip(y, -clamp, clamp) if clamp else y
