"""Mixtures of experts: the router's choice, and the products of each row with its experts.

Nothing here depends on the choice, which stays on the device. Few rows read the matrices of their
experts as a decode step does; many rows (``takes_gemm``) are grouped by expert first.
"""

from __future__ import annotations

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
from urdir.ptxgen.kernels.experts.combine import CombineExperts
from urdir.ptxgen.kernels.experts.down import ExpertsDown
from urdir.ptxgen.kernels.experts.gemm import ExpertsGemm, tile_height
from urdir.ptxgen.kernels.experts.group import GroupExperts
from urdir.ptxgen.kernels.experts.logits import RouterLogits
from urdir.ptxgen.kernels.experts.route import RouteExperts
from urdir.ptxgen.kernels.experts.select import SelectExperts
from urdir.ptxgen.kernels.experts.tiled import ExpertsSpec
from urdir.ptxgen.kernels.experts.up import ExpertsUp
from urdir.ptxgen.kernels.linear.choice import takes_gemm
from urdir.ptxgen.kernels.linear.gemv import Activations as Rounding
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

    # ---- few rows ----

    def _append_few(
        self,
        label: str,
        mixture: MixtureLayer,
        x: Activations,
        norm: NormLayer | None,
        residual: Slice | None,
        y: Slice,
    ) -> None:
        gate, up, activated = mixture.gate, mixture.up, self.work["expert gate"]
        f = mixture.activation
        if gate is None:
            self._append_up(f"{label}_up", mixture, up, None, f, x, norm, activated)
        elif _multiplied_together(gate, up):
            self._append_up(f"{label}_gate_up", mixture, gate, up, f, x, norm, activated)
        else:
            self._append_up(f"{label}_gate", mixture, gate, None, None, x, norm, activated)
            other = self.work["expert up"]
            self._append_up(f"{label}_up", mixture, up, None, None, x, norm, other)
            self._append_activation(label, mixture)
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
            x=activated,
            y=y,
            **_given(weight=weight, bias=down.bias, residual=residual),
        )

    def _append_up(
        self,
        label: str,
        mixture: MixtureLayer,
        matrix: Matrix,
        up: Matrix | None,
        activation: Activation | None,
        x: Activations,
        norm: NormLayer | None,
        y: Slice,
    ) -> None:
        """The products with one matrix, or with a gated pair."""
        selection = mixture.selection
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
            activation=activation,
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

    def _rounding(self, fmt: Format) -> Rounding:
        return "f32" if self.linear.exact or fmt.is_float else "i16"

    def _shares(self, larger: bool) -> tuple[Share, Share]:
        """The share of an SM that linear launches have, and all of it."""
        limits = self.linear.limits
        least, most = limits.shared(larger)
        return (most, least, limits.resident), (limits.shared_per_cta, 0, 1)

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
            self._append_sum(label, mixture, residual, y)
            return
        height = tile_height(self.rows, selection.experts, selection.used)
        group = _group(self.rows, selection.experts, selection.used, height)
        grouped = {"pair": work["expert pair"], "tile_of": work["expert tiles"]}
        plan.launch(group, f"{label}.group", expert=work["expert"], **grouped)
        gate, up, first = mixture.gate, mixture.up, work["expert gate"]
        f, gemm = mixture.activation, self._append_gemm
        if gate is None:
            gemm(f"{label}_up", mixture, up, height, x.x, first, activation=f)
        elif _multiplied_together(gate, up):
            gemm(f"{label}_gate_up", mixture, gate, height, x.x, first, up=up, activation=f)
        else:
            gemm(f"{label}_gate", mixture, gate, height, x.x, first)
            gemm(f"{label}_up", mixture, up, height, x.x, work["expert up"])
            self._append_activation(label, mixture)
        out = work["expert out"]
        gemm(f"{label}_down", mixture, mixture.down, height, first, out, down=True)
        self._append_sum(label, mixture, residual, y)

    def _append_sum(
        self, label: str, mixture: MixtureLayer, residual: Slice | None, y: Slice
    ) -> None:
        """y = residual + the sum of ``work["expert out"]`` over slots."""
        kernel = _combine(self.rows, mixture.selection.used, mixture.hidden, residual is not None)
        out = self.work["expert out"]
        self.linear.plan.launch(kernel, f"{label}.combine", x=out, y=y, **_given(residual=residual))

    def _packs(self, mixture: MixtureLayer) -> bool:
        """Whether its products take packed activations (`GemmWgmma`)."""
        gate, up = mixture.gate, mixture.up
        together = gate is None or _multiplied_together(gate, up)
        return together and self.linear.packs(up, mixture.down, *(() if gate is None else (gate,)))

    def _append_gemm(
        self,
        label: str,
        mixture: MixtureLayer,
        matrix: Matrix,
        height: int,
        x: Slice,
        y: Slice,
        *,
        down: bool = False,
        up: Matrix | None = None,
        activation: Activation | None = None,
    ) -> None:
        """The product with one matrix, or with a gated pair."""
        selection = mixture.selection
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
            activation,
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

    def _append_activation(self, label: str, mixture: MixtureLayer) -> None:
        """Of ``work["expert gate"]`` with ``work["expert up"]``, in place."""
        values = self.rows * mixture.selection.used * mixture.width
        kernel = _activate(values, mixture.activation, gated=True)
        gate, up = self.work["expert gate"], self.work["expert up"]
        self.linear.plan.launch(kernel, f"{label}.activation", y=gate, gate=gate, up=up)


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


def _completed(x: Activations, norm: NormLayer | None) -> tuple[Activations, NormLayer | None]:
    """The vectors, and the norm that is left to compute."""
    if x.has_completed(norm):
        assert x.normed is not None
        return Activations(x.normed), None
    return Activations(x.x), norm


def _given(**arguments: Slice | None) -> dict[str, Slice]:
    return {name: value for name, value in arguments.items() if value is not None}
