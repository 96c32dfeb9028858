"""Activations packed for products on Hopper's tensor cores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.pairs import NO_PAIR
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, Tolerance
from urdir.ptxgen.weights.packed import GROUP, pack, packed_shape


@dataclass(frozen=True)
class Pack(KernelSpec):
    """x (rows, cols) f32 as f16, in the order of `packed`.

    ``used``: vectors of y are those of ``places`` pairs of rows and slots, as `GroupExperts` lists
    them; the row of a pair is pair / used, and where there is none the vector is 0. ``weighted``:
    times the pair's weight.
    """

    rows: int
    cols: int
    used: int = 0
    places: int = 0
    weighted: bool = False

    name = "pack"
    template = ("urdir.templates", "pack.ptx.j2")

    def __post_init__(self) -> None:
        if bool(self.used) != bool(self.places) or (self.weighted and not self.used):
            raise PtxgenError(f"pack: {self}: places and weights are those of pairs")

    @property
    def vectors(self) -> int:
        """Vectors of y."""
        return self.places or self.rows

    @property
    def pairs(self) -> int:
        """Pairs of rows and slots."""
        return self.rows * self.used

    @property
    def params(self) -> tuple[Param, ...]:
        shape = packed_shape(self.vectors, self.cols)
        given = (
            (True, Param("x", "f32", ("rows", "cols"), Access.IN)),
            (self.used, Param("pair", "u32", ("places",), Access.IN)),
            (self.weighted, Param("weight", "f32", ("pairs",), Access.IN)),
            (True, Param("y", "f16", shape, Access.OUT)),
        )
        return tuple(param for present, param in given if present)

    @property
    def tiles(self) -> int:
        """Tiles of 256 columns."""
        return packed_shape(self.vectors, self.cols)[0] // 4

    @property
    def groups(self) -> int:
        """Groups of eight vectors."""
        return packed_shape(self.vectors, self.cols)[1]

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(grid=(self.tiles, self.groups, 1), block=(16 * GROUP, 1, 1))

    @property
    def tolerance(self) -> Tolerance:
        """One rounding, as numpy's: bit for bit; after that of the product with a weight."""
        return Tolerance(rtol=6e-4) if self.weighted else Tolerance()

    def reference(self, **inputs: Any) -> dict[str, Array]:
        x: Array = inputs["x"]
        if self.used:
            pair = inputs["pair"].astype(np.int64)
            found = pair != NO_PAIR
            gathered = np.zeros((self.places, self.cols))
            gathered[found] = x[pair[found] // self.used]
            if self.weighted:
                gathered[found] *= inputs["weight"][pair[found], None]
            x = gathered
        return {"y": pack(x)}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Pairs in any order, each once, and places without one."""
        inputs: dict[str, Any] = {
            "x": rng.standard_normal((self.rows, self.cols)).astype(np.float32)
        }
        if self.used:
            pair = np.full(self.places, NO_PAIR, np.uint32)
            taken = rng.permutation(self.places)[: self.pairs]
            pair[taken] = rng.permutation(self.pairs)[: len(taken)]
            inputs["pair"] = pair
        if self.weighted:
            inputs["weight"] = rng.standard_normal(self.pairs).astype(np.float32)
        return inputs

    @classmethod
    def examples(cls) -> Mapping[str, Pack]:
        return {
            "one": cls(1, 3),
            "odd": cls(9, 259),
            "vectors": cls(16, 512),
            "pairs": cls(5, 36, used=3, places=24),
            "weighted pairs": cls(9, 290, used=1, places=16, weighted=True),
        }

    def flops(self) -> int:
        return self.vectors * self.cols
