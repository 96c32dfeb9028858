"""The end of a block whose result is normalised, left packed for the next one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.pack import Pack
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, Tolerance, ceil_div
from urdir.ptxgen.weights.packed import GROUP, pack
from urdir.ptxgen.weights.packed_few import Order, few_shape, with_few


@dataclass(frozen=True)
class PackAfter(KernelSpec):
    """total = residual + scale * after(x), and y = total, or the ``norm`` of it, as f16, packed as
    `Pack` does.

    x, residual and total (rows, cols) f32; ``after_weight``, ``after_bias``, ``weight`` and
    ``bias`` (cols,) f32, if the norms have them. total may be the residual.

    ``order``: up to eight rows are packed as `GemmSmall` takes them (`weights.packed_few`), and
    vectors beyond them stay as they are.

    Raises PtxgenError for columns that `Pack.can_norm` refuses, and more rows of an ``order``.
    """

    rows: int
    cols: int
    after: Norm
    norm: Norm | None = None
    scale: float = 1.0
    order: Order | None = None

    name = "pack_after"

    def __post_init__(self) -> None:
        if self.order is not None and self.packing.rows > GROUP:
            raise PtxgenError(f"{self.name}: {self.rows} rows by {self.order}: up to {GROUP}")
        _ = self.packing

    @cached_property
    def packing(self) -> Pack:
        """The same without the end of the block; threads are those of a norm."""
        return Pack(self.rows, self.cols, self.norm or self.after)

    # ---- read by the macros of `Pack` ----

    @property
    def cta_rows(self) -> int:
        """Rows of a CTA."""
        return self.packing.cta_rows

    @property
    def warps(self) -> int:
        """Warps of a CTA."""
        return self.packing.warps

    @property
    def has_idle(self) -> bool:
        """Whether some threads have no columns."""
        return self.packing.has_idle

    @property
    def centres(self) -> bool:
        """Whether a mean is subtracted."""
        return any(norm and norm.kind == "layer" for norm in (self.after, self.norm))

    @property
    def params(self) -> tuple[Param, ...]:
        matrix, after, norm = ("rows", "cols"), self.after, self.norm
        (y,) = (p for p in self.packing.params if p.name == "y")
        if self.order is not None:
            y = Param("y", "f16", few_shape(self.cols), Access.INOUT)
        return Param.given(
            Param("x", "f32", matrix, Access.IN),
            after.weight and Param("after_weight", "f32", ("cols",), Access.IN),
            after.bias and Param("after_bias", "f32", ("cols",), Access.IN),
            Param("residual", "f32", matrix, Access.IN),
            norm and norm.weight and Param("weight", "f32", ("cols",), Access.IN),
            norm and norm.bias and Param("bias", "f32", ("cols",), Access.IN),
            Param("total", "f32", matrix, Access.OUT),
            y,
        )

    @property
    def launch_shape(self) -> LaunchShape:
        if self.order is None:
            return self.packing.launch_shape
        grid = (1, ceil_div(self.rows, self.cta_rows), 1)
        return replace(self.packing.launch_shape, grid=grid)

    @property
    def tolerance(self) -> Tolerance:
        """That of f16 after another rounding."""
        return self.packing.tolerance

    def reference(self, **inputs: Any) -> dict[str, Array]:
        weights = (inputs.get("after_weight"), inputs.get("after_bias"))
        total = inputs["residual"] + self.scale * self.after(inputs["x"], *weights)
        y = total
        if self.norm is not None:
            y = self.norm(total, inputs.get("weight"), inputs.get("bias"))
        packed = pack(y) if self.order is None else with_few(inputs["y"], y, self.order)
        return {"total": total.astype(np.float32), "y": packed}

    @classmethod
    def examples(cls) -> dict[str, PackAfter]:
        rms, layer = Norm("rms", 1e-5), Norm("layer", 1e-5, bias=True)
        return {
            "rms": cls(8, 256, rms, Norm("rms", 1e-6)),
            "odd rows, scaled": cls(11, 1284, rms, rms, scale=0.25),
            "8448 columns": cls(9, 8448, rms, rms),
            "without weights": cls(3, 20, Norm("rms", 0.1, weight=False), rms),
            "layers": cls(5, 900, layer, layer),
            "no norm": cls(10, 516, rms),
            "layer, no norm": cls(8, 512, layer, scale=0.5),
            "eight by units": cls(8, 768, rms, rms, order="units"),
            "three by lanes": cls(3, 1284, rms, rms, scale=0.5, order="lanes"),
            "one by units": cls(1, 500, layer, order="units"),
            "layer, then rms": cls(16, 1280, layer, rms, scale=2.0),
        }

    def flops(self) -> int:
        return 10 * self.packing.launched * self.cols
