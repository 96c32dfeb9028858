"""What the experts of a row made, added up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.advance import IDLE
from urdir.ptxgen.kernels.experts.select import random_positions
from urdir.ptxgen.kernels.experts.selection import MAX_USED
from urdir.ptxgen.kernels.linear.pack import TILE_THREADS
from urdir.ptxgen.kernels.summary import PACKED_SUMMARY, SUMMARY, packed_squares, summary
from urdir.ptxgen.limits import GRID_ROWS, limited, up_to
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, Tolerance, ceil_div
from urdir.ptxgen.weights.layout import TILE_COLS
from urdir.ptxgen.weights.packed import GROUP, pack, packed_shape
from urdir.ptxgen.weights.packed_few import Order, few_shape, with_few

THREADS = 128
#: Rows of a CTA that begins a norm: 32 bytes are written at once.
CTA_ROWS = 2


@dataclass(frozen=True)
class CombineExperts(KernelSpec):
    """y[b] = the sum over slots s of x[b, s] (+ residual[b]), slot by slot. Padding rows, whose
    ``position`` is `IDLE`, have no slots.

    ``begins``: the RMSNorm that follows is begun for products that take packed vectors, as by
    `BeginNorm`: ``scaled`` is y times its weights ``next_norm``, packed, and ``y_summary`` has the
    sums of the squares of every 32 values of y in the packed order.
    ``order``: the same for products of few packed vectors in that order (`weights.packed_few`),
    with the squares of every 16 values; vectors beyond the rows stay as they were.
    """

    rows: int
    used: int
    cols: int
    residual: bool = False
    begins: bool = False
    order: Order | None = None

    name = "combine_experts"
    limits = limited(rows=GRID_ROWS, used=up_to(MAX_USED), cols=range(4, 1 << 31, 4))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.order is not None and (not self.begins or self.rows > GROUP):
            raise PtxgenError(
                f"combine_experts: {self.order} is the order of {GROUP} rows at most, with the "
                f"norm that is begun"
            )
        if self.begins and self.cols % TILE_COLS:
            raise PtxgenError(f"combine_experts: {self.cols} columns: a multiple of {TILE_COLS}")

    @property
    def params(self) -> tuple[Param, ...]:
        params = Param.given(
            Param("x", "f32", ("rows", "used", "cols"), Access.IN),
            Param("position", "u32", ("rows",), Access.IN),
            self.residual and Param("residual", "f32", ("rows", "cols"), Access.IN),
            Param("y", "f32", ("rows", "cols"), Access.OUT),
        )
        if not self.begins:
            return params
        if self.order is None:
            shape, access, each = packed_shape(self.rows, self.cols), Access.OUT, PACKED_SUMMARY
        else:
            shape, access, each = few_shape(self.cols), Access.INOUT, SUMMARY
        return (
            *params,
            Param("next_norm", "f32", ("cols",), Access.IN),
            Param("scaled", "f16", shape, access),
            Param("y_summary", "f32", (1, "rows", self.cols // each), Access.OUT),
        )

    #: Read by the macros of `Pack`: rows of a CTA in neighbouring lanes, all of which have columns.
    cta_rows, has_idle = CTA_ROWS, False

    @property
    def groups(self) -> int:
        """Groups of eight packed vectors."""
        return ceil_div(self.rows, GROUP)

    @property
    def launch_shape(self) -> LaunchShape:
        if self.begins and self.order is None:
            grid = (self.cols // TILE_COLS, self.groups * GROUP // CTA_ROWS, 1)
            return LaunchShape(grid=grid, block=(CTA_ROWS * TILE_THREADS, 1, 1))
        grid = (ceil_div(self.cols, 4 * THREADS), self.rows, 1)
        return LaunchShape(grid=grid, block=(THREADS, 1, 1))

    @property
    def tolerance(self) -> Tolerance:
        if self.begins:
            return Tolerance(rtol=6e-4, atol=1e-6)
        return Tolerance.of_sum("f32", self.used + self.residual)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        y = inputs["x"].astype(np.float64).sum(axis=1)
        y[inputs["position"] == IDLE] = 0.0
        if self.residual:
            y += inputs["residual"]
        made = {"y": y.astype(np.float32)}
        if not self.begins:
            return made
        scaled = made["y"] * inputs["next_norm"]
        if self.order is not None:
            squares = summary(scaled, made["y"])[1:]
            few = with_few(inputs["scaled"], scaled, self.order)
            return {**made, "scaled": few, "y_summary": squares}
        scaled = pack(scaled)
        return {**made, "scaled": scaled, "y_summary": packed_squares(made["y"])}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """What padding rows have in x is of no importance."""
        inputs = super().make_inputs(rng)
        inputs["position"] = random_positions(self.rows, rng)
        inputs["x"][inputs["position"] == IDLE] = np.nan
        return inputs

    @classmethod
    def examples(cls) -> dict[str, CombineExperts]:
        return {
            "smallest": cls(1, 1, 4),
            "odd": cls(3, 5, 36, residual=True),
            "several CTAs": cls(2, 8, 1028, residual=True),
            "32 slots": cls(2, 32, 68),
            "begins a norm": cls(11, 3, 512, residual=True, begins=True),
            "begins a norm, ten slots": cls(8, 10, 256, begins=True),
            "of few rows": cls(5, 3, 768, residual=True, begins=True, order="units"),
            "of few rows, by lanes": cls(3, 10, 1280, residual=True, begins=True, order="lanes"),
        }

    def flops(self) -> int:
        return self.rows * self.used * self.cols
