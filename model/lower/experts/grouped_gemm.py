"""Many rows, grouped by expert first: each expert is multiplied with all of its rows."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from urdir.model.lower.arguments import without_none
from urdir.model.lower.experts.layer import MixtureLayer
from urdir.model.lower.experts.packed import PackedExperts
from urdir.model.lower.experts.products import (
    ExpertProducts,
    MixtureCall,
    Product,
    mixture_products,
)
from urdir.model.lower.requests import alike
from urdir.ptxgen.kernels.experts.gemm import ExpertsGemm, tile_height
from urdir.ptxgen.kernels.experts.group import GroupExperts
from urdir.ptxgen.kernels.linear.packed_choice import packs_mixtures

if TYPE_CHECKING:
    from urdir.driver.memory import Slice

# One object for equal kernels, with its cached properties.
_gemm = lru_cache(maxsize=256)(ExpertsGemm.of)
_group = lru_cache(maxsize=64)(GroupExperts)


class GroupedGemm(ExpertProducts):
    """Products of rows in the order of their experts (`GroupExperts`)."""

    __slots__ = ()

    def append(self, call: MixtureCall) -> None:
        """See `append_experts`."""
        if not call.factored:
            call = call.after_norm(self.at, self.rows)
        label, mixture, x = call.label, call.mixture, call.x
        plan, work, selection = self.at.plan, self.work, mixture.selection
        if call.adapters is None and self.packs(mixture):
            packed = PackedExperts(plan, work, self.rows, self.at.limits.sms)
            packed.append(label, mixture, x, call.norm)
            self.append_combined(call, selection.used)
            return
        formats = [product.matrix.format for product in mixture_products(mixture)]
        height = tile_height(self.rows, selection.experts, selection.used, formats)
        group = _group(self.rows, selection.experts, selection.used, height)
        grouped = {"pair": work["expert pair"], "tile_of": work["expert tiles"]}
        plan.launch(group, f"{label}.group", expert=work[mixture.number], **grouped)

        def multiply(name: str, product: Product, to: Slice) -> None:
            self._append_gemm(name, mixture, product, height, self.vectors(name, call, product), to)

        self.append_activated(call, multiply)
        activated, out, down = (
            work["expert gate"],
            work["expert out"],
            mixture_products(mixture)[-1],
        )
        self._append_gemm(f"{label}_down", mixture, down, height, activated, out)
        self.append_combined(call, selection.used)

    def packs(self, mixture: MixtureLayer) -> bool:
        """Whether its products take packed activations (`GemmWgmma`)."""
        gate, up = mixture.gate, mixture.up
        together = gate is None or alike(gate, up)
        matrices = (up, mixture.down, *(() if gate is None else (gate,)))
        formats = tuple(matrix.format for matrix in matrices)
        fits = packs_mixtures(self.at.limits, formats)
        return together and fits and self.at.takes_gemm(self.rows)

    def _append_gemm(
        self,
        label: str,
        mixture: MixtureLayer,
        product: Product,
        height: int,
        x: Slice,
        y: Slice,
    ) -> None:
        selection, matrix = mixture.selection, product.matrix
        rows = matrix.rows // selection.experts
        shape = (matrix.format, selection.experts, selection.used, rows, matrix.cols, self.rows)
        ways = {"down": product.is_down, "by_pair": product.is_ordered}
        kernel = _gemm(*shape, height, *product.epilogue, **ways)
        self.at.plan.launch(
            kernel,
            label,
            pair=self.work["expert pair"],
            tile_of=self.work["expert tiles"],
            x=x,
            y=y,
            **without_none(weight=self.work["expert weight"] if product.weighted else None),
            **product.arguments,
        )
