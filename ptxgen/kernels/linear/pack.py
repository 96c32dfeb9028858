"""Activations packed for products on tensor cores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, Tolerance
from urdir.ptxgen.weights.packed import GROUP, pack, packed_shape


@dataclass(frozen=True)
class Pack(KernelSpec):
    """x (rows, cols) f32 as f16, in the order of `packed`."""

    rows: int
    cols: int

    name = "pack"
    template = ("urdir.templates", "pack.ptx.j2")

    @property
    def params(self) -> tuple[Param, ...]:
        return (
            Param("x", "f32", ("rows", "cols"), Access.IN),
            Param("y", "f16", packed_shape(self.rows, self.cols), Access.OUT),
        )

    @property
    def tiles(self) -> int:
        """Tiles of 256 columns."""
        return packed_shape(self.rows, self.cols)[0] // 4

    @property
    def groups(self) -> int:
        """Groups of eight vectors."""
        return packed_shape(self.rows, self.cols)[1]

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(grid=(self.tiles, self.groups, 1), block=(32 * GROUP, 1, 1))

    @property
    def tolerance(self) -> Tolerance:
        """One rounding, as numpy's: bit for bit."""
        return Tolerance()

    def reference(self, **inputs: Any) -> dict[str, Array]:
        return {"y": pack(inputs["x"])}

    @classmethod
    def examples(cls) -> Mapping[str, Pack]:
        return {"one": cls(1, 3), "odd": cls(9, 259), "vectors": cls(16, 512)}

    def flops(self) -> int:
        return self.rows * self.cols
