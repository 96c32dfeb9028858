"""Few rows, of which those with the same expert read its matrices together, four at a time."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from urdir.model.lower.arguments import without_none
from urdir.model.lower.experts.layer import MixtureLayer
from urdir.model.lower.experts.products import (
    ExpertProducts,
    MixtureCall,
    Product,
    mixture_products,
)
from urdir.model.memory.norms import NormLayer
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.experts.choice import most_warps, pays_together
from urdir.ptxgen.kernels.experts.gemm_small import ExpertsGemmSmall
from urdir.ptxgen.kernels.experts.selection import MAX_USED, Selection
from urdir.ptxgen.kernels.linear.epilogue.weighted import Weighted
from urdir.ptxgen.kernels.linear.prologue.norm import Normed
from urdir.ptxgen.kernels.linear.steps import Step

if TYPE_CHECKING:
    from urdir.driver.memory import Slice


class SharedRead(ExpertProducts):
    """Products of `ExpertsGemmSmall`, where it `serves`."""

    __slots__ = ()

    def serves(
        self, mixture: MixtureLayer, norm: NormLayer | None, choice: Selection | None
    ) -> bool:
        """Whether `ExpertsGemmSmall` serves, and pays."""
        if mixture.state is not None or not self.pays(mixture):
            return False
        products = mixture_products(mixture)
        return all(self._small(mixture, product, norm, choice) is not None for product in products)

    def pays(self, mixture: MixtureLayer) -> bool:
        """Whether it would pay, if it serves."""
        selection = mixture.selection
        matrices = [m for m in (mixture.gate, mixture.up, mixture.down) if m is not None]
        nbytes = sum(m.layout.nbytes for m in matrices) // mixture.held
        few = (self.rows, selection.experts, selection.used)
        return not self.at.exact and pays_together(*few, nbytes)

    def append(self, call: MixtureCall) -> None:
        """See `append_experts`."""
        if call.norm is not None and not (call.norm.norm.is_factor and call.takes_norm):
            call = call.after_norm(self.at, self.rows)
        mixture = call.mixture

        def multiply(label: str, product: Product, to: Slice) -> None:
            norm = None if product.is_ordered else call.norm
            self._append_small(label, call, product, self.vectors(label, call, product), norm, to)

        self.append_activated(call, multiply)
        activated, out = self.work["expert gate"], self.work["expert out"]
        down = mixture_products(mixture)[-1]
        slots = self._append_small(f"{call.label}_down", call, down, activated, None, out)
        self.append_combined(call, slots)

    def _append_small(
        self,
        label: str,
        call: MixtureCall,
        product: Product,
        x: Slice,
        norm: NormLayer | None,
        y: Slice,
    ) -> int:
        """Returns how many products of a row there are in y."""
        kernel = self._small(call.mixture, product, norm, call.selection)
        assert kernel is not None  # as `serves` found
        weighted = kernel.steps.has(Weighted) and call.selection is None
        weight = self.work["expert weight"] if weighted else None
        self.at.plan.launch(
            kernel,
            label,
            **self.choice(call),
            **self.positions(call),
            x=x,
            y=y,
            **without_none(weight=weight, norm=None if norm is None else norm.weight),
            **product.arguments,
        )
        return kernel.slots

    def _small(
        self,
        mixture: MixtureLayer,
        product: Product,
        norm: NormLayer | None,
        choice: Selection | None,
    ) -> ExpertsGemmSmall | None:
        """The kernel, if there is one; a norm that it does not take comes before it."""
        selection, matrix, down = mixture.selection, product.matrix, product.is_down
        computes = norm is not None and not (down or product.is_ordered) and norm.norm.is_factor
        return _small_fitted(
            *([Normed(norm.norm)] if norm is not None and computes else []),
            *product.epilogue,
            shared=self.at.limits.shared_per_cta,
            format=matrix.format,
            experts=mixture.held,
            used=selection.used,
            rows=matrix.rows // mixture.held,
            cols=matrix.cols,
            batch=self.rows,
            down=down,
            warps=most_warps(self.at.limits.target, matrix.format),
            early=down,  # the products before it have waited for the router
            sms=self.at.limits.sms,
            selection=choice,
            by_pair=product.is_ordered,
        )


@lru_cache(maxsize=256)
def _small_fitted(*steps: Step, **fields: Any) -> ExpertsGemmSmall | None:
    """The kernel, if need be with split columns; None if it does not fit."""
    for splits in range(1, MAX_USED // fields["used"] + 1 if fields["down"] else 2):
        try:
            kernel = ExpertsGemmSmall.of(*steps, splits=splits, **fields)
        except PtxgenError:
            continue
        if kernel.memory.fits:
            return kernel
    return None
