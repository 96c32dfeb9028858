"""The gate of a feed-forward block: SwiGLU (Shazeer 2020, "GLU Variants Improve Transformer")."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.kernels.elementwise import Elementwise
from urdir.ptxgen.spec import Access, Array, Param, Tolerance


@dataclass(frozen=True)
class SwiGLU(Elementwise):
    """The gated activation of a feed-forward block: y = silu(gate) * up.

    silu(x) = x / (1 + exp(-x)); -0 where exp(-x) overflows, NaN at x = -inf.
    """

    name = "swiglu"
    template = ("urdir.templates", "swiglu.ptx.j2")

    @property
    def params(self) -> tuple[Param, ...]:
        return (
            Param("gate", "f32", ("n",), Access.IN),
            Param("up", "f32", ("n",), Access.IN),
            Param("y", "f32", ("n",), Access.OUT),
        )

    @property
    def tolerance(self) -> Tolerance:
        return Tolerance(rtol=1e-6)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        gate, up = (inputs[name].astype(np.float64) for name in ("gate", "up"))
        with np.errstate(over="ignore"):
            silu = gate / (1.0 + np.exp(-gate))
        return {"y": (silu * up).astype(np.float32)}

    @classmethod
    def examples(cls) -> Mapping[str, SwiGLU]:
        return {f"{n} values": cls(n) for n in (5, 128, 1037, 14336)}

    def flops(self) -> int:
        return 6 * self.n

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Gates from the middle and from the flat ends of silu."""
        inputs = super().make_inputs(rng)
        inputs["gate"] *= 4
        ends = np.array([0, -0.0, 100, -100, 1e4, -1e4, 88.8, -88.8], np.float32)
        some = min(self.n // 4, ends.size)
        inputs["gate"][:some] = ends[:some]
        return inputs
