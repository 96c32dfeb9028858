"""Rules for low-rank adapters: A x of each row's adapter as a launch; B a is a step of the
product."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from urdir.driver.kernel import nbytes_of
from urdir.model.graph.adapters import Adapt
from urdir.model.graph.op import Op
from urdir.model.graph.ops import Gather, Norm, Product
from urdir.model.graph.tensor import Tensor
from urdir.model.lower.lowering import Lowering
from urdir.model.lower.norms import append_norm
from urdir.model.lower.requests import adapts_packed
from urdir.model.lower.rows import Rows
from urdir.model.lower.rule import Rule
from urdir.model.lower.switch import ADAPTERS, ROWS, SCALES
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.epilogue.adapted import Adapted
from urdir.ptxgen.kernels.linear.epilogue.own_adapted import OwnAdapted
from urdir.ptxgen.kernels.linear.epilogue.self_adapted import SelfAdapted
from urdir.ptxgen.kernels.linear.epilogue.shared_adapted import SharedAdapted
from urdir.ptxgen.kernels.linear.lora_shrink import MOST_REQUESTS, LoraShrink
from urdir.ptxgen.kernels.linear.lora_shrink_packed import LoraShrinkPacked
from urdir.ptxgen.kernels.linear.lora_shrink_rows import LEAST_ROWS, LoraShrinkRows
from urdir.ptxgen.kernels.linear.products.gemm_wgmma import GemmWgmma
from urdir.ptxgen.kernels.linear.products.gemv import Gemv
from urdir.ptxgen.kernels.linear.steps import Product as ProductSpec

if TYPE_CHECKING:
    from urdir.driver.memory import Slice

# One object for equal kernels, with its cached properties.
_shrink = lru_cache(maxsize=256)(LoraShrink)
_shrink_rows = lru_cache(maxsize=256)(LoraShrinkRows)
_shrink_packed = lru_cache(maxsize=256)(LoraShrinkPacked)

Main = TypeVar("Main", bound=ProductSpec)

#: The slots of rows, as the last launch for an A has left them.
SLOTS = "lora slot"


def lower_normed_adapt(at: Lowering, ops: Sequence[Op]) -> bool:
    """norm adapt: A x after a norm that the products compute as well."""
    norm, of = ops
    assert isinstance(norm, Norm)
    assert isinstance(of, Adapt)
    readers = at.readers(norm.y)
    others = all(isinstance(op, Adapt | Product) for op in readers)
    if of.x is not norm.y or not others or not at.norm(norm.of).is_scaled_rms:
        return False
    if at.completed != (norm.x, norm.of):
        at.unmade[norm.y] = norm
    return lower_adapt(at, [of])


def lower_adapt(at: Lowering, ops: Sequence[Op]) -> bool:
    """adapt: A x of plain x, or of x after a norm that each reader computes."""
    (of,) = ops
    assert isinstance(of, Adapt)
    alone = of.x.rows == 1 and all(isinstance(op, Product) for op in at.readers(of.y))
    if alone or adapts_packed(at, of):
        at.pending[of.y] = of
    else:
        _append_shrink(at, of)
    return True


def _append_shrink(at: Lowering, of: Adapt) -> None:
    x, norm = at.place(of.x), at.unmade.get(of.x)
    if norm is not None and not at.norm(norm.of).is_scaled_rms:
        append_norm(at, f"{of.label}.norm", norm, at.work["normed"])
    if norm is not None and at.completed == (norm.x, norm.of):
        x, norm = at.work["normed"], None
    layer = None if norm is None else at.norm(norm.of)
    many = of.x.rows >= LEAST_ROWS
    kernel = (_shrink_rows if many else _shrink)(*_sizes(at, of), norm=layer and layer.norm)
    x = x if norm is None else at.place(norm.x)
    _launch(at, of, kernel if many else kernel.cut, x, None if layer is None else layer.weight)


def append_packed_shrinks(at: Lowering, products: Sequence[Product], x: Slice) -> None:
    """A x of the products that wait for it, of the packed vectors that they take."""
    for of in _taken(at, products):
        cluster = LoraShrinkPacked.cluster_for(of.x.width, at.limits.cluster)
        _launch(at, of, _shrink_packed(*_sizes(at, of), cluster=cluster), x, None)


def _taken(at: Lowering, products: Sequence[Product]) -> Iterator[Adapt]:
    """Those that products wait for, each once, in their order; they are not pending any more."""
    for low in dict.fromkeys(of.low for of in products if of.low in at.pending):
        yield at.pending.pop(low)


def _sizes(at: Lowering, of: Adapt) -> tuple[Any, ...]:
    """The fields of `LoraShrink` up to the rows of B."""
    adapter, room, rows = rows_of_tensor(at, of.x).adapter, of.room, of.x.rows
    assert adapter is not None
    return (rows, of.x.width, len(of.of), room.slots, room.rank, adapter.nbytes // 4, room.element)


def _launch(at: Lowering, of: Adapt, kernel: LoraShrink, x: Slice, weight: Slice | None) -> None:
    rows = rows_of_tensor(at, of.x)
    if of.x.rows <= MOST_REQUESTS:
        kernel = replace(kernel, outs=tuple(linear.rows for linear in of.of))
    matrices: dict[str, Slice] = {}
    for suffix, linear in zip(kernel.suffixes, of.of, strict=True):
        a, b = at.parts.weights.lora(linear)
        matrices[f"lora_a{suffix}"] = a
        if kernel.outs:
            matrices[f"lora_b{suffix}"] = b
    at.launch(
        kernel,
        of.label,
        x=x,
        weight=weight,
        sequence=rows.sequence,
        adapter=rows.adapter,
        adapter_scale=rows.adapter_scale,
        lora=at.place(of.y),
        lora_slot=at.work[SLOTS],
        **matrices,
    )


def rows_of_tensor(at: Lowering, x: Tensor) -> Rows:
    """The rows of the step that a tensor has: all, or those whose results are wanted. Rows whose
    adapters tokens have switched on are sequences of their own."""
    rows = _rows_of_tensor(at, x)
    if at.parts.config.switch is None:
        return rows
    first = 0 if rows is at.rows else at.rows.count
    sequence, adapter, scale = (
        at.work[name].slice(4 * first, 4 * rows.count) for name in (ROWS, ADAPTERS, SCALES)
    )
    return replace(rows, sequence=sequence, adapter=adapter, adapter_scale=scale)


def _rows_of_tensor(at: Lowering, x: Tensor) -> Rows:
    if at.outputs is None or x.rows != at.outputs.rows.count:
        return at.rows
    if x.rows != at.rows.count:
        return at.outputs.rows
    maker = at.maker(x)
    while maker is not None and not isinstance(maker, Gather):
        maker = at.maker(maker.reads[0]) if maker.reads else None
    return at.rows if maker is None else at.outputs.rows


def adapter_arguments(
    at: Lowering, products: Sequence[Product], first: int, count: int, pair: bool = False
) -> dict[str, Slice]:
    """What the step `Adapted` of a launch takes, for ``count`` vectors from ``first`` on."""
    launch: dict[str, Slice] = {}
    for adapt in _taken(at, products):
        _append_shrink(at, adapt)
    for number, of in enumerate(products):
        if of.low is None:
            continue
        suffix = "_up" if pair and number else number or ""
        launch[f"lora_b{suffix}"] = at.parts.weights.lora(of.of)[1]
        nbytes = 4 * of.low.width
        launch["lora"] = at.place(of.low).slice(first * nbytes, count * nbytes)
        launch["lora_slot"] = at.work[SLOTS].slice(4 * first, 4 * count)
    return launch


def own_adapters(
    at: Lowering, products: Sequence[Product], kernel: Main, pair: bool
) -> tuple[Main, dict[str, Slice]] | None:
    """The product with `SelfAdapted` of one vector, or `SharedAdapted` of several packed ones, in
    place of `Adapted`, and what that takes; None where neither serves."""
    adapts = {of.low for of in products if of.low is not None}
    step = kernel.steps.find(Adapted)
    if step is None or len(adapts) > 1:
        return None
    (low,) = adapts
    if low not in at.pending:
        return None
    rows = rows_of_tensor(at, at.pending[low].x)
    assert rows.adapter is not None
    assert rows.adapter_scale is not None
    own = _with_own(kernel, step, rows.adapter.nbytes // 4, at.limits.sms)
    if not isinstance(own, type(kernel)):
        return None
    del at.pending[low]
    made = own.steps.find(OwnAdapted)
    assert made is not None
    matrices: dict[str, Slice] = {}
    for number, product in enumerate(products):
        if product.low is not None:
            suffix = "_up" if pair and number else number or ""
            a, b = at.parts.weights.lora(product.of)
            matrices |= {f"lora_a{suffix}": a, f"lora_b{suffix}": b}
    shared = {
        name: at.work.zeroed(f"{name} of {made.counts(own)}").slice(0, nbytes_of(own, name))
        for name in ("lora_words", "lora_counts")
    }
    return own, {
        **matrices,
        **shared,
        "sequence": rows.sequence,
        "adapter": rows.adapter,
        "adapter_scale": rows.adapter_scale,
    }


@lru_cache(maxsize=256)
def _with_own(kernel: ProductSpec, step: Adapted, sequences: int, sms: int) -> ProductSpec | None:
    """All CTAs that compute A x must be on the device at once."""
    fields = step.slots, step.rank, step.element, step.places, step.count
    own: OwnAdapted
    if isinstance(kernel, GemmWgmma):
        own = SharedAdapted(*fields, sequences=sequences, sms=sms)
    elif isinstance(kernel, Gemv):
        own = SelfAdapted(*fields, sequences=sequences)
    else:
        return None
    epilogue = tuple(own if each is step else each for each in kernel.epilogue)
    try:
        made = replace(kernel, epilogue=epilogue)
    except PtxgenError:  # too many ranks or vectors, a cluster, no room
        return None
    return made if own.suits(made, sms) else None


#: A norm is part of the launch where the products compute it, too.
RULES = (Rule("norm adapt", lower_normed_adapt), Rule("adapt", lower_adapt))
