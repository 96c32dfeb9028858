"""Routers without a launch of their own: the product before leaves their logits in parts."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from urdir.model.graph.experts import Experts, Route
from urdir.model.graph.ops import Norm, Product
from urdir.model.lower.arguments import without_none
from urdir.model.lower.chain import Chain
from urdir.model.lower.lowering import Lowering, Parted
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.experts.parts import TAKEN, LogitParts
from urdir.ptxgen.kernels.linear.epilogue.router import RouterParts
from urdir.ptxgen.kernels.linear.products.gemv import Gemv

if TYPE_CHECKING:
    from urdir.driver.memory import Slice
    from urdir.ptxgen.kernels.linear.spec import LinearSpec

#: Experts that products of one row choose by parts, at most. On an H200 a step of gpt-oss-20b (32
#: experts) takes 905 us so, 1,031 with a launch for the router; one of qwen3-30b-a3b (128 experts)
#: 1,077 and 1,061.
MOST_BY_PARTS = 32


def router_after(at: Lowering, chain: Chain) -> Route | None:
    """The router that reads the norm of a chain's result, where experts can be chosen by its logits
    in parts: those of one row, which nothing else reads."""
    norm = at.following()
    if chain.rows > 1 or chain.residual is None or not isinstance(norm, Norm):
        return None
    readers = at.readers(norm.y)
    routers = [op for op in readers if isinstance(op, Route)]
    known = all(isinstance(op, Experts | Route | Product) for op in readers)
    if norm.x is not chain.y or len(routers) != 1 or not known:
        return None
    (of,) = routers
    return of if _is_plain(at, of) and at.norm(norm.of).is_scaled_rms else None


def _is_plain(at: Lowering, of: Route) -> bool:
    """Whether the experts choose by the logits of an F32 matrix alone."""
    readers = at.readers(of.y)
    experts = readers[0] if len(readers) == 1 else None
    if not isinstance(experts, Experts) or experts.x is not of.x or experts.weigh_input:
        return False
    if experts.room is not None or experts.is_ordered:
        return False
    plain = of.low is None and of.router.by_token is None and of.selection.is_plain
    count = of.selection.experts
    takes = plain and count in TAKEN and count <= MOST_BY_PARTS
    chooses = takes and at.parts.config.random_routing is None
    return chooses and at.matrix(of.router.linear).format.name == "F32"


def with_router(
    at: Lowering, chain: Chain, kernel: LinearSpec
) -> tuple[LinearSpec, dict[str, Slice]] | None:
    """The product of a chain with the parts of the logits that follow it, and what it takes for
    these. None without a router, and where the product cannot serve it."""
    of = router_after(at, chain)
    made = None if of is None else _with_parts(kernel, of.selection.experts)
    if of is None or made is None:
        return None
    norm, router = at.following(), at.matrix(of.router.linear)
    assert isinstance(norm, Norm)
    layer = at.norm(norm.of)
    step = made.steps.find(RouterParts)
    assert step is not None
    scale, has_bias = of.router.norm_scale, router.bias is not None
    parts = LogitParts(step.count(made), made.rows, layer.norm.eps, has_bias, scale)
    made_here = {"logit_parts": at.work["logit parts"], "square_parts": at.work["square parts"]}
    at.parted[of.y] = Parted(parts, made_here | without_none(router_bias=router.bias))
    return made, {**made_here, **without_none(router=router.data, next_norm=layer.weight)}


@lru_cache(maxsize=64)
def _with_parts(kernel: LinearSpec, experts: int) -> Gemv | None:
    if not isinstance(kernel, Gemv):
        return None
    try:
        return replace(kernel, epilogue=(*kernel.epilogue, RouterParts(experts)))
    except PtxgenError:  # the CTAs' rows do not fit, or too many experts
        return None
