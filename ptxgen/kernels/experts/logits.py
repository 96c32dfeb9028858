"""A router's logits for many rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.experts.selection import MAX_EXPERTS
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, Tolerance, ceil_div
from urdir.ptxgen.weights.formats import FORMATS
from urdir.ptxgen.weights.layout import TILE_ROWS, Layout

#: What a CTA makes: logits of this many experts for this many rows.
CTA_ROWS, CTA_EXPERTS = 16, 2 * TILE_ROWS
#: Splits of the columns, at most.
MOST_SPLITS = 8
#: Columns of a step: a lane of each group of eight multiplies four of them.
STEP = 128
WARPS = 8


@dataclass(frozen=True)
class RouterLogits(KernelSpec):
    """logits = scale * (x W^T) + bias: x (rows, cols), W (experts, cols) F32, repacked.

    As exact as the products of `RouteExperts`: f32 throughout, so that the same experts are chosen.
    A CTA reads a row of W once for 16 rows of x. The columns may be cut in ``splits``, whose sums
    are apart: logits (splits, rows, experts), the bias with the first.

    ``normed``: an RMSNorm of x is begun. x is multiplied with its weights ``norm`` (cols,) alone,
    and ``squares`` (splits, rows) f32 has the sums of the squares of x; what reads the logits makes
    the factors of them.
    """

    rows: int
    experts: int
    cols: int
    bias: bool = False
    scale: float = 1.0
    splits: int = 1
    normed: bool = False

    name = "router_logits"

    def __post_init__(self) -> None:
        if self.rows < 1 or not 1 <= self.experts <= MAX_EXPERTS:
            raise PtxgenError(
                f"router_logits: {self.rows} rows, {self.experts} experts: at least one row, "
                f"1 to {MAX_EXPERTS} experts"
            )
        if self.normed and self.bias:
            raise PtxgenError("router_logits: a bias comes after the factors of a norm")
        if not self.takes(self.cols):
            raise PtxgenError(f"router_logits: {self.cols} columns: a multiple of 4")
        if not 1 <= self.splits <= self.steps or self.step_of(self.splits - 1) >= self.steps:
            raise PtxgenError(f"router_logits: {self.splits} splits of {self.steps} steps")
        if 4 * self.rows * self.cols >= 2**32 or self.layout.nbytes >= 2**32:
            raise PtxgenError(f"router_logits: {self.rows} x {self.cols} values exceed 4 GiB")

    @staticmethod
    def takes(cols: int) -> bool:
        """Whether rows of x can be read in vectors of four."""
        return cols >= 4 and cols % 4 == 0

    @cached_property
    def layout(self) -> Layout:
        """How the weights lie in memory."""
        return Layout(FORMATS["F32"], self.experts, self.cols)

    @property
    def steps(self) -> int:
        """Steps in which a CTA goes through the columns."""
        return ceil_div(self.cols, STEP)

    def step_of(self, split: int) -> int:
        """The first step of a split."""
        return split * ceil_div(self.steps, self.splits)

    @classmethod
    def splits_for(cls, rows: int, experts: int, cols: int, sms: int) -> int:
        """Splits for a CTA on each SM, at most; the last may have fewer steps."""
        ctas = ceil_div(rows, CTA_ROWS) * ceil_div(experts, CTA_EXPERTS)
        steps = ceil_div(cols, STEP)
        most = max(1, min(MOST_SPLITS, sms // ctas, steps))
        return ceil_div(steps, ceil_div(steps, most))

    @property
    def params(self) -> tuple[Param, ...]:
        of_splits = ("splits",) if self.splits > 1 else ()
        return Param.given(
            Param("weights", "u8", (self.layout.nbytes,), Access.IN),
            Param("x", "f32", ("rows", "cols"), Access.IN),
            self.bias and Param("bias", "f32", ("experts",), Access.IN),
            self.normed and Param("norm", "f32", ("cols",), Access.IN),
            Param("logits", "f32", (*of_splits, "rows", "experts"), Access.OUT),
            self.normed and Param("squares", "f32", ("splits", "rows"), Access.OUT),
        )

    @property
    def launch_shape(self) -> LaunchShape:
        grid = (ceil_div(self.rows, CTA_ROWS), ceil_div(self.experts, CTA_EXPERTS), self.splits)
        return LaunchShape(grid=grid, block=(32 * WARPS, 1, 1))

    @property
    def tolerance(self) -> Tolerance:
        """That of `RouteExperts`."""
        return Tolerance(rtol=5e-6, atol=2e-6)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        weights = self.layout.unpack(inputs["weights"]).astype(np.float64)
        x, logits = inputs["x"].astype(np.float64), np.zeros((self.splits, self.rows, self.experts))
        squares, given = np.zeros((self.splits, self.rows)), x
        if self.normed:
            x = x * inputs["norm"]
        for split in range(self.splits):
            part = slice(*(STEP * self.step_of(number) for number in (split, split + 1)))
            squares[split] = np.square(given[:, part]).sum(axis=1)
            logits[split] = self.scale * (x[:, part] @ weights[:, part].T)
        if self.bias:
            logits[0] += inputs["bias"]
        made = {"logits": logits.astype(np.float32)[... if self.splits > 1 else 0]}
        return made if not self.normed else made | {"squares": squares.astype(np.float32)}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        shape = (self.experts, self.cols)
        weights = (rng.standard_normal(shape) / self.cols**0.5).astype(np.float32)
        inputs = {"weights": self.layout.pack(weights)}
        for p in self.params[1:]:
            if p.access is Access.IN:
                inputs[p.name] = rng.standard_normal(self.shape_of(p)).astype(np.float32)
        return inputs

    @classmethod
    def examples(cls) -> dict[str, RouterLogits]:
        return {
            "smallest": cls(1, 1, 4),
            "one tile": cls(16, 32, 128),
            "odd": cls(37, 41, 388, bias=True, scale=0.5),
            "several steps": cls(9, 17, 640),
            "gpt-oss": cls(18, 32, 1028, bias=True),
            "many experts": cls(5, 130, 260),
            "splits": cls(18, 41, 640, bias=True, scale=0.5, splits=3),
            "norm": cls(19, 41, 388, normed=True),
            "norm, splits": cls(35, 41, 640, scale=0.5, splits=3, normed=True),
        }

    def bytes_moved(self) -> int:
        """Without the row powers, which are not read."""
        return super().bytes_moved() - self.layout.powers_nbytes

    def flops(self) -> int:
        return 2 * self.rows * self.experts * self.cols
