"""Norms of rows: RMSNorm and LayerNorm, before a block, after it, or both at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.kernels.row_threads import RowThreads
from urdir.ptxgen.limits import POSITIVE, limited, up_to
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, Tolerance

#: Maximum columns of a row: its code is unrolled.
MAX_COLS = 1 << 20


@dataclass(frozen=True)
class Normalise(RowThreads, KernelSpec):
    """A norm of each row, and what follows it: y = (residual +) scale * norm(x). If ``norm`` is
    None, y = residual + scale * x, and a norm follows.

    With ``weight_rows`` more than 1, row r has weight and bias number r % weight_rows: heads with
    separate weights. ``then`` is the norm of the next block, in the same launch: z = then(y), with
    ``next_weight`` and ``next_bias``.
    """

    rows: int
    cols: int
    norm: Norm | None
    residual: bool = False
    scale: float = 1.0
    weight_rows: int = 1
    then: Norm | None = None

    name = "normalise"
    #: The code of a row is unrolled.
    limits = limited(rows=POSITIVE, cols=up_to(MAX_COLS))
    tolerance = Tolerance(rtol=2e-6)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.norm is None and not (self.residual and self.then):
            raise PtxgenError("normalise: without a norm it takes a residual and the next norm")
        if self.weight_rows < 1 or (self.weight_rows > 1 and not self.weighted):
            raise PtxgenError(f"normalise: {self.weight_rows} rows of weights of {self.norm}")

    @property
    def weighted(self) -> bool:
        """Whether the first norm has weights."""
        return self.norm is not None and self.norm.weight

    @property
    def params(self) -> tuple[Param, ...]:
        weights = ("cols",) if self.weight_rows == 1 else ("weight_rows", "cols")
        matrix, norm, then = ("rows", "cols"), self.norm, self.then
        return Param.given(
            Param("x", "f32", matrix, Access.IN),
            self.weighted and Param("weight", "f32", weights, Access.IN),
            norm and norm.bias and Param("bias", "f32", weights, Access.IN),
            self.residual and Param("residual", "f32", matrix, Access.IN),
            then and then.weight and Param("next_weight", "f32", ("cols",), Access.IN),
            then and then.bias and Param("next_bias", "f32", ("cols",), Access.IN),
            Param("y", "f32", matrix, Access.OUT),
            then and Param("z", "f32", matrix, Access.OUT),
        )

    @property
    def held(self) -> bool:
        """Whether a thread keeps its values in registers between passes, or rereads them."""
        return self.vector * self.steps <= 16

    @property
    def few(self) -> bool:
        """Whether a thread's values of every array fit registers."""
        return self.vector * self.steps <= 8

    @property
    def centres(self) -> bool:
        """Whether a mean is subtracted."""
        return any(norm and norm.kind == "layer" for norm in (self.norm, self.then))

    @property
    def shared_sums(self) -> tuple[str, ...]:
        """Shared memory arrays of the warps' sums: one per sum, so that none is written while it is
        read."""
        names = []
        for norm, suffix in ((self.norm, ""), (self.then, "_next")):
            if norm is not None:
                names += ["sums" + suffix] if norm.kind == "layer" else []
                names.append("partial" + suffix)
        return tuple(names)

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(grid=(self.rows, 1, 1), block=(32 * self.warps, 1, 1))

    def reference(self, **inputs: Any) -> dict[str, Array]:
        rows = np.arange(self.rows) % self.weight_rows
        weight, bias = (
            None if array is None else array.reshape(self.weight_rows, self.cols)[rows]
            for array in (inputs.get("weight"), inputs.get("bias"))
        )
        x = inputs["x"].astype(np.float64)
        y = self.scale * (x if self.norm is None else self.norm(inputs["x"], weight, bias))
        if self.residual:
            y += inputs["residual"]
        outputs = {"y": y.astype(np.float32)}
        if self.then is not None:
            z = self.then(y, inputs.get("next_weight"), inputs.get("next_bias"))
            outputs["z"] = z.astype(np.float32)
        return outputs

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Rows of a layer norm have means other than 0."""
        inputs = super().make_inputs(rng)
        if self.norm is not None and self.norm.kind == "layer":
            inputs["x"] += rng.standard_normal((self.rows, 1)).astype(np.float32)
        return inputs

    @classmethod
    def examples(cls) -> dict[str, Normalise]:
        rms, fine = Norm("rms", 1e-5), Norm("rms", 1e-6)
        plain, layer = Norm("rms", 1e-5, weight=False), Norm("layer", 1e-5, bias=True)
        return {
            "one short row": cls(rows=1, cols=7, norm=rms),
            "short rows": cls(rows=3, cols=64, norm=fine),
            "odd columns": cls(rows=2, cols=257, norm=rms),
            "4096 columns": cls(rows=1, cols=4096, norm=rms),
            "16380 columns": cls(rows=2, cols=16380, norm=rms),
            "16389 columns": cls(rows=1, cols=16389, norm=rms),
            "20484 columns": cls(rows=2, cols=20484, norm=rms),
            "no weight": cls(rows=2, cols=70, norm=plain),
            "layer": cls(rows=2, cols=7, norm=layer),
            "layer of 1030 columns": cls(rows=2, cols=1030, norm=layer, residual=True),
            "layer, no bias": cls(rows=1, cols=260, norm=Norm("layer", 1e-6), scale=0.5),
            "layer, no weight": cls(rows=3, cols=33, norm=Norm("layer", 1e-5, weight=False)),
            "layer of 16389 columns": cls(rows=1, cols=16389, norm=layer),
            "heads": cls(rows=6, cols=20, norm=rms, weight_rows=3),
            "heads of a layer norm": cls(rows=4, cols=9, norm=layer, weight_rows=2),
            "after a block": cls(rows=2, cols=68, norm=fine, residual=True, scale=0.25),
            "after and before": cls(rows=2, cols=516, norm=rms, residual=True, then=fine),
            "layers after and before": cls(rows=1, cols=301, norm=layer, residual=True, then=layer),
            "other norms": cls(rows=2, cols=40, norm=plain, scale=3.0, then=Norm("layer", 1e-5)),
            "sum and norm": cls(rows=3, cols=516, norm=None, residual=True, then=rms),
            "scaled sum and layer norm": cls(
                rows=2, cols=301, norm=None, residual=True, scale=0.25, then=layer
            ),
            "sum and norm, 16388 columns": cls(
                rows=1, cols=16388, norm=None, residual=True, then=fine
            ),
            "after and before, 8192 columns": cls(
                rows=1, cols=8192, norm=layer, residual=True, then=layer
            ),
            "after and before, 16388 columns": cls(
                rows=1, cols=16388, norm=rms, residual=True, then=rms
            ),
        }

    def flops(self) -> int:
        return (8 if self.then else 4) * self.rows * self.cols
