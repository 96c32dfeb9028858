"""The sum of two arrays: a residual connection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.elementwise import Elementwise
from urdir.ptxgen.spec import Access, Array, Param, Tolerance


@dataclass(frozen=True)
class Add(Elementwise):
    """The sum of two arrays, element by element: y = a + scale * b, times s if ``scaled``.

    ``s`` (1,) f32 is a weight in device memory. With a ``width``, n is a multiple of it and b has
    ``width`` values, a multiple of 4, that are added to every row of a.
    """

    scale: float = 1.0
    scaled: bool = False
    width: int = 0

    name = "add"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width and (self.width % 4 or self.n % self.width):
            raise PtxgenError(f"add: {self.n} values in rows of {self.width}")

    @property
    def addends(self) -> int:
        """Number of values of b."""
        return self.width or self.n

    @property
    def params(self) -> tuple[Param, ...]:
        return Param.given(
            Param("a", "f32", ("n",), Access.IN),
            Param("b", "f32", ("addends",), Access.IN),
            self.scaled and Param("s", "f32", (1,), Access.IN),
            Param("y", "f32", ("n",), Access.OUT),
        )

    @property
    def tolerance(self) -> Tolerance:
        """One rounding, as add.f32: bit for bit. Two or more with a factor."""
        plain = self.scale == 1 and not self.scaled
        return Tolerance() if plain else Tolerance(rtol=3e-7)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        b = np.resize(inputs["b"], self.n)
        if self.scale == 1 and not self.scaled:
            return {"y": inputs["a"] + b}
        y = inputs["a"] + self.scale * b.astype(np.float64)
        return {"y": (y * inputs["s"] if self.scaled else y).astype(np.float32)}

    @classmethod
    def examples(cls) -> dict[str, Add]:
        return {
            **{f"{n} values": cls(n) for n in (3, 64, 515, 4096)},
            "scaled addend": cls(70, scale=0.22),
            "scaled sum": cls(67, scaled=True),
            "to every row": cls(3 * 20, width=20),
            "both scaled": cls(5, scale=-1.5, scaled=True),
        }

    def flops(self) -> int:
        return self.n
