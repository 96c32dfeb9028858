"""Mixtures of experts: the router's choice, and the products of each row with its experts.

Nothing here depends on the choice, which stays on the device. Of few rows each reads the matrices
of its experts, as a decode step of one does, or those with the same expert read it together
(``pays_together``); many rows (``takes_gemm``) are grouped by expert first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from urdir.model.blocks.activations import Activations
from urdir.model.blocks.linear import LinearLayers
from urdir.model.blocks.mixtures import MixtureLayer, RouterLayer
from urdir.model.blocks.packed_experts import PackedExperts
from urdir.model.memory.norms import NormLayer
from urdir.model.memory.weights import Matrix
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.activate import Activate
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.experts.choice import pays_together
from urdir.ptxgen.kernels.experts.combine import CombineExperts
from urdir.ptxgen.kernels.experts.down import ExpertsDown
from urdir.ptxgen.kernels.experts.gemm import ExpertsGemm, tile_height
from urdir.ptxgen.kernels.experts.gemm_small import ExpertsGemmSmall
from urdir.ptxgen.kernels.experts.group import GroupExperts
from urdir.ptxgen.kernels.experts.logits import RouterLogits
from urdir.ptxgen.kernels.experts.route import RouteExperts
from urdir.ptxgen.kernels.experts.select import SelectExperts
from urdir.ptxgen.kernels.experts.spec import MAX_USED
from urdir.ptxgen.kernels.experts.tiled import ExpertsSpec
from urdir.ptxgen.kernels.experts.up import ExpertsUp
from urdir.ptxgen.kernels.linear.choice import takes_gemm
from urdir.ptxgen.kernels.linear.ends import is_first
from urdir.ptxgen.kernels.linear.gemv import Activations as Rounding
from urdir.ptxgen.kernels.linear.packed_choice import packs_mixtures
from urdir.ptxgen.weights.formats import Format

if TYPE_CHECKING:
    from urdir.driver.memory import Arena, Slice

_Kernel = TypeVar("_Kernel", bound=ExpertsSpec)
#: Bytes of shared memory of a CTA at most and at least, and CTAs that an SM has registers for.
Share = tuple[int, int, int]

#: Logits of a step from which on `RouterLogits` makes them, and not a CTA each. On an H200
#: `RouteExperts` takes 75 us for 65,536 (qwen3-30b-a3b, 512 rows): 9 us for so many. `RouterLogits`
#: goes through the columns in as many steps for few rows as for many, and needs a second launch.
MANY_LOGITS = 8192

# One object for equal kernels, with its cached properties.
_activate = lru_cache(maxsize=64)(Activate)
_combine = lru_cache(maxsize=64)(CombineExperts)
_gemm = lru_cache(maxsize=256)(ExpertsGemm)
_group = lru_cache(maxsize=64)(GroupExperts)
_logits = lru_cache(maxsize=64)(RouterLogits)
_route = lru_cache(maxsize=64)(RouteExperts)
_select = lru_cache(maxsize=64)(SelectExperts)


@dataclass(frozen=True, slots=True)
class _Product:
    """What a launch multiplies: a matrix of all experts, perhaps with the ``up`` matrix of a gated
    pair; then comes the activation, if there is one."""

    name: str
    matrix: Matrix
    up: Matrix | None = None
    activation: Activation | None = None


#: Appends a product with this label, whose result goes there.
_Multiply = Callable[[str, _Product, "Slice"], None]


#: CTAs of a grid in its second dimension.
MAX_GRID = 65535


@dataclass(frozen=True, slots=True)
class ExpertLayers:
    """Appends mixtures of experts to the plan of ``linear``, for its rows and with its buffers:
    those of `mixture_workspace`, and ``work["normed"]``.
    """

    linear: LinearLayers

    def append_router(
        self, label: str, router: RouterLayer, x: Activations, norm: NormLayer | None
    ) -> None:
        """Chooses experts by x (rows, hidden) after the ``norm``: ``work["expert"]`` (rows, used)
        u32 and ``work["expert weight"]`` f32.

        One launch where the router is F32 and the norm that of a root mean square, else several;
        several for many rows too, whose logits stay f32 all the same.
        """
        plan, work, selection = self.linear.plan, self.work, router.selection
        extra = _given(choice_bias=router.choice_bias, expert_scale=router.expert_scale)
        chosen = {"expert": work["expert"], "weight": work["expert weight"], **extra}
        x, norm = _completed(x, norm)
        matrix, logits = router.matrix, work["router logits"]
        computed = None if norm is None else norm.norm
        many = self._makes_many_logits(router)
        if many or matrix.format.name != "F32" or not RouteExperts.takes(matrix.cols, computed):
            if many:
                self._append_logits(label, router, x, norm)
            else:
                self.linear.append(label, [(matrix, logits)], x, norm, scale=router.scale)
            select = _select(self.rows, selection)
            plan.launch(select, f"{label}.select", logits=logits, **chosen)
            return
        has_bias = matrix.bias is not None
        kernel = _route(self.rows, matrix.cols, selection, computed, has_bias, router.scale)
        plan.launch(
            kernel,
            label,
            weights=matrix.data,
            x=x.x,
            arrived=work["experts arrived"],
            logits=logits,
            **_given(norm=None if norm is None else norm.weight, bias=matrix.bias),
            **chosen,
        )

    def append(
        self,
        label: str,
        mixture: MixtureLayer,
        x: Activations,
        norm: NormLayer | None,
        residual: Slice | None,
        y: Slice,
    ) -> Activations:
        """y = residual + the weighted sum of the chosen experts for x (rows, hidden) after the
        ``norm``, all (rows, hidden) f32; y is another buffer.

        Raises PtxgenError for shapes that no kernel takes: see `ExpertsSpec`.
        """
        x, norm = _completed(x, norm)
        if takes_gemm(self.rows, self.linear.exact):
            self._append_many(label, mixture, x, norm, residual, y)
        elif self._reads_together(mixture, norm):
            self._append_together(label, mixture, x, norm, residual, y)
        else:
            self._append_few(label, mixture, x, norm, residual, y)
        return Activations(y)

    @property
    def work(self) -> Arena:
        """The intermediates."""
        return self.linear.work

    @property
    def rows(self) -> int:
        """Rows of the step."""
        return self.linear.rows

    def _append_activated(self, label: str, mixture: MixtureLayer, multiply: _Multiply) -> None:
        """``work["expert gate"]`` = f(gate x) * up x, without a gate f(up x), for each pair of a
        row and its experts."""
        gate, up = self.work["expert gate"], self.work["expert up"]
        first, *second = _first_products(mixture)
        multiply(f"{label}_{first.name}", first, gate)
        if second:
            multiply(f"{label}_{second[0].name}", second[0], up)
            self._append_activation(label, mixture)

    # ---- few rows, each of which reads its experts ----

    def _append_few(
        self,
        label: str,
        mixture: MixtureLayer,
        x: Activations,
        norm: NormLayer | None,
        residual: Slice | None,
        y: Slice,
    ) -> None:
        def multiply(name: str, product: _Product, to: Slice) -> None:
            self._append_up(name, mixture, product, x, norm, to)

        self._append_activated(label, mixture, multiply)
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
            sms=self.linear.limits.sms,
            weighted=not mixture.weigh_input,
            bias=down.bias is not None,
            residual=residual is not None,
            early=True,  # the products before it have waited for the router
        )
        weight = None if mixture.weigh_input else self.work["expert weight"]
        self.linear.plan.launch(
            kernel,
            f"{label}_down",
            weights=down.data,
            expert=self.work["expert"],
            x=self.work["expert gate"],
            y=y,
            **_given(weight=weight, bias=down.bias, residual=residual),
        )

    def _append_up(
        self,
        label: str,
        mixture: MixtureLayer,
        product: _Product,
        x: Activations,
        norm: NormLayer | None,
        y: Slice,
    ) -> None:
        selection, matrix, up = mixture.selection, product.matrix, product.up
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
            sms=self.linear.limits.sms,
            gated=up is not None,
            activation=product.activation,
            norm=None if norm is None else norm.norm,
            weighted=mixture.weigh_input,
            bias=matrix.bias is not None,
        )
        weight = self.work["expert weight"] if mixture.weigh_input else None
        norms = {} if norm is None else _given(norm=norm.weight, norm_bias=norm.bias)
        pair = {} if up is None else _given(up=up.data, up_bias=up.bias)
        self.linear.plan.launch(
            kernel,
            label,
            weights=matrix.data,
            expert=self.work["expert"],
            x=x.x,
            y=y,
            **_given(weight=weight, bias=matrix.bias),
            **norms,
            **pair,
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
                sms=self.linear.limits.sms,
                gated=False,
                activation=None,
                in_turn=True,
            )
            parts = [
                at.slice(4 * first * heads * width, 4 * count * heads * width)
                for at, width in ((x, matrix.cols), (y, rows))
            ]
            suffix = f" rows {first}" if self.rows > most else ""
            self.linear.plan.launch(
                kernel, label + suffix, weights=matrix.data, x=parts[0], y=parts[1]
            )

    def _rounding(self, fmt: Format) -> Rounding:
        return "f32" if self.linear.exact or fmt.is_float else "i16"

    def _shares(self, larger: bool) -> tuple[Share, Share]:
        """The share of an SM that linear launches have, and all of it."""
        limits = self.linear.limits
        least, most = limits.shared(larger)
        return (most, least, limits.resident), (limits.shared_per_cta, 0, 1)

    # ---- few rows, of which those with the same expert read it together ----

    def _reads_together(self, mixture: MixtureLayer, norm: NormLayer | None) -> bool:
        """Whether `ExpertsGemmSmall` serves, and pays."""
        selection = mixture.selection
        matrices = [m for m in (mixture.gate, mixture.up, mixture.down) if m is not None]
        nbytes = sum(m.layout.nbytes for m in matrices) // selection.experts
        few = (self.rows, selection.experts, selection.used)
        if self.linear.exact or not pays_together(*few, nbytes):
            return False
        products = [_Product("down", mixture.down), *_first_products(mixture)]
        return all(self._small(mixture, product, norm) is not None for product in products)

    def _append_together(
        self,
        label: str,
        mixture: MixtureLayer,
        x: Activations,
        norm: NormLayer | None,
        residual: Slice | None,
        y: Slice,
    ) -> None:
        if norm is not None and is_first(norm.norm):
            normed = self.work["normed"]
            x = self.linear.append_norm(f"{label}.norm", mixture.up.cols, x, norm, normed)
            x, norm = _completed(x, norm)

        def multiply(name: str, product: _Product, to: Slice) -> None:
            self._append_small(name, mixture, product, x.x, norm, to)

        self._append_activated(label, mixture, multiply)
        activated, out = self.work["expert gate"], self.work["expert out"]
        down = _Product("down", mixture.down)
        slots = self._append_small(f"{label}_down", mixture, down, activated, None, out)
        self._append_combined(label, mixture, slots, residual, y)

    def _append_small(
        self,
        label: str,
        mixture: MixtureLayer,
        product: _Product,
        x: Slice,
        norm: NormLayer | None,
        y: Slice,
    ) -> int:
        """Returns how many products of a row there are in y."""
        kernel, matrix, up = self._small(mixture, product, norm), product.matrix, product.up
        assert kernel is not None  # as `_reads_together` found
        pair = {} if up is None else _given(up=up.data, up_bias=up.bias)
        weight = self.work["expert weight"] if kernel.weighted else None
        self.linear.plan.launch(
            kernel,
            label,
            weights=matrix.data,
            expert=self.work["expert"],
            x=x,
            y=y,
            **_given(weight=weight, bias=matrix.bias, norm=None if norm is None else norm.weight),
            **pair,
        )
        return kernel.slots

    def _small(
        self, mixture: MixtureLayer, product: _Product, norm: NormLayer | None
    ) -> ExpertsGemmSmall | None:
        """The kernel, if there is one; a norm that it does not take comes before it."""
        selection, matrix, down = mixture.selection, product.matrix, product.name == "down"
        computed = None if norm is None or down or is_first(norm.norm) else norm.norm
        return _small_fitted(
            shared=self.linear.limits.shared_per_cta,
            format=matrix.format,
            experts=selection.experts,
            used=selection.used,
            rows=matrix.rows // selection.experts,
            cols=matrix.cols,
            batch=self.rows,
            down=down,
            weighted=mixture.weigh_input != down,
            bias=matrix.bias is not None,
            gated=product.up is not None,
            activation=product.activation,
            norm=computed,
            early=down,  # the products before it have waited for the router
            sms=self.linear.limits.sms,
        )

    # ---- many rows ----

    def _makes_many_logits(self, router: RouterLayer) -> bool:
        """Whether `RouterLogits` makes them; its input is normalised by a launch before it."""
        matrix, count = router.matrix, self.rows * router.selection.experts
        takes = matrix.format.name == "F32" and RouterLogits.takes(matrix.cols)
        return takes and self.linear.takes_gemm and count > MANY_LOGITS

    def _append_logits(
        self, label: str, router: RouterLayer, x: Activations, norm: NormLayer | None
    ) -> None:
        matrix, has_bias = router.matrix, router.matrix.bias is not None
        source = x.x
        if norm is not None:
            # A norm of the router alone: "normed" may have the experts' input already.
            source = self.work["expert out"]
            self.linear.append_norm(f"{label}.norm", matrix.cols, x, norm, source)
        experts = router.selection.experts
        self.linear.plan.launch(
            _logits(self.rows, experts, matrix.cols, has_bias, router.scale),
            label,
            weights=matrix.data,
            x=source,
            logits=self.work["router logits"],
            **_given(bias=matrix.bias),
        )

    def _append_many(
        self,
        label: str,
        mixture: MixtureLayer,
        x: Activations,
        norm: NormLayer | None,
        residual: Slice | None,
        y: Slice,
    ) -> None:
        plan, work, selection = self.linear.plan, self.work, mixture.selection
        if norm is not None:
            normed = work["normed"]
            cols = mixture.up.cols
            x, _ = _completed(self.linear.append_norm(f"{label}.norm", cols, x, norm, normed), norm)
        if self._packs(mixture):
            PackedExperts(plan, work, self.rows, self.linear.limits.sms).append(label, mixture, x.x)
            self._append_combined(label, mixture, selection.used, residual, y)
            return
        height = tile_height(self.rows, selection.experts, selection.used)
        group = _group(self.rows, selection.experts, selection.used, height)
        grouped = {"pair": work["expert pair"], "tile_of": work["expert tiles"]}
        plan.launch(group, f"{label}.group", expert=work["expert"], **grouped)

        def multiply(name: str, product: _Product, to: Slice) -> None:
            self._append_gemm(name, mixture, product, height, x.x, to)

        self._append_activated(label, mixture, multiply)
        activated, out, down = work["expert gate"], work["expert out"], mixture.down
        self._append_gemm(f"{label}_down", mixture, _Product("down", down), height, activated, out)
        self._append_combined(label, mixture, selection.used, residual, y)

    def _packs(self, mixture: MixtureLayer) -> bool:
        """Whether its products take packed activations (`GemmWgmma`)."""
        gate, up = mixture.gate, mixture.up
        together = gate is None or _multiplied_together(gate, up)
        matrices = (up, mixture.down, *(() if gate is None else (gate,)))
        formats = tuple(matrix.format for matrix in matrices)
        fits = packs_mixtures(self.linear.limits, formats)
        return together and fits and self.linear.takes_gemm

    def _append_gemm(
        self,
        label: str,
        mixture: MixtureLayer,
        product: _Product,
        height: int,
        x: Slice,
        y: Slice,
    ) -> None:
        selection, matrix, up = mixture.selection, product.matrix, product.up
        down = product.name == "down"
        weighted = mixture.weigh_input != down
        kernel = _gemm(
            matrix.format,
            selection.experts,
            selection.used,
            matrix.rows // selection.experts,
            matrix.cols,
            self.rows,
            height,
            down,
            weighted,
            matrix.bias is not None,
            up is not None,
            product.activation,
        )
        others = {} if up is None else _given(up=up.data, up_bias=up.bias)
        self.linear.plan.launch(
            kernel,
            label,
            weights=matrix.data,
            pair=self.work["expert pair"],
            tile_of=self.work["expert tiles"],
            x=x,
            y=y,
            **_given(weight=self.work["expert weight"] if weighted else None, bias=matrix.bias),
            **others,
        )

    def _append_combined(
        self, label: str, mixture: MixtureLayer, slots: int, residual: Slice | None, y: Slice
    ) -> None:
        """y = residual + the sum of the slots of ``work["expert out"]``."""
        kernel, out = _combine(self.rows, slots, mixture.hidden, residual is not None), "expert out"
        x = self.work[out]
        self.linear.plan.launch(kernel, f"{label}.combine", x=x, y=y, **_given(residual=residual))

    def _append_activation(self, label: str, mixture: MixtureLayer) -> None:
        """Of ``work["expert gate"]`` with ``work["expert up"]``, in place."""
        values = self.rows * mixture.selection.used * mixture.width
        kernel = _activate(values, mixture.activation, gated=True)
        gate, up = self.work["expert gate"], self.work["expert up"]
        self.linear.plan.launch(kernel, f"{label}.activation", y=gate, gate=gate, up=up)


def _first_products(mixture: MixtureLayer) -> list[_Product]:
    """What is multiplied before the down matrices: a gate and up in one launch if it can."""
    gate, up, f = mixture.gate, mixture.up, mixture.activation
    if gate is None:
        return [_Product("up", up, activation=f)]
    if _multiplied_together(gate, up):
        return [_Product("gate_up", gate, up, f)]
    return [_Product("gate", gate), _Product("up", up)]


def _multiplied_together(gate: Matrix, up: Matrix) -> bool:
    """Whether one launch can multiply with both."""
    return gate.layout == up.layout and (gate.bias is None) == (up.bias is None)


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


@lru_cache(maxsize=256)
def _small_fitted(**fields: Any) -> ExpertsGemmSmall | None:
    """The kernel, if need be with columns in parts; None where it does not fit."""
    for parts in range(1, MAX_USED // fields["used"] + 1 if fields["down"] else 2):
        try:
            kernel = ExpertsGemmSmall(parts=parts, **fields)
        except PtxgenError:
            continue
        if kernel.fits:
            return kernel
    return None


def _completed(x: Activations, norm: NormLayer | None) -> tuple[Activations, NormLayer | None]:
    """The vectors, and the norm that is left to compute."""
    if x.has_completed(norm):
        assert x.normed is not None
        return Activations(x.normed), None
    return Activations(x.x), norm


def _given(**arguments: Slice | None) -> dict[str, Slice]:
    return {name: value for name, value in arguments.items() if value is not None}
