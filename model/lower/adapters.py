"""Rules for low-rank adapters: A x of each row's adapter as a launch; B a is a step of the
product."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from urdir.model.graph.adapters import Adapt
from urdir.model.graph.ops import Gather, Norm, Op, Product
from urdir.model.graph.tensor import Tensor
from urdir.model.lower.lowering import Lowering
from urdir.model.lower.rows import Rows
from urdir.model.lower.rule import Rule
from urdir.model.lower.stream import append_norm
from urdir.ptxgen.kernels.linear.lora_shrink import MOST_REQUESTS, LoraShrink
from urdir.ptxgen.kernels.linear.lora_shrink_rows import LEAST_ROWS, LoraShrinkRows

if TYPE_CHECKING:
    from urdir.driver.memory import Slice

# One object for equal kernels, with its cached properties.
_shrink = lru_cache(maxsize=256)(LoraShrink)
_shrink_rows = lru_cache(maxsize=256)(LoraShrinkRows)


#: The slots of rows, as the last launch for an A has left them.
SLOTS = "lora slot"


def lower_normed_adapt(at: Lowering, ops: Sequence[Op]) -> bool:
    """norm adapt: the norm that the products compute as well."""
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
    """adapt: of x as it is, or after a norm that each reader computes."""
    (of,) = ops
    assert isinstance(of, Adapt)
    x, norm = at.place(of.x), at.unmade.get(of.x)
    if norm is not None and not at.norm(norm.of).is_scaled_rms:
        append_norm(at, f"{of.label}.norm", norm, at.work["normed"])
    if norm is not None and at.completed == (norm.x, norm.of):
        x, norm = at.work["normed"], None
    rows = rows_of_tensor(at, of.x)
    assert rows.adapter is not None
    layer = None if norm is None else at.norm(norm.of)
    room, sequences = of.room, rows.adapter.nbytes // 4
    many = of.x.rows >= LEAST_ROWS
    kernel = (_shrink_rows if many else _shrink)(
        *(of.x.rows, of.x.width, len(of.of), room.slots, room.rank, sequences, room.element),
        norm=layer and layer.norm,
        outs=tuple(linear.rows for linear in of.of) if of.x.rows <= MOST_REQUESTS else (),
    )
    matrices: dict[str, Slice] = {}
    for suffix, linear in zip(kernel.suffixes, of.of, strict=True):
        a, b = at.parts.weights.lora(linear)
        matrices[f"lora_a{suffix}"] = a
        if kernel.outs:
            matrices[f"lora_b{suffix}"] = b
    at.launch(
        kernel if many else kernel.cut,
        of.label,
        x=x if norm is None else at.place(norm.x),
        weight=None if layer is None else layer.weight,
        sequence=rows.sequence,
        adapter=rows.adapter,
        adapter_scale=rows.adapter_scale,
        lora=at.place(of.y),
        lora_slot=at.work[SLOTS],
        **matrices,
    )
    return True


def rows_of_tensor(at: Lowering, x: Tensor) -> Rows:
    """The rows of the step that a tensor has: all, or those whose results are wanted."""
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
    for number, of in enumerate(products):
        if of.low is None:
            continue
        suffix = "_up" if pair and number else number or ""
        launch[f"lora_b{suffix}"] = at.parts.weights.lora(of.of)[1]
        nbytes = 4 * of.low.width
        launch["lora"] = at.place(of.low).slice(first * nbytes, count * nbytes)
        launch["lora_slot"] = at.work[SLOTS].slice(4 * first, 4 * count)
    return launch


#: A norm is part of the launch where the products compute it, too.
RULES = (Rule("norm adapt", lower_normed_adapt), Rule("adapt", lower_adapt))
