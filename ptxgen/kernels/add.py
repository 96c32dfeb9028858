"""The sum of two arrays: a residual connection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from urdir.ptxgen.kernels.elementwise import Elementwise
from urdir.ptxgen.spec import Access, Array, Param


@dataclass(frozen=True)
class Add(Elementwise):
    """The sum of two arrays, element by element: y = a + b."""

    name = "add"
    template = ("urdir.templates", "add.ptx.j2")

    @property
    def params(self) -> tuple[Param, ...]:
        return (
            Param("a", "f32", ("n",), Access.IN),
            Param("b", "f32", ("n",), Access.IN),
            Param("y", "f32", ("n",), Access.OUT),
        )

    def reference(self, **inputs: Any) -> dict[str, Array]:
        return {"y": inputs["a"] + inputs["b"]}  # one rounding, as add.f32: bit for bit

    @classmethod
    def examples(cls) -> Mapping[str, Add]:
        return {f"{n} values": cls(n) for n in (3, 64, 515, 4096)}

    def flops(self) -> int:
        return self.n
