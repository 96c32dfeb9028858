"""Products that are heads in a cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.epilogue.bias import Bias
from urdir.ptxgen.kernels.linear.steps import Epilogue, Product, Reference
from urdir.ptxgen.spec import Access, Array, Param


@dataclass(frozen=True, slots=True)
class HeadPlaces:
    """Where the product of a matrix goes that makes heads of ``dims`` values: as f16 into the first
    rows of a cache (heads, room, width), one for each vector, from value ``start`` on. What else is
    there stays as it is."""

    dims: int
    start: int
    width: int
    room: int

    def takes(self, rows: int, room: int) -> bool:
        """Whether the product of a matrix with as many rows goes there, of ``room`` vectors."""
        even = not (self.dims % 2 or self.start % 2 or self.width % 2)
        fits = self.start + self.dims <= self.width and room == self.room
        return even and fits and rows % self.dims == 0


@dataclass(frozen=True, slots=True)
class Heads(Epilogue):
    """Each y is that of heads in a cache, f16, at its one of ``places``. x has room for as many
    vectors as the cache; their number is the argument ``length``, not a constant of the text. With
    ``whole`` these fill the room, and no heads have anything beside them."""

    places: tuple[HeadPlaces, ...]
    whole: bool = False

    stem = "heads"

    @property
    def room(self) -> int:
        """Vectors that the caches have room for."""
        return self.places[0].room

    def check(self, product: Product) -> None:
        parts = 1 + len(product.others)
        is_plain = all(isinstance(step, Bias | Heads) for step in product.steps)
        if len(self.places) != parts or not is_plain or product.pair_shape:
            raise PtxgenError(f"{product.name}: {self.places} of {parts} plain matrices")
        matrices = (product.rows, *(rows for _, rows in product.others))
        for rows, of in zip(matrices, self.places, strict=True):
            if not of.takes(rows, self.room) or product.batch > self.room:
                raise PtxgenError(
                    f"{product.name}: {rows} rows of {product.batch} vectors do not fill {of}"
                )
            if self.whole and (product.batch, of.dims) != (of.room, of.width):
                raise PtxgenError(f"{product.name}: {product.batch} vectors leave gaps in {of}")

    def stored(self, param: Param, product: Product) -> Param:
        for part, of in zip(product.parts, self.places, strict=True):
            if param.name == f"y{part.suffix}":
                shape = (part.rows // of.dims, of.room, of.width)
                access = Access.OUT if self.whole else Access.INOUT
                return Param(param.name, "f16", shape, access)
        return param

    def make_inputs(self, product: Product, rng: np.random.Generator) -> dict[str, Any]:
        params = [p for p in product.params if p.access is Access.INOUT]
        return {p.name: rng.standard_normal(product.shape_of(p)).astype(np.float16) for p in params}

    def apply(self, y: Array, of: Reference) -> Array:
        place, name = self.places[of.part.number], f"y{of.part.suffix}"
        heads = y.reshape(of.product.batch, -1, place.dims).transpose(1, 0, 2)
        room = (heads.shape[0], place.room, place.width)
        made: Array = np.empty(room, np.float16) if self.whole else of.inputs[name].copy()
        made[:, : of.product.batch, place.start : place.start + place.dims] = heads
        of.outputs[name] = made
        return y
