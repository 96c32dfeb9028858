"""Pack activations for products on tensor cores, normalised first if there is a norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.column_orders import in_orders, random_orders
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.kernels.pairs import NO_PAIR
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, Tolerance, ceil_div
from urdir.ptxgen.weights.layout import TILE_COLS
from urdir.ptxgen.weights.packed import GROUP, pack, packed_shape

#: Threads that share a tile of a row: each has the sixteen columns of two rows of matrices.
TILE_THREADS = TILE_COLS // 16
#: The most threads of a CTA, and rows that share one with a norm: 32 bytes are written at once.
MAX_THREADS, NORMED_ROWS = 1024, 2


@dataclass(frozen=True)
class Pack(KernelSpec):
    """x (rows, cols) f32 as f16, in the order of `packed`; with a ``norm`` the
    normalised rows, with its ``weight`` and ``bias`` (cols,) f32 (`can_norm`).

    ``used``, without a norm: vectors of y are those of ``places`` pairs of rows and slots, as
    `GroupExperts` lists them; the row of a pair is pair / used. The vector of a place without a
    pair is 0, but a group of eight places without any stays as it is: no product reads it, and
    there are more of them than others where rows choose alike. ``weighted``: times the pair's
    weight.

    ``room``, without pairs: y has room for this many vectors; those beyond ``rows`` stay unchanged.
    Both are multiples of eight, and the text does not have ``rows``.

    ``orders``, of pairs: columns are in the order of the pair's expert, one of as many: those of x
    that ``order`` (orders, cols) f32 says, of ``expert`` (pairs,) u32; one of ``cols`` or more
    gives a zero.

    ``factors``, of pairs: x is multiplied with ``next_norm`` (cols,) f32 and the row's ``factor``,
    (rows,) f32.

    ``keeps``: the normalised rows are z (rows, cols) f32 as well.

    ``gated``, without norm and pairs: x is multiplied with that of ``gate`` (rows, cols) f32.
    """

    rows: int
    cols: int
    norm: Norm | None = None
    used: int = 0
    places: int = 0
    weighted: bool = False
    room: int = 0
    keeps: bool = False
    factors: bool = False
    orders: int = 0
    gated: Activation | None = None

    name = "pack"

    def __post_init__(self) -> None:
        if self.rows < 1 or self.cols < 1:
            raise PtxgenError(f"pack: no values in {self.rows} rows of {self.cols}")
        if self.norm and not self.can_norm(self.cols):
            raise PtxgenError(f"pack: norms take up to {TILE_COLS * MAX_THREADS // TILE_THREADS} "
                              f"columns, a multiple of four: {self.cols}")  # fmt: skip

        if bool(self.used) != bool(self.places) or self.places % GROUP:
            raise PtxgenError(f"pack: {self}: places are those of pairs, a multiple of {GROUP}")
        if (self.used and self.norm) or (self.weighted and not self.used):
            raise PtxgenError(f"pack: {self}: pairs have no norm, and weights are those of pairs")

        if self.room and (self.used or self.room % GROUP or self.rows % GROUP):
            raise PtxgenError(f"pack: {self}: room for rows alone, multiples of {GROUP}")
        if self.room and self.rows > self.room:
            raise PtxgenError(f"pack: {self.rows} rows, room for {self.room}")
        if self.keeps and (self.norm is None or self.room):
            raise PtxgenError(f"pack: {self}: what is kept is normalised, without room for more")
        if self.gated and (self.norm or self.used or self.cols % 4):
            raise PtxgenError(f"pack: {self}: gates are for rows of whole vectors as they are")
        if self.orders and (not self.used or self.factors or self.cols % 4):
            raise PtxgenError(
                f"pack: {self}: orders are those of pairs of whole vectors as they are"
            )

    @property
    def launch_fields(self) -> frozenset[str]:
        return frozenset({"rows"} if self.room else ())

    @staticmethod
    def can_norm(cols: int) -> bool:
        """Whether a CTA holds a row of this many columns."""
        return cols % 4 == 0 and TILE_THREADS * ceil_div(cols, TILE_COLS) <= MAX_THREADS

    @property
    def params(self) -> tuple[Param, ...]:
        norm, access = self.norm, Access.INOUT if self.room or self.used else Access.OUT
        return Param.given(
            Param("x", "f32", ("rows", "cols"), Access.IN),
            self.gated and Param("gate", "f32", ("rows", "cols"), Access.IN),
            norm and norm.weight and Param("weight", "f32", ("cols",), Access.IN),
            norm and norm.bias and Param("bias", "f32", ("cols",), Access.IN),
            self.used and Param("pair", "u32", ("places",), Access.IN),
            self.weighted and Param("weight", "f32", ("pairs",), Access.IN),
            self.orders and Param("expert", "u32", ("pairs",), Access.IN),
            self.orders and Param("order", "f32", ("orders", "cols"), Access.IN),
            self.factors and Param("next_norm", "f32", ("cols",), Access.IN),
            self.factors and Param("factor", "f32", ("rows",), Access.IN),
            Param("y", "f16", packed_shape(self.vectors, self.cols), access),
            self.keeps and Param("z", "f32", ("rows", "cols"), Access.OUT),
        )

    @property
    def vectors(self) -> int:
        """Vectors of y."""
        return self.places or self.room or self.rows

    @property
    def launched(self) -> int:
        """Vectors that a launch writes."""
        return GROUP * ceil_div(self.places or self.rows, GROUP)

    @property
    def pairs(self) -> int:
        """Pairs of rows and slots."""
        return self.rows * self.used

    @property
    def tiles(self) -> int:
        """Tiles of 256 columns."""
        return packed_shape(self.vectors, self.cols)[0] // 4

    @property
    def groups(self) -> int:
        """Groups of eight vectors."""
        return packed_shape(self.vectors, self.cols)[1]

    @property
    def cta_rows(self) -> int:
        """Rows of a CTA, in neighbouring lanes."""
        if self.norm is None:
            return GROUP
        return min(NORMED_ROWS, MAX_THREADS // (TILE_THREADS * self.tiles))

    @property
    def cta_tiles(self) -> int:
        """Tiles of a CTA: a norm takes all."""
        return 1 if self.norm is None else self.tiles

    @property
    def warps(self) -> int:
        """Warps of a CTA; the last may have threads without columns."""
        return ceil_div(self.cta_rows * TILE_THREADS * self.cta_tiles, 32)

    @property
    def has_idle(self) -> bool:
        """Whether some threads have no columns."""
        return self.cta_rows * TILE_THREADS * self.cta_tiles < 32 * self.warps

    @property
    def launch_shape(self) -> LaunchShape:
        grid = (self.tiles // self.cta_tiles, self.launched // self.cta_rows, 1)
        return LaunchShape(grid=grid, block=(32 * self.warps, 1, 1))

    @property
    def tolerance(self) -> Tolerance:
        """One rounding, as numpy's: bit for bit; after another one, f16 has 11 bits."""
        again = self.norm or self.weighted or self.factors or self.gated
        return Tolerance(rtol=6e-4 if again else 0)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        x = inputs["x"]
        if self.norm is not None:
            x = self.norm(x, inputs.get("weight"), inputs.get("bias"))
        if self.gated is not None:
            x = self.gated.gated(inputs["gate"], x)
        if self.used:
            pair = inputs["pair"].astype(np.int64)
            found = pair != NO_PAIR
            gathered = np.zeros((self.places, self.cols))
            own = inputs["expert"][pair[found]] if self.orders else pair[found]
            rows = x[pair[found] // self.used][:, None]
            gathered[found] = in_orders(rows, own[:, None], inputs)[:, 0]
            if self.factors:
                rows = pair[found] // self.used
                gathered[found] *= inputs["next_norm"] * inputs["factor"][rows, None]
            if self.weighted:
                gathered[found] *= inputs["weight"][pair[found], None]
            x = gathered
        y = pack(x)
        if self.used:
            has_pair = found.reshape(-1, GROUP).any(axis=1)
            y = np.where(has_pair[None, :, None, None, None], y, inputs["y"])
        if self.room:
            y, made = inputs["y"].copy(), y
            y[:, : made.shape[1]] = made
        return {"y": y} | ({"z": x.astype(np.float32)} if self.keeps else {})

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Rows of a layer norm have means other than 0. Pairs are in any order, each once, with
        places between them, and none in the first group if the others have room."""
        inputs = super().make_inputs(rng)
        if self.used:
            pair = np.full(self.places, NO_PAIR, np.uint32)
            room = self.places - (GROUP if self.pairs <= self.places - GROUP else 0)
            taken = self.places - room + rng.permutation(room)[: self.pairs]
            pair[taken] = rng.permutation(self.pairs)
            inputs["pair"] = pair
        if self.orders:
            orders = random_orders(self.orders, self.cols, rng)
            inputs |= {
                "order": orders,
                "expert": rng.integers(0, self.orders, self.pairs, np.uint32),
            }
        if self.norm is not None and self.norm.kind == "layer":
            inputs["x"] += rng.standard_normal((self.rows, 1)).astype(np.float32)
        return inputs

    @classmethod
    def examples(cls) -> dict[str, Pack]:
        rms, layer = Norm("rms", 1e-5), Norm("layer", 1e-5, bias=True)
        return {
            "one": cls(1, 3),
            "odd": cls(9, 259),
            "vectors": cls(16, 512),
            "rms": cls(8, 256, rms),
            "rms of odd rows": cls(11, 1284, rms),
            "rms of 8448 columns": cls(9, 8448, rms),
            "rms without weight": cls(3, 20, Norm("rms", 0.1, weight=False)),
            "layer": cls(16, 1280, layer),
            "layer of odd rows": cls(5, 900, layer),
            "layer, kept": cls(16, 1024, layer, keeps=True),
            "layer of odd rows, kept": cls(11, 900, layer, keeps=True),
            "room": cls(16, 259, room=40),
            "rms, room": cls(24, 260, rms, room=24),
            "pairs": cls(5, 36, used=3, places=24),
            "weighted pairs": cls(9, 290, used=1, places=16, weighted=True),
            "gated": cls(11, 1284, gated=Activation("silu")),
            "gated, room": cls(8, 512, room=16, gated=Activation("sigmoid")),
            "normed pairs": cls(9, 292, used=2, places=32, factors=True),
            "ordered pairs": cls(7, 544, used=3, places=48, orders=5),
            "ordered pairs, weighted": cls(3, 260, used=2, places=16, weighted=True, orders=2),
        }

    def flops(self) -> int:
        return (5 if self.norm else 1) * self.launched * self.cols
