"""Few rows, each of which reads the matrices of its experts, as a decode step of one does."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from urdir.model.lower.arguments import without_none
from urdir.model.lower.experts.products import ExpertProducts, MixtureCall, Product
from urdir.model.memory.weights import Matrix
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.experts.down import ExpertsDown
from urdir.ptxgen.kernels.experts.tiled import ExpertsSpec
from urdir.ptxgen.kernels.experts.up import ExpertsUp
from urdir.ptxgen.kernels.linear.products.gemv_room import Activations as Rounding
from urdir.ptxgen.weights.formats import Format

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

        def multiply(label: str, product: Product, to: Slice) -> None:
            self._append_up(label, call, product, to)

        self.append_activated(call, multiply)
        mixture, residual = call.mixture, call.residual
        down, selection = mixture.down, mixture.selection
        kernel = _fitted(
            ExpertsDown,
            self._shares(larger=self.rows == 1),
            format=down.format,
            experts=selection.experts,
            used=selection.used,
            rows=mixture.hidden,
            cols=down.cols,
            batch=self.rows,
            activations=self._rounding(down.format),
            sms=self.at.limits.sms,
            weighted=not mixture.weigh_input,
            bias=down.bias is not None,
            residual=residual is not None,
            early=True,  # the products before it have waited for the router
        )
        weight = None if mixture.weigh_input else self.work["expert weight"]
        self.at.plan.launch(
            kernel,
            f"{call.label}_down",
            weights=down.data,
            expert=self.work["expert"],
            x=self.work["expert gate"],
            y=call.y,
            **without_none(weight=weight, bias=down.bias, residual=residual),
        )

    def _append_up(self, label: str, call: MixtureCall, product: Product, y: Slice) -> None:
        mixture, norm = call.mixture, call.norm
        selection, matrix = mixture.selection, product.matrix
        kernel = _fitted(
            ExpertsUp,
            self._shares(larger=self.rows > 1),
            format=matrix.format,
            experts=selection.experts,
            used=selection.used,
            rows=mixture.width,
            cols=matrix.cols,
            batch=self.rows,
            activations=self._rounding(matrix.format),
            sms=self.at.limits.sms,
            gated=product.up is not None,
            activation=product.activation,
            norm=None if norm is None else norm.norm,
            weighted=mixture.weigh_input,
            bias=matrix.bias is not None,
        )
        weight = self.work["expert weight"] if mixture.weigh_input else None
        norms = {} if norm is None else without_none(norm=norm.weight, norm_bias=norm.bias)
        self.at.plan.launch(
            kernel,
            label,
            expert=self.work["expert"],
            x=call.x,
            y=y,
            **without_none(weight=weight),
            **norms,
            **product.arguments,
        )

    def append_in_turn(self, label: str, matrix: Matrix, heads: int, x: Slice, y: Slice) -> None:
        """y (rows, heads, out) = the matrix (out, in) of each head times x (rows, heads, in)."""
        rows, most = matrix.rows // heads, MAX_GRID // heads
        for first in range(0, self.rows, most):
            count = min(most, self.rows - first)
            kernel = _fitted(
                ExpertsUp,
                self._shares(larger=self.rows > 1),
                format=matrix.format,
                experts=heads,
                used=1,
                rows=rows,
                cols=matrix.cols,
                batch=count * heads,
                activations=self._rounding(matrix.format),
                sms=self.at.limits.sms,
                gated=False,
                activation=None,
                in_turn=True,
            )
            parts = [
                at.slice(4 * first * heads * width, 4 * count * heads * width)
                for at, width in ((x, matrix.cols), (y, rows))
            ]
            suffix = f" rows {first}" if self.rows > most else ""
            self.at.plan.launch(kernel, label + suffix, weights=matrix.data, x=parts[0], y=parts[1])

    def _rounding(self, fmt: Format) -> Rounding:
        return "f32" if self.at.exact or fmt.is_float else "i16"

    def _shares(self, larger: bool) -> tuple[Share, Share]:
        """The share of an SM that linear launches have, and all of it."""
        limits = self.at.limits
        least, most = limits.shared(larger)
        return (most, least, limits.resident), (limits.shared_per_cta, 0, 1)


@lru_cache(maxsize=256)
def _fitted(kind: type[_Kernel], shares: tuple[Share, ...], **fields: Any) -> _Kernel:
    """The kernel with the first share that it fits in."""
    refusal: PtxgenError | None = None
    for most, least, resident in shares:
        try:
            kernel = kind(shared=most, least_shared=least, resident=resident, **fields)
        except PtxgenError as exc:
            refusal = exc
            continue
        if kernel.fits:
            return kernel
    raise PtxgenError(
        f"{kind.name}: {fields['used']} experts of {fields['rows']} x {fields['cols']}, "
        f"{fields['activations']} activations: {max(shares)[0]} bytes of shared memory are too few"
    ) from refusal
