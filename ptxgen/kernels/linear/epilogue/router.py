"""The parts of a router's logits that the CTAs of the product before it make of their own rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.epilogue.residual import Residual
from urdir.ptxgen.kernels.linear.steps import Epilogue, Product, Reference
from urdir.ptxgen.spec import Access, Array, Param, ceil_div
from urdir.ptxgen.weights.formats import FORMATS
from urdir.ptxgen.weights.layout import Layout

#: Registers of a thread for the router's weights, at most.
MOST_WEIGHTS = 16


@dataclass(frozen=True, slots=True)
class RouterParts(Epilogue):
    """Logits of ``experts`` for y, in parts: CTA c has the sums over its own rows r of the router's
    ``router`` (experts, rows) F32 times y[r], in ``logit_parts`` (CTAs, experts) f32. With an
    RMSNorm between (``normed``) y is multiplied with its weights ``next_norm`` (rows,) first, and
    ``square_parts`` (CTAs,) has the sums of the squares of y.

    The launch that reads the logits adds up the parts (`LogitParts`): there is none for the router.
    """

    experts: int
    normed: bool = True

    stem = "router_parts"

    @property
    def text(self) -> str:
        norm = " * next_norm" if self.normed else ""
        return f"logit_parts: router * (y{norm}) of a CTA's rows; square_parts: of y"

    def check(self, product: Any) -> None:
        if product.batch != 1 or not product.steps.has(Residual) or product.others:
            raise PtxgenError(f"{product.name}: router_parts is for one vector with a residual")
        if product.cluster > 1 or product.cut.rows.passes > 1:
            raise PtxgenError(f"{product.name}: router_parts is for one CTA's rows of one pass")
        rows = product.cut.own_rows
        if rows & (rows - 1) or rows > 128 or product.rows % rows:
            raise PtxgenError(
                f"{product.name}: router_parts of {product.rows} rows, {rows} a CTA: "
                "a power of two, 128 at most, of which the rows are a multiple"
            )
        if product.cut.columns.warps < 2:
            raise PtxgenError(f"{product.name}: router_parts needs the room of two sums a row")
        if self.weights(product) > MOST_WEIGHTS:
            raise PtxgenError(f"{product.name}: router_parts of {self.experts} experts: too many")

    def weights(self, product: Any) -> int:
        """Weights of the router in a thread's registers."""
        return 4 * ceil_div(self.experts * product.cut.own_rows // 4, 32 * product.cut.warps)

    def layout(self, product: Product) -> Layout:
        """How the router lies in memory."""
        return Layout(FORMATS["F32"], self.experts, product.rows)

    def count(self, product: Any) -> int:
        """CTAs with rows."""
        return int(product.rows // product.cut.own_rows)

    def params(self, product: Product) -> tuple[Param, ...]:
        count = self.count(product)
        router = Param("router", "u8", (self.layout(product).nbytes,), Access.IN)
        parts = Param("logit_parts", "f32", (count, self.experts), Access.OUT)
        if not self.normed:
            return (router, parts)
        norm = Param("next_norm", "f32", ("rows",), Access.IN)
        return (router, norm, parts, Param("square_parts", "f32", (count,), Access.OUT))

    def make_inputs(self, product: Product, rng: np.random.Generator) -> dict[str, Any]:
        weights = rng.standard_normal((self.experts, product.rows)) / product.rows**0.5
        return {"router": self.layout(product).pack(weights.astype(np.float32))}

    def apply(self, y: Array, of: Reference) -> Array:
        count, rows = self.count(of.product), y.reshape(-1)
        weights = self.layout(of.product).unpack(of.inputs["router"]).astype(np.float64)
        scaled = rows * of.inputs["next_norm"] if self.normed else rows
        parts = (weights * scaled).reshape(self.experts, count, -1).sum(axis=2).T
        of.outputs["logit_parts"] = parts.astype(np.float32)
        if self.normed:
            squares = (rows**2).reshape(count, -1).sum(axis=1)
            of.outputs["square_parts"] = squares.astype(np.float32)
        return y
