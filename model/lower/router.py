"""Rules for routers: which experts each row chooses, and their weights. The choice stays on the
device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from urdir.model.families.stored import StoredVector
from urdir.model.graph.experts import Experts, Route
from urdir.model.graph.op import Op
from urdir.model.graph.ops import Norm, Product
from urdir.model.graph.tensor import Tensor
from urdir.model.lower.adapters import SLOTS
from urdir.model.lower.chain import Chain
from urdir.model.lower.early import may_start_next
from urdir.model.lower.experts.adapters import known_positions
from urdir.model.lower.experts.cached import products_look_up
from urdir.model.lower.experts.layer import MixtureLayer, RouterLayer
from urdir.model.lower.experts.shared_read import SharedRead
from urdir.model.lower.linear import lower_chain
from urdir.model.lower.lowering import Lowering
from urdir.model.lower.norms import append_norm, before_norm
from urdir.model.lower.parts import StepParts
from urdir.model.lower.registers import COUNTERS
from urdir.model.lower.rule import Rule, variants
from urdir.model.memory.norms import NormLayer
from urdir.model.memory.weights import Matrix
from urdir.ptxgen.kernels.experts.keep_experts import KeepExperts
from urdir.ptxgen.kernels.experts.listed_logits import ListedLogits
from urdir.ptxgen.kernels.experts.logits import RouterLogits
from urdir.ptxgen.kernels.experts.route import RouteExperts
from urdir.ptxgen.kernels.experts.select import SelectExperts
from urdir.ptxgen.kernels.experts.skewed_logits import SkewedLogits
from urdir.ptxgen.kernels.linear.epilogue.activation import Scaled
from urdir.ptxgen.kernels.linear.lora_expand import LoraExpand

if TYPE_CHECKING:
    from urdir.driver.memory import Slice
    from urdir.ptxgen.spec import KernelSpec

#: Logits of a step from which on `RouterLogits` makes them, and not a CTA each. On an H200
#: `RouteExperts` takes 75 us for 65,536 (qwen3-30b-a3b, 512 rows): 9 us for as many. `RouterLogits`
#: goes through the columns in as many steps for few rows as for many, and needs a second launch. A
#: step of qwen3-30b-a3b takes 4.25 ms with it and 4.73 without for 64 rows, 3.20 and 3.41 for 32.
MANY_LOGITS = 2048
#: Experts from which products of few rows choose for themselves, at most, and those of rows that
#: read experts together; those of one row do from any number. On an H200 a step of gpt-oss-20b (32
#: experts) takes 1,115 us in place of 1,157, one of two sequences 1,558 of 1,609, of eight 1,745 of
#: 1,768; of qwen3-30b-a3b (128 experts) one of one sequence 970 in place of 1,071, of eight 2,064
#: of 2,082, of four, where one warp of a CTA chose, 2,032 of 1,970.
MOST_CHOSEN, MOST_CHOSEN_TOGETHER = 32, 128

# One object for equal kernels, with its cached properties.
_logits = lru_cache(maxsize=64)(RouterLogits)
route_kernel = lru_cache(maxsize=64)(RouteExperts)
_select = lru_cache(maxsize=64)(SelectExperts)
_skewed = lru_cache(maxsize=64)(SkewedLogits)
_listed = lru_cache(maxsize=64)(ListedLogits)


def lower_route(at: Lowering, ops: Sequence[Op]) -> bool:
    """[norm] route: which experts each row chooses, and their weights.

    None where the product before has left parts of the logits (`with_router`). One launch where the
    router is F32 and the norm that of a root mean square, else several; several for many rows too,
    whose logits stay f32 all the same.
    """
    *norms, of = ops
    assert isinstance(of, Route)
    norm = at.unmade.get(of.x)
    if norms:
        (norm,) = norms  # type: ignore[assignment]
        assert isinstance(norm, Norm)
        if at.readers(norm.y) != [of]:
            return False
    if of.y in at.parted:
        at.unselected[of.y] = of.selection
    else:
        append_router(at, of, norm, selects=bool(norms) or not products_choose(at, of))
    return True


def append_router(
    at: Lowering, of: Route, norm: Norm | None, selects: bool, gate: Matrix | None = None
) -> None:
    """The launches of a router after a ``norm``: the choice too if it ``selects``, else products
    choose. One launch (`is_one_launch`) that does not select makes the product with a ``gate``
    (1, hidden), too: the register "shared gate"."""
    x, layer = before_norm(at, of.x, norm)
    work, router, rows = at.work, RouterLayer.of(at, of), of.x.rows
    extra = {"choice_bias": router.choice_bias, "expert_scale": router.expert_scale}
    chosen = {"expert": work["expert"], "weight": work["expert weight"], **extra}
    chosen["position"] = known_positions(at, of)
    matrix, logits = router.matrix, work["router logits"]
    if at.parts.config.random_routing is not None:
        _append_random(at, of, x, selects, chosen)
        return
    if not is_one_launch(at, of, router, layer):
        select = _select(rows, router.selection)
        if _is_apart(of, router) or makes_many_logits(at, router, rows):
            select = _append_logits(at, of, router, x, layer)
        else:
            _append_product(at, of, norm)
        if of.router.by_token is not None:
            _append_kept(at, of, of.router.by_token, select.splits)
        if select.cols:
            chosen |= {"squares": work["router squares"], "factor": work["router factor"]}
        at.launch(select, f"{of.label}.select", logits=logits, **chosen)
        return
    sizes, computed = (rows, matrix.cols, router.selection), None if layer is None else layer.norm
    kernel = route_kernel(
        *sizes,
        computed,
        matrix.bias is not None,
        router.scale,
        selects,
        1 if selects else RouteExperts.each_of(*sizes),
        not selects and _starts_next(at, of, layer),
        gate is not None,
    )
    at.launch(
        kernel,
        of.label,
        weights=matrix.data,
        x=x,
        arrived=work.zeroed(COUNTERS) if selects else None,
        logits=logits,
        norm=None if layer is None else layer.weight,
        bias=matrix.bias,
        gate_weights=None if gate is None else gate.data,
        gate_logits=None if gate is None else work["shared gate"],
        **(chosen if selects else {}),
    )
    if not selects:
        at.unselected[of.y] = router.selection


def is_one_launch(at: Lowering, of: Route, router: RouterLayer, norm: NormLayer | None) -> bool:
    """Whether `RouteExperts` takes a router after a norm: an F32 matrix for few logits, without
    adapters and experts by token, whose choice is not random."""
    matrix, plain = router.matrix, of.low is None and of.router.by_token is None
    if at.parts.config.random_routing is not None:
        return False
    if not plain or matrix.format.name != "F32" or makes_many_logits(at, router, of.x.rows):
        return False
    return RouteExperts.takes(matrix.cols, None if norm is None else norm.norm)


def _is_apart(of: Route, router: RouterLayer) -> bool:
    """Whether adapters are added to logits that another launch makes."""
    matrix = router.matrix
    return of.low is not None and matrix.format.name == "F32" and RouterLogits.takes(matrix.cols)


def products_choose(at: Lowering, of: Route) -> bool:
    """Whether the products of the experts choose them by the logits: those of the same x that read
    an expert's matrices for each row."""
    readers = at.readers(of.y)
    experts = readers[0] if len(readers) == 1 else None
    if at.takes_gemm(of.x.rows) or not isinstance(experts, Experts):
        return False
    if experts.x is not of.x or experts.room is not None or experts.weigh_input:
        return False
    if experts.is_ordered and not _brings_into_orders(at, experts):
        return False
    if of.x.rows == 1:
        return of.selection.is_plain
    together = SharedRead(at, of.x.rows).pays(MixtureLayer.of(at, experts))
    most = MOST_CHOSEN_TOGETHER if together else MOST_CHOSEN
    return of.selection.is_plain and of.selection.experts <= most


