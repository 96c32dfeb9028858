"""Pack the activations of rows for the products of the experts that they chose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.experts.selection import MAX_USED
from urdir.ptxgen.kernels.linear.pack import TILE_THREADS
from urdir.ptxgen.kernels.linear.packed_parts import Mixture
from urdir.ptxgen.kernels.pairs import places_of
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, Tolerance, ceil_div
from urdir.ptxgen.weights.layout import TILE_COLS
from urdir.ptxgen.weights.packed import GROUP, pack, packed_shape

#: Tiles of a row that a CTA has, and CTAs of a grid in its second dimension.
CTA_TILES, MAX_GRID = 4, 65535


@dataclass(frozen=True)
class PackExperts(KernelSpec):
    """x (rows, cols) f32 as f16, in the order of `packed`: a vector for each of a row's slots, at
    the ``place`` (rows, used) that `GroupExperts` gives the pair. The others of a group of eight in
    which a tile of ``tile_of`` (tiles, 4) ends are 0. All other vectors stay as they are.

    ``weighted``: times the pair's weight (rows, used). ``factors``: x is multiplied with
    ``next_norm`` (cols,) f32 and the row's ``factor``, (rows,) f32.

    The launch before this one must be that of `GroupExperts`, which has waited for x, the weights
    and the factors: they are read before the wait for it.
    """

    rows: int
    cols: int
    mixture: Mixture
    weighted: bool = False
    factors: bool = False

    name = "pack_experts"
    template = ("urdir.templates", "experts/pack.ptx.j2")

    def __post_init__(self) -> None:
        if self.rows < 1 or self.cols < 1 or not 1 <= self.used <= MAX_USED:
            raise PtxgenError(
                f"pack_experts: {self.rows} rows of {self.cols} for {self.used} experts: at least "
                f"one of each, {MAX_USED} experts at most"
            )
        if self.rows + self.clearing > MAX_GRID:
            raise PtxgenError(
                f"pack_experts: {self.rows} rows and {self.clearing} tiles are more than {MAX_GRID}"
            )

    @property
    def params(self) -> tuple[Param, ...]:
        given = (
            (True, Param("x", "f32", ("rows", "cols"), Access.IN)),
            (True, Param("place", "u32", ("rows", "used"), Access.IN)),
            (True, Param("tile_of", "u32", ("clearing", 4), Access.IN)),
            (self.weighted, Param("weight", "f32", ("rows", "used"), Access.IN)),
            (self.factors, Param("next_norm", "f32", ("cols",), Access.IN)),
            (self.factors, Param("factor", "f32", ("rows",), Access.IN)),
            (True, Param("y", "f16", packed_shape(self.places, self.cols), Access.INOUT)),
        )
        return tuple(param for present, param in given if present)

    @property
    def used(self) -> int:
        """Slots of a row."""
        return self.mixture.used

    @property
    def places(self) -> int:
        """Places of the list of pairs."""
        return self.mixture.places(self.rows)

    @property
    def clearing(self) -> int:
        """Tiles of the list, of whose last groups some CTAs clear what has no pair."""
        return self.mixture.tiles(self.rows)

    @property
    def pairs(self) -> int:
        """Pairs of rows and slots."""
        return self.rows * self.used

    @property
    def tiles(self) -> int:
        """Tiles of a row."""
        return packed_shape(1, self.cols)[0] * GROUP * GROUP // TILE_COLS

    @property
    def has_idle(self) -> bool:
        """Whether some threads have no columns: read by the macros of `Pack`."""
        return self.tiles % CTA_TILES > 0

    @property
    def groups(self) -> int:
        """Groups of eight vectors."""
        return self.places // GROUP

    @property
    def launch_shape(self) -> LaunchShape:
        grid = (ceil_div(self.tiles, CTA_TILES), self.rows + self.clearing, 1)
        return LaunchShape(grid=grid, block=(CTA_TILES * TILE_THREADS, 1, 1))

    @property
    def tolerance(self) -> Tolerance:
        """One rounding, as numpy's: bit for bit; after another one, f16 has 11 bits."""
        return Tolerance(rtol=6e-4 if self.weighted or self.factors else 0)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        x = inputs["x"].astype(np.float64)
        if self.factors:
            x = x * inputs["next_norm"] * inputs["factor"][:, None]
        of_slots = np.repeat(x[:, None], self.used, axis=1)
        if self.weighted:
            of_slots *= inputs["weight"][:, :, None]
        place = inputs["place"].reshape(-1)
        vectors = np.zeros((self.places, self.cols))
        vectors[place] = of_slots.reshape(self.pairs, self.cols)
        made, y = pack(vectors), inputs["y"].copy()
        last = [
            np.arange(first + count, ceil_div(first + count, GROUP) * GROUP)
            for _, first, count, _ in inputs["tile_of"].tolist()
        ]
        taken = np.concatenate([place, *last]).astype(np.int64)
        group, among = taken // GROUP, taken % GROUP
        y[:, group, :, among] = made[:, group, :, among]
        return {"y": y}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Rows choose at random."""
        lists = self.mixture.lists(self.rows, rng)
        return super().make_inputs(rng) | {
            "place": places_of(lists["pair"], self.pairs).reshape(self.rows, self.used),
            "tile_of": lists["tile_of"],
        }

    @classmethod
    def examples(cls) -> Mapping[str, PackExperts]:
        return {
            "smallest": cls(1, 3, Mixture(1, 1, 8)),
            "pairs": cls(5, 36, Mixture(7, 3, 16)),
            "odd": cls(7, 259, Mixture(3, 2, 8)),
            "weighted": cls(9, 290, Mixture(4, 1, 16), weighted=True),
            "normed": cls(9, 292, Mixture(5, 2, 16), factors=True),
            "whole tiles": cls(5, 1536, Mixture(11, 8, 16), factors=True),
            "normed, weighted": cls(3, 1284, Mixture(9, 6, 32), weighted=True, factors=True),
            "whole CTAs": cls(37, 1024, Mixture(33, 4, 32)),
        }

    def flops(self) -> int:
        return self.pairs * self.cols
