"""Rules for mixtures: the products of rows with the experts that routers chose (`router`).

Nothing here depends on the choice, which stays on the device. Of few rows each reads the matrices
of its experts, as a decode step of one does (`experts.per_row`), or those with the same expert read
it together (`experts.shared_read`); many rows are grouped by expert first (`experts.grouped_gemm`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from urdir.model.graph.adapters import Adapt
from urdir.model.graph.experts import Experts, Route
from urdir.model.graph.op import Op
from urdir.model.graph.ops import Add, Norm, Product
from urdir.model.graph.tensor import Tensor
from urdir.model.lower.adapters import rows_of_tensor
from urdir.model.lower.experts.adapters import ExpertAdapters, known_positions
from urdir.model.lower.experts.cached import through_cache
from urdir.model.lower.experts.grouped_gemm import GroupedGemm
from urdir.model.lower.experts.layer import MixtureLayer, RouterLayer
from urdir.model.lower.experts.per_row import PerRow
from urdir.model.lower.experts.products import MixtureCall
from urdir.model.lower.experts.shared_read import SharedRead
from urdir.model.lower.few import few_order
from urdir.model.lower.lowering import Lowering
from urdir.model.lower.norms import append_shared_norm, before_norm
from urdir.model.lower.requests import packed_norm_after
from urdir.model.lower.router import finds_factors, makes_many_logits
from urdir.model.lower.rule import Rule, variants
from urdir.ptxgen.weights.layout import TILE_COLS


def lower_shared_norm(at: Lowering, ops: Sequence[Op]) -> bool:
    """The norm that router, shared network and experts read: of many rows a launch, of few rows
    each of them computes it."""
    (norm,) = ops
    assert isinstance(norm, Norm)
    readers = at.readers(norm.y)
    if not all(isinstance(op, Adapt | Experts | Route | Product) for op in readers):
        return False
    if not any(isinstance(op, Experts | Route) for op in readers):
        return False
    if at.takes_gemm(norm.x.rows) and not _take_factors(at, norm):
        if at.completed != (norm.x, norm.of):
            append_shared_norm(at, norm)
    else:
        at.unmade[norm.y] = norm
    return True


def _take_factors(at: Lowering, norm: Norm) -> bool:
    """Whether a router and experts of many rows take a norm without a launch for it: they read its
    input, and the router finds the rows' factors."""
    readers, rows = at.readers(norm.y), norm.x.rows
    if at.completed == (norm.x, norm.of) or at.parts.config.random_routing is not None:
        return False
    if {type(op) for op in readers} != {Route, Experts} or len(readers) > 2:
        return False
    router, experts = sorted(readers, key=lambda op: isinstance(op, Experts))
    assert isinstance(router, Route)
    assert isinstance(experts, Experts)
    layer = RouterLayer.of(at, router)
    if not finds_factors(router, layer, at.norm(norm.of)):
        return False
    if experts.room is not None or experts.is_ordered:
        return False
    packs = GroupedGemm(at, rows).packs(MixtureLayer.of(at, experts))
    return packs and makes_many_logits(at, layer, rows)


def lower_experts(at: Lowering, ops: Sequence[Op]) -> bool:
    """[norm] experts [add]. Raises PtxgenError for shapes that no kernel takes."""
    taken = list(ops)
    norm = taken.pop(0) if isinstance(taken[0], Norm) else None
    of = taken.pop(0)
    assert isinstance(of, Experts)
    if norm is not None and (at.takes_gemm(of.x.rows) or at.readers(norm.y) != [of]):
        return False
    residual, y = None, of.y
    if taken:
        (add,) = taken
        assert isinstance(add, Add)
        if add.b is not of.y or not at.is_read_once(of.y):
            return False
        residual, y = at.place(add.a), add.y
    assert norm is None or isinstance(norm, Norm)
    x, layer = before_norm(at, of.x, norm or at.unmade.get(of.x))
    adapters = None
    if of.room is not None:
        adapters = ExpertAdapters(at, of, rows_of_tensor(at, of.x), of.room)
    mixture, selection = MixtureLayer.of(at, of), at.unselected.get(of.routing)
    begins, many = None, at.takes_gemm(of.x.rows)
    if many and adapters is None and residual is not None:
        following = packed_norm_after(at, y)
        begins = None if following is None else at.begin_norm(y, following, packed=True)
    call = MixtureCall(
        of.label,
        mixture,
        x,
        layer,
        residual,
        at.place(y),
        known_positions(at, of),
        adapters,
        selection,
        at.parted.get(of.routing),
        begins,
        factored=many and of.x in at.unmade,
    )
    cache = at.parts.weights.expert_caches.get(of.up.matrix)
    if cache is not None:
        call = through_cache(at, of, call, cache)
    if not many and residual is not None and _is_read_together(at, of.x.rows, call):
        call = _beginning_norm(at, call, y)
    append_experts(at, of.x.rows, call)
    if adapters is not None:
        adapters.add_last(at.place(y))
    return True


def _beginning_norm(at: Lowering, call: MixtureCall, y: Tensor) -> MixtureCall:
    """The same with the norm of few rows that follows begun and left packed, if the products that
    read it take it so."""
    following = at.following()
    if call.adapters is not None or not isinstance(following, Norm) or following.x is not y:
        return call
    norm, order = at.norm(following.of), few_order(at, y.rows)
    if order is None or y.width % TILE_COLS or not at.begins_block(following):
        return call
    return replace(call, begins=at.begin_norm(y, norm, packed=True), order=order)


def _is_read_together(at: Lowering, rows: int, call: MixtureCall) -> bool:
    return SharedRead(at, rows).serves(call.mixture, call.norm, call.selection)


def append_experts(at: Lowering, rows: int, call: MixtureCall) -> None:
    """Append the launches of a mixture, for the experts in the registers "expert" and "expert
    weight"."""
    if at.takes_gemm(rows):
        GroupedGemm(at, rows).append(call)
    elif call.adapters is None and _is_read_together(at, rows, call):
        SharedRead(at, rows).append(call)
    else:
        PerRow(at, rows).append(call)


RULES: Sequence[Rule] = (
    *variants("norm? experts add?", lower_experts),
    Rule("norm", lower_shared_norm),
)