def _brings_into_orders(at: Lowering, of: Experts) -> bool:
    """Whether products of one row bring x into the orders of their columns: else a launch does it,
    which needs the choice, as those of a cache have it."""
    cache = at.parts.weights.expert_caches.get(of.up.matrix)
    return of.x.rows == 1 and (cache is None or products_look_up(of, cache))


def _starts_next(at: Lowering, of: Route, norm: NormLayer | None) -> bool:
    """Whether the launch of a router, whose experts' products choose, starts theirs early: of rows
    that read experts together. Products of a row each load x before they wait."""
    (experts,) = at.readers(of.y)
    assert isinstance(experts, Experts)
    together = SharedRead(at, of.x.rows)
    return may_start_next(at, of.x.rows) and together.serves(
        MixtureLayer.of(at, experts), norm, of.selection
    )


def makes_many_logits(at: Lowering, router: RouterLayer, rows: int) -> bool:
    """Whether `RouterLogits` makes them; its input is normalised by a launch before it."""
    matrix, count = router.matrix, rows * router.selection.experts
    takes = matrix.format.name == "F32" and RouterLogits.takes(matrix.cols)
    return takes and at.takes_gemm(rows) and count > MANY_LOGITS


def finds_factors(of: Route, router: RouterLayer, norm: NormLayer) -> bool:
    """Whether logits can be made before the factors of a norm: nothing is added to them."""
    return norm.is_scaled_rms and router.matrix.bias is None and of.low is None


