"""Vectors of pairs of rows and experts, with columns in the orders of the experts' weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.column_orders import ORDER, in_orders, random_orders
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.kernels.pairs import random_choice
from urdir.ptxgen.limits import POSITIVE, limited
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, Tolerance, ceil_div

CTA_THREADS = 128
#: Columns of a row that is normalised, at most: 32 KiB.
MOST_NORMED = 8192
#: Columns of a thread: those of a vector load.
THREAD_COLS = 4


@dataclass(frozen=True)
class ReorderExperts(KernelSpec):
    """y[r, s, c] = v[r, order[e, c]] with e = expert[r, s], v the rows of x (rows, cols) f32, or
    with a ``norm`` (`can_norm`) the normalised rows, with its ``weight`` (cols,) f32.
    order (experts, cols) f32: column numbers; one of ``cols`` or more gives a zero. The vectors of
    expert numbers from ``experts`` on, those of padding rows, stay as they are.

    Raises PtxgenError unless ``cols`` is a multiple of four.
    """

    rows: int
    experts: int
    used: int
    cols: int
    norm: Norm | None = None

    name = "reorder_experts"
    limits = limited(rows=POSITIVE, used=POSITIVE, cols=range(THREAD_COLS, 1 << 30, THREAD_COLS))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.experts * self.cols >= 1 << 30:
            raise PtxgenError(
                f"{self.name}: {self.experts} orders of {self.cols} columns: under 4 GiB of them"
            )
        if self.used > self.experts:
            raise PtxgenError(f"{self.name}: {self.used} of {self.experts} experts")
        if self.norm is not None and not self.can_norm(self.norm, self.cols):
            raise PtxgenError(f"{self.name}: {self.norm} must be a launch of its own")

    @staticmethod
    def can_norm(norm: Norm, cols: int) -> bool:
        """Whether a CTA computes it, of a row in its shared memory."""
        return norm.is_factor and cols <= MOST_NORMED

    @property
    def params(self) -> tuple[Param, ...]:
        return Param.given(
            Param("x", "f32", ("rows", "cols"), Access.IN),
            Param("expert", "u32", ("rows", "used"), Access.IN),
            *ORDER,
            self.norm and self.norm.weight and Param("weight", "f32", ("cols",), Access.IN),
            Param("y", "f32", ("rows", "used", "cols"), Access.OUT),
        )

    @property
    def launch_shape(self) -> LaunchShape:
        parts = ceil_div(self.cols, CTA_THREADS * THREAD_COLS)
        return LaunchShape(grid=(self.rows * self.used, parts, 1), block=(CTA_THREADS, 1, 1))

    @property
    def tolerance(self) -> Tolerance:
        """Bit for bit; the sum of a norm is rounded."""
        return Tolerance(rtol=0 if self.norm is None else 1e-5)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        x = inputs["x"]
        if self.norm is not None:
            x = self.norm(x, inputs.get("weight"))
        return {"y": in_orders(x[:, None], inputs["expert"], inputs).astype(np.float32)}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Any orders, of several columns the last number beyond them."""
        inputs = {
            "x": rng.standard_normal((self.rows, self.cols)).astype(np.float32),
            "expert": random_choice(rng, self.rows, self.experts, self.used),
            "order": random_orders(self.experts, self.cols, rng),
            "weight": rng.standard_normal(self.cols).astype(np.float32),
        }
        return {p.name: inputs[p.name] for p in self.params if p.name in inputs}

    @classmethod
    def examples(cls) -> dict[str, ReorderExperts]:
        rms = Norm("rms", 1e-5)
        return {
            "smallest": cls(1, 1, 1, 4),
            "one row": cls(1, 7, 3, 516, rms),
            "rows": cls(5, 6, 2, 1028),
            "rms of 8192": cls(1, 3, 2, 8192, rms),
            "rms": cls(3, 5, 4, 1284, rms),
            "rms without weight": cls(2, 3, 1, 96, Norm("rms", 0.1, weight=False)),
        }
