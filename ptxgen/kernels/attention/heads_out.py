"""The output of attention, as the next launch takes it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from urdir.ptxgen.spec import Access, Array, Param
from urdir.ptxgen.weights.packed import GROUP, pack, packed_shape
from urdir.ptxgen.weights.packed_few import Order, few_shape, pack_few, with_few


@dataclass(frozen=True, slots=True)
class HeadsOut:
    """Heads (rows, heads, value_dim) f32; or, if it ``packs``, rows of one vector each as packed
    f16 (`weights.packed`), of which ``groups`` names how many groups there are; or, with an
    ``order``, up to eight rows as few packed vectors (`weights.packed_few`), of which those beyond
    the rows stay as they were."""

    rows: int
    heads: int
    value_dim: int
    packs: bool = False
    order: Order | None = None
    groups: str = ""

    @property
    def cols(self) -> int:
        """Values of a row."""
        return self.heads * self.value_dim

    @property
    def param(self) -> Param:
        """Its parameter."""
        if not self.packs:
            return Param("out", "f32", ("rows", "heads", "value_dim"), Access.OUT)
        if self.order is not None:
            return Param("out", "f16", few_shape(self.cols), Access.INOUT)
        slices, groups, *matrix = packed_shape(self.rows, self.cols)
        return Param("out", "f16", (slices, self.groups or groups, *matrix), Access.OUT)

    def before(self, rng: np.random.Generator) -> dict[str, Array]:
        """The input that it is, of few packed vectors: what these are before."""
        if self.order is None:
            return {}
        return {"out": pack_few(rng.standard_normal((GROUP, self.cols)), self.order)}

    def of(self, heads: Array, inputs: dict[str, Array]) -> Array:
        """The output that has the ``heads`` (rows, heads, value_dim) of all rows."""
        if not self.packs:
            return heads
        rows = heads.reshape(self.rows, -1)
        return pack(rows) if self.order is None else with_few(inputs["out"], rows, self.order)