def _append_logits(
    at: Lowering, of: Route, router: RouterLayer, x: Slice, norm: NormLayer | None
) -> SelectExperts:
    """Returns what chooses by them: they may be in several splits, and before the norm."""
    matrix, rows = router.matrix, of.x.rows
    begun = norm is not None and finds_factors(of, router, norm)
    if norm is not None and not begun:
        # A norm of the router alone: "normed" may have the experts' input already.
        maker = at.maker(of.x)
        assert isinstance(maker, Norm)
        append_norm(at, f"{of.label}.norm", maker, at.work["expert out"])
        x = at.work["expert out"]
    of_sizes = (rows, router.selection.experts, matrix.cols)
    splits = RouterLogits.splits_for(*of_sizes, at.limits.sms)
    kernel = _logits(*of_sizes, matrix.bias is not None, router.scale, splits, begun)
    launch = {"weights": matrix.data, "x": x, "bias": matrix.bias}
    if norm is not None and begun:
        launch |= {"norm": norm.weight, "squares": at.work["router squares"]}
    at.launch(kernel, of.label, logits=at.work["router logits"], **launch)
    if of.low is not None and of.room is not None:
        room = of.room
        expand = LoraExpand(rows, matrix.rows, room.slots, room.rank, 1, 1, room.element)
        at.launch(
            expand,
            f"{of.label}.lora_b",
            lora=at.place(of.low),
            lora_slot=at.work[SLOTS],
            lora_b=at.parts.weights.lora(of.router.linear)[1],
            y=at.work["router logits"],
        )
    if norm is None or not begun:
        return _select(rows, router.selection, splits)
    return _select(rows, router.selection, splits, matrix.cols, norm.norm.eps)


def _append_random(
    at: Lowering, of: Route, x: Slice, selects: bool, chosen: Mapping[str, Slice | None]
) -> None:
    """Logits of a random choice, in place of the router's, and what chooses by them."""
    share, rows, experts = at.parts.config.random_routing, of.x.rows, of.selection.experts
    args = {"position": at.rows.position, "x": x.slice(0, 4), "logits": at.work["router logits"]}
    if not isinstance(share, float):
        used = of.selection.used
        args["choices"] = choices = at.parts.weights.choices[experts, used]
        kernel: KernelSpec = _listed(rows, experts, used, choices.nbytes // (4 * used))
    else:
        kernel = _skewed(rows, experts, share)
    at.launch(kernel, f"{of.label}.logits", **args)
    if not selects:
        at.unselected[of.y] = of.selection
        return
    select = _select(rows, of.selection)
    at.launch(select, f"{of.label}.select", logits=args["logits"], **chosen)


def _append_product(at: Lowering, of: Route, norm: Norm | None) -> None:
    """The logits as any other product."""
    y = Tensor("router logits", of.x.rows, of.router.linear.rows)
    product = Product(of.label, y, of.x, of.router.linear, of.low, 0, of.room)
    ends = Scaled.by(of.router.norm_scale)
    x = of.x if norm is None else norm.x
    lowered = lower_chain(at, Chain(x, norm=norm, products=[product], ends=ends, results=[y]))
    assert lowered


def _append_kept(at: Lowering, of: Route, table: StoredVector, splits: int) -> None:
    """Leaves the logits of the experts of the rows' tokens alone."""
    assert isinstance(at.parts, StepParts)
    state, rows = at.parts.state, at.rows
    sizes = of.x.rows, of.selection.experts, of.selection.used, table.shape[0]
    kernel = KeepExperts(*sizes, state.sequences, state.max_len, splits)
    at.launch(
        kernel,
        f"{of.label}.kept",
        logits=at.work["router logits"],
        table=at.vector(table),
        tokens=state["tokens"],
        **rows.arguments,
    )


RULES: Sequence[Rule] = variants("norm? route", lower_route)
