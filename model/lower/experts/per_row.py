"""Few rows, each of which reads the matrices of its experts, as a decode step of one does."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from urdir.model.lower.arguments import without_none
from urdir.model.lower.experts.products import (
    ExpertProducts,
    MixtureCall,
    Product,
    mixture_products,
)
from urdir.model.memory.weights import Matrix
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.experts.down import ExpertsDown
from urdir.ptxgen.kernels.experts.held import Held
from urdir.ptxgen.kernels.experts.tiled import ExpertsSpec, fits
from urdir.ptxgen.kernels.experts.up import ExpertsUp
from urdir.ptxgen.kernels.linear.epilogue.residual import Residual
from urdir.ptxgen.kernels.linear.prologue.norm import Normed
from urdir.ptxgen.kernels.linear.steps import Step

if TYPE_CHECKING:
    from urdir.driver.memory import Slice

_Kernel = TypeVar("_Kernel", bound=ExpertsSpec)
#: Bytes of shared memory of a CTA at most and at least, and CTAs that an SM has registers for.
Share = tuple[int, int, int]
#: CTAs of a grid in its second dimension.
MAX_GRID = 65535


class PerRow(ExpertProducts):
    """A product for each pair of a row and one of its experts."""

    __slots__ = ()

    def append(self, call: MixtureCall) -> None:
        """See `append_experts`."""
        if call.adapters is not None:
            call = call.after_norm(self.at, self.rows)

        def multiply(label: str, product: Product, to: Slice) -> None:
            self._append_up(label, call, product, to)

        self.append_activated(call, multiply)
        residual, mixture = call.residual, call.mixture
        kernel, down = self.down(call), mixture_products(mixture)[-1]
        weighted = down.weighted and call.selection is None
        self.at.plan.launch(
            kernel,
            f"{call.label}_down",
            **self.choice(call),
            **self.positions(call),
            x=self.work["expert gate"],
            y=call.y,
            **without_none(
                weight=self.work["expert weight"] if weighted else None,
                residual=residual,
                state=mixture.state,
                gate=None if mixture.shared is None else self.work["shared gate"],
            ),
            **down.arguments,
        )

    def down(self, call: MixtureCall) -> ExpertsDown:
        """The kernel of the last product."""
        mixture, down = call.mixture, mixture_products(call.mixture)[-1]
        return self._fitted(
            ExpertsDown,
            self.rows == 1,
            mixture.numbered,
            mixture.used,
            down.matrix,
            *down.epilogue,
            *([Residual()] if call.residual is not None else []),
            batch=self.rows,
            early=True,  # the products before it have waited for the router
            # On an H200 a step of one row of qwen3-30b-a3b takes 952 us so, else 958.
            starts_next=self.rows == 1 and mixture.cache is None,
            selection=call.selection,
            logit_parts=call.logit_parts,
            held=mixture.cache,
            has_shared=mixture.shared is not None,
        )

    def _append_up(self, label: str, call: MixtureCall, product: Product, y: Slice) -> None:
        norm, mixture, matrix = call.norm, call.mixture, product.matrix
        steps = (*([Normed(norm.norm)] if norm is not None else []), *product.epilogue)
        kernel = self._fitted(
            ExpertsUp,
            self.rows > 1,
            mixture.numbered,
            mixture.used,
            matrix,
            *steps,
            batch=self.rows,
            selection=call.selection,
            logit_parts=call.logit_parts,
            held=None if mixture.cache is None else replace(mixture.cache, tells=True),
            has_shared=mixture.shared is not None,
        )
        weight = self.work["expert weight"] if product.weighted else None
        norms = {} if norm is None else without_none(norm=norm.weight, norm_bias=norm.bias)
        self.at.plan.launch(
            kernel,
            label,
            **self.choice(call),
            **self.positions(call),
            x=call.x,
            y=y,
            **without_none(weight=weight, state=mixture.state),
            **norms,
            **product.arguments,
        )

    def append_in_turn(self, label: str, matrix: Matrix, heads: int, x: Slice, y: Slice) -> None:
        """y (rows, heads, out) = the matrix (out, in) of each head times x (rows, heads, in)."""
        rows, most = matrix.rows // heads, MAX_GRID // heads
        for first in range(0, self.rows, most):
            count = min(most, self.rows - first)
            larger, batch = self.rows > 1, count * heads
            kernel = self._fitted(ExpertsUp, larger, heads, 1, matrix, batch=batch, in_turn=True)
            parts = [
                at.slice(4 * first * heads * width, 4 * count * heads * width)
                for at, width in ((x, matrix.cols), (y, rows))
            ]
            suffix = f" rows {first}" if self.rows > most else ""
            self.at.plan.launch(kernel, label + suffix, weights=matrix.data, x=parts[0], y=parts[1])

    def _fitted(
        self,
        kind: type[_Kernel],
        larger: bool,
        experts: int,
        used: int,
        matrix: Matrix,
        *steps: Step,
        **fields: Any,
    ) -> _Kernel:
        """The kernel for the matrices of all experts, with the ``larger`` share of an SM or the
        smaller one."""
        rounding = "f32" if self.at.exact or matrix.format.arithmetic != "integers" else "i16"
        held: Held | None = fields.get("held")
        rows = matrix.rows // (experts if held is None else held.slots)
        shape = (matrix.format, experts, used, rows, matrix.cols)
        fields |= {"activations": rounding, "sms": self.at.limits.sms}
        found: _Kernel = _fitted(
            kind,  # type: ignore[arg-type]  # mypy takes no class for hashable
            self._shares(larger),
            *shape,
            *steps,
            **fields,
        )
        return found

    def _shares(self, larger: bool) -> tuple[Share, Share]:
        """The share of an SM that linear launches have, and all of it."""
        limits = self.at.limits
        least, most = limits.shared(larger)
        return (most, least, limits.resident), (limits.shared_per_cta, 0, 1)


@lru_cache(maxsize=256)
def _fitted(kind: type[Any], shares: tuple[Share, ...], *of: Any, **fields: Any) -> Any:
    """The kernel ``of`` a shape and steps with the first share that it fits in."""
    refusal: PtxgenError | None = None
    for most, least, resident in shares:
        try:
            kernel = kind.of(*of, shared=most, least_shared=least, resident=resident, **fields)
        except PtxgenError as exc:
            refusal = exc
            continue
        if fits(kernel):
            return kernel
    _, _, used, rows, cols, *_ = of
    raise PtxgenError(
        f"{kind.name}: {used} experts of {rows} x {cols}, {fields['activations']} activations: "
        f"{max(shares)[0]} bytes of shared memory are too few"
    ) from refusal
