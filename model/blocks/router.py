"""The router of a mixture of experts: logits of each row, and which experts they choose."""

from __future__ import annotations

from functools import lru_cache

from urdir.model.blocks.activations import Activations
from urdir.model.blocks.expert_products import completed
from urdir.model.blocks.linear import LinearLayers
from urdir.model.blocks.mixtures import RouterLayer
from urdir.model.lower.arguments import given
from urdir.model.memory.norms import NormLayer
from urdir.ptxgen.kernels.experts.logits import RouterLogits
from urdir.ptxgen.kernels.experts.route import RouteExperts
from urdir.ptxgen.kernels.experts.select import SelectExperts

#: Logits of a step from which on `RouterLogits` makes them, and not a CTA each. On an H200
#: `RouteExperts` takes 75 us for 65,536 (qwen3-30b-a3b, 512 rows): 9 us for so many. `RouterLogits`
#: goes through the columns in as many steps for few rows as for many, and needs a second launch.
MANY_LOGITS = 8192

# One object for equal kernels, with its cached properties.
_logits = lru_cache(maxsize=64)(RouterLogits)
_route = lru_cache(maxsize=64)(RouteExperts)
_select = lru_cache(maxsize=64)(SelectExperts)


def append_router(
    linear: LinearLayers, label: str, router: RouterLayer, x: Activations, norm: NormLayer | None
) -> None:
    """Chooses experts by x (rows, hidden) after the ``norm``: ``work["expert"]`` (rows, used)
    u32 and ``work["expert weight"]`` f32.

    One launch where the router is F32 and the norm that of a root mean square, else several;
    several for many rows too, whose logits stay f32 all the same.
    """
    plan, work, selection = linear.plan, linear.work, router.selection
    extra = given(choice_bias=router.choice_bias, expert_scale=router.expert_scale)
    chosen = {"expert": work["expert"], "weight": work["expert weight"], **extra}
    x, norm = completed(x, norm)
    matrix, logits = router.matrix, work["router logits"]
    computed = None if norm is None else norm.norm
    many = _makes_many_logits(linear, router)
    if many or matrix.format.name != "F32" or not RouteExperts.takes(matrix.cols, computed):
        if many:
            _append_logits(linear, label, router, x, norm)
        else:
            linear.append(label, [(matrix, logits)], x, norm, scale=router.scale)
        select = _select(linear.rows, selection)
        plan.launch(select, f"{label}.select", logits=logits, **chosen)
        return
    has_bias = matrix.bias is not None
    kernel = _route(linear.rows, matrix.cols, selection, computed, has_bias, router.scale)
    plan.launch(
        kernel,
        label,
        weights=matrix.data,
        x=x.x,
        arrived=work["experts arrived"],
        logits=logits,
        **given(norm=None if norm is None else norm.weight, bias=matrix.bias),
        **chosen,
    )


def _makes_many_logits(linear: LinearLayers, router: RouterLayer) -> bool:
    """Whether `RouterLogits` makes them; its input is normalised by a launch before it."""
    matrix, count = router.matrix, linear.rows * router.selection.experts
    takes = matrix.format.name == "F32" and RouterLogits.takes(matrix.cols)
    return takes and linear.takes_gemm and count > MANY_LOGITS


def _append_logits(
    linear: LinearLayers, label: str, router: RouterLayer, x: Activations, norm: NormLayer | None
) -> None:
    matrix, has_bias = router.matrix, router.matrix.bias is not None
    source = x.x
    if norm is not None:
        # A norm of the router alone: "normed" may have the experts' input already.
        source = linear.work["expert out"]
        linear.append_norm(f"{label}.norm", matrix.cols, x, norm, source)
    experts = router.selection.experts
    linear.plan.launch(
        _logits(linear.rows, experts, matrix.cols, has_bias, router.scale),
        label,
        weights=matrix.data,
        x=source,
        logits=linear.work["router logits"],
        **given(bias=matrix.bias),
    )
