"""Pack the vectors of pairs of rows and experts, with columns in the orders of the experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.experts.ordered import ORDER, in_orders, random_orders
from urdir.ptxgen.kernels.pairs import NO_PAIR, grouped, most_places, random_choice
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, Tolerance
from urdir.ptxgen.weights.packed import GROUP, pack, packed_shape

CTA_THREADS = 256
#: Columns of x whose halves of eight rows have room in shared memory, 192 KiB.
MOST_COLS = 12288


@dataclass(frozen=True)
class PackOrdered(KernelSpec):
    """The vectors of ``places`` pairs of ``rows`` and ``used`` slots as `Pack` makes them, with
    columns in the order of the pair's expert: those of x (rows, cols) f32 that ``order`` says.

    ``pair`` is the list of `GroupExperts`, whose groups of eight places have one expert, ``expert``
    (rows, used) u32 what the rows chose. ``weighted``: times the pair's weight. ``factors``: times
    ``next_norm`` (cols,) f32 and the row's ``factor``, (rows,) f32.

    Raises PtxgenError for more than `MOST_COLS` columns.
    """

    rows: int
    experts: int
    used: int
    cols: int
    weighted: bool = False
    factors: bool = False

    name = "pack_ordered"
    template = ("urdir.templates", "experts/pack_ordered.ptx.j2")

    def __post_init__(self) -> None:
        if not 1 <= self.cols <= MOST_COLS or self.experts * self.cols >= 1 << 30:
            raise PtxgenError(f"{self.name}: {self.experts} orders of {self.cols} columns")
        if self.rows < 1 or not 1 <= self.used <= self.experts:
            raise PtxgenError(
                f"{self.name}: {self.used} of {self.experts} experts for {self.rows} rows"
            )

    @property
    def params(self) -> tuple[Param, ...]:
        given = (
            (True, Param("x", "f32", ("rows", "cols"), Access.IN)),
            (True, Param("pair", "u32", ("places",), Access.IN)),
            (True, Param("expert", "u32", ("rows", "used"), Access.IN)),
            (True, *ORDER),
            (self.weighted, Param("weight", "f32", ("rows", "used"), Access.IN)),
            (self.factors, Param("next_norm", "f32", ("cols",), Access.IN)),
            (self.factors, Param("factor", "f32", ("rows",), Access.IN)),
            (True, Param("y", "f16", packed_shape(self.places, self.cols), Access.INOUT)),
        )
        return tuple(param for present, param in given if present)

    @property
    def pairs(self) -> int:
        """Pairs of rows and slots."""
        return self.rows * self.used

    @property
    def places(self) -> int:
        """Places of the list of pairs."""
        return most_places(self.rows, self.experts, self.used, GROUP)

    @property
    def items(self) -> int:
        """What threads write in turn: a matrix of eight vectors and eight columns each."""
        return packed_shape(self.places, self.cols)[0] * GROUP

    @property
    def launch_shape(self) -> LaunchShape:
        groups = self.places // GROUP
        return LaunchShape(
            grid=(groups, 1, 1), block=(CTA_THREADS, 1, 1), shared_bytes=2 * GROUP * self.cols
        )

    @property
    def tolerance(self) -> Tolerance:
        """As `Pack`'s."""
        return Tolerance(rtol=6e-4 if self.weighted or self.factors else 0)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        pair = inputs["pair"].astype(np.int64)
        found = pair != NO_PAIR
        rows = pair[found] // self.used
        x = inputs["x"][rows].astype(np.float64)
        if self.factors:
            x *= inputs["next_norm"] * inputs["factor"][rows, None]
        if self.weighted:
            x *= inputs["weight"].reshape(-1)[pair[found], None]
        own = inputs["expert"].reshape(-1)[pair[found]]
        gathered = np.zeros((self.places, self.cols))
        gathered[found] = in_orders(x[:, None], own[:, None], inputs)[:, 0]
        has_pair = found.reshape(-1, GROUP).any(axis=1)
        return {"y": np.where(has_pair[None, :, None, None, None], pack(gathered), inputs["y"])}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Some experts are chosen by most rows, some by none."""
        inputs = super().make_inputs(rng)
        choice = random_choice(rng, self.rows, self.experts, self.used)
        pair = grouped(choice, self.experts, GROUP, GROUP)["pair"]
        order = random_orders(self.experts, self.cols, rng)
        return inputs | {"pair": pair, "expert": choice, "order": order}

    @classmethod
    def examples(cls) -> Mapping[str, PackOrdered]:
        return {
            "smallest": cls(1, 1, 1, 3),
            "pairs": cls(7, 5, 3, 544),
            "weighted": cls(3, 4, 2, 260, weighted=True),
            "normed": cls(19, 6, 2, 1312, factors=True),
            "normed, weighted": cls(9, 3, 1, 256, weighted=True, factors=True),
            "wide": cls(2, 3, 1, 12288),
        }
