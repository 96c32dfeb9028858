"""Begin the norm that follows a product."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.epilogue.pack import PackedOutput, PackedVectors
from urdir.ptxgen.kernels.linear.epilogue.residual import Residual
from urdir.ptxgen.kernels.linear.steps import Epilogue, Product, Reference
from urdir.ptxgen.kernels.summary import PACKED_SUMMARY, SUMMARY, packed_squares, summary
from urdir.ptxgen.spec import Access, Array, Param
from urdir.ptxgen.weights.layout import TILE_COLS


@dataclass(frozen=True, slots=True)
class BeginNorm(Epilogue):
    """The RMSNorm that follows is begun: ``scaled`` is y times its weights ``next_norm``, and
    ``y_summary`` has of every 16 values the largest of these, and the sum of the squares of y.

    Every CTA of the next product rounds all of x; the summary halves that work. For a packed x the
    squares suffice; of many packed vectors (`PackedVectors`) they are those of every 32 values in
    the packed order. The next product then has a `BegunNorm`.
    """

    stem = "begin_norm"

    @property
    def text(self) -> str:
        return "scaled: y * next_norm (rows); y_summary: see linear/epilogue/_begin_norm.j2"

    def check(self, product: Product) -> None:
        if not product.steps.has(Residual):
            raise PtxgenError(f"{product.name}: begin_norm is for what has a residual")
        if product.packs_many and not product.steps.has(PackedVectors):
            raise PtxgenError(f"{product.name}: begin_norm is for packed_vectors")
        whole = TILE_COLS if product.steps.has(PackedVectors) else SUMMARY
        if product.rows % whole:
            raise PtxgenError(
                f"{product.name}: begin_norm of {product.rows} rows: multiples of {whole}"
            )

    def params(self, product: Product) -> tuple[Param, ...]:
        if product.steps.has(PackedVectors):
            shape = (1, "batch", product.rows // PACKED_SUMMARY)
        else:
            shape = (1 if product.steps.has(PackedOutput) else 2, "batch", product.rows // SUMMARY)
        return (
            Param("next_norm", "f32", ("rows",), Access.IN),
            Param("scaled", "f32", ("batch", "rows"), Access.OUT),
            Param("y_summary", "f32", shape, Access.OUT),
        )

    def apply(self, y: Array, of: Reference) -> Array:
        made = y.astype(np.float32)
        of.outputs["scaled"] = made * of.inputs["next_norm"]
        if of.product.steps.has(PackedVectors):
            of.outputs["y_summary"] = packed_squares(made)
            return y
        planes = summary(of.outputs["scaled"], made)
        of.outputs["y_summary"] = planes[1:] if of.product.steps.has(PackedOutput) else planes
        return y
