"""Nonlinearities of feed-forward blocks, and gates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.elementwise import Elementwise
from urdir.ptxgen.spec import Access, Array, Param, Tolerance

#: Gates near the ends of the range of f32, and of exp.
ENDS = (0, -0.0, 100, -100, 1e4, -1e4, 88.8, -88.8)


@dataclass(frozen=True)
class Activate(Elementwise):
    """A nonlinearity, y = f(x), or gated, y = f(gate) * up or y = added + f(gate) * up.

    ``group``: a gate applies to that many neighbouring values (a head of attention). Groups and
    limits need gates. Rows of ``width`` values of up may be ``stride`` apart, each a part of a
    longer row. Without a gate, f(x) is divided by the same ``width`` values in every row (MPT);
    then n is a multiple of the width, and both are multiples of 4. silu and gelu: -0 if exp(-x)
    overflows, NaN at x = -inf.
    """

    activation: Activation
    gated: bool = False
    group: int = 1
    width: int = 0
    stride: int = 0
    added: bool = False

    name = "activate"
    tolerance = Tolerance(rtol=1e-6)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group < 1 or self.n % self.group:
            raise PtxgenError(f"activate: {self.n} values in groups of {self.group}")
        if self.width % 4 or self.stride % 4 or (self.width and self.n % self.width):
            raise PtxgenError(f"activate: rows of {self.width}, {self.stride} apart, of {self.n}")
        if self.gated and self.width and (self.stride < self.width or self.group > 1):
            raise PtxgenError(f"activate: gated rows of {self.width} that are {self.stride} apart")
        if self.added and (self.width or not self.gated):
            raise PtxgenError("activate: only what is gated, and no parts of rows, can be added")
        kind = self.activation.kind
        if not self.gated and (self.group > 1 or self.activation.limit or kind == "swiglu_oai"):
            raise PtxgenError(f"activate: {kind} without a gate has no group and no limit")

    @property
    def gates(self) -> int:
        """Number of gate values."""
        return self.n // self.group

    @property
    def ups(self) -> int:
        """Number of values from the first to the last of up."""
        return (self.n // self.width - 1) * self.stride + self.width if self.stride else self.n

    @property
    def params(self) -> tuple[Param, ...]:
        y = Param("y", "f32", ("n",), Access.OUT)
        if not self.gated:
            by = (Param("by", "f32", ("width",), Access.IN),) if self.width else ()
            return (Param("x", "f32", ("n",), Access.IN), *by, y)
        return Param.given(
            Param("gate", "f32", ("gates",), Access.IN),
            Param("up", "f32", ("ups",), Access.IN),
            self.added and Param("added", "f32", ("n",), Access.IN),
            y,
        )

    def reference(self, **inputs: Any) -> dict[str, Array]:
        if not self.gated:
            y = self.activation(inputs["x"])
            if self.width:
                y = (y.reshape(-1, self.width) / inputs["by"]).ravel()
            return {"y": y.astype(np.float32)}
        gate, up = np.repeat(inputs["gate"], self.group), inputs["up"]
        if self.stride:
            rows = np.arange(self.n // self.width)[:, None] * self.stride
            up = up[rows + np.arange(self.width)].ravel()
        y = self.activation.gated(gate, up) + inputs.get("added", 0.0)
        return {"y": y.astype(np.float32)}

    @classmethod
    def examples(cls) -> dict[str, Activate]:
        silu, sigmoid, softplus = (Activation(k) for k in ("silu", "sigmoid", "softplus"))
        xielu = Activation("xielu", parameters=(0.8, 0.7, 0.5, -1e-6))
        plain = {
            f.kind: cls(259 + i, f)
            for i, f in enumerate(
                (silu, Activation("gelu"), Activation("relu"), Activation("relu2"), sigmoid,
                 softplus, xielu, Activation("gelu_erf"))
            )
        }  # fmt: skip
        gated = (
            Activation("gelu"),
            Activation("relu2"),
            Activation("swiglu_oai", limit=7.0),
            Activation("silu", limit=1.5, clamp="activated"),
            Activation("situ", parameters=(4.0, 2.5)),
        )
        return {
            **{f"{n} values": cls(n, silu, gated=True) for n in (5, 128, 1037, 14336)},
            **plain,
            **{f"gated {f.kind}{' limit' * (f.limit > 0)}": cls(70, f, gated=True) for f in gated},
            "gates of heads": cls(6 * 64, sigmoid, gated=True, group=64),
            "added": cls(6 * 43, sigmoid, gated=True, group=43, added=True),
            "parts of rows": cls(3 * 20, silu, gated=True, width=20, stride=52),
            "parts of many rows": cls(70 * 12, silu, gated=True, width=12, stride=24),
            "divided": cls(3 * 36, Activation("gelu"), width=36),
            "gates of odd heads": cls(7 * 9, softplus, gated=True, group=9),
        }

    def flops(self) -> int:
        return 6 * self.n

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Values from the middle and from the flat ends of f."""
        inputs = super().make_inputs(rng)
        x = inputs["gate" if self.gated else "x"]
        x *= 4
        ends = np.array(ENDS, np.float32)
        if self.activation.kind in ("relu2", "xielu"):  # a square would hide the others' errors
            ends = ends[:2]
        some = min(x.size // 4, ends.size)
        x[:some] = ends[:some]
        return inputs
