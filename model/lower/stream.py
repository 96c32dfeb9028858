"""Rules for elementwise operations between products: sums, gates, copies, embedding."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from urdir.model.graph.op import Op
from urdir.model.graph.ops import (
    Activate,
    Add,
    AddVector,
    Columns,
    Embed,
    Gate,
    Gather,
    Hide,
    Recall,
    Scale,
    ScaleBy,
)
from urdir.model.graph.pooling import Pool
from urdir.model.graph.tensor import Tensor
from urdir.model.lower.lowering import Lowering
from urdir.model.lower.parts import StepParts
from urdir.model.lower.requests import is_read_packed
from urdir.model.lower.rule import Rule, alone, launched, variants
from urdir.ptxgen.kernels import activate, add, embedding, gather, hide, pool_rows, recall, rescale
from urdir.ptxgen.kernels.join import Join
from urdir.ptxgen.kernels.linear.pack import Pack
from urdir.ptxgen.kernels.reorder import Reorder

if TYPE_CHECKING:
    from urdir.driver.memory import Slice

# One object for equal kernels, with its cached properties.
_activate = lru_cache(maxsize=64)(activate.Activate)
_add = lru_cache(maxsize=64)(add.Add)
_pack = lru_cache(maxsize=64)(Pack)
_rescale = lru_cache(maxsize=64)(rescale.Rescale)


# ---- sums and factors ----


def append_sum(at: Lowering, label: str, of: Add, delta: Slice, scale: float = 1.0) -> None:
    """Append residual + scale * delta."""
    kernel = _add(of.y.rows * of.y.width, scale)
    residual, y = at.place(of.a), at.place(of.y)
    at.launch(kernel, label, a=residual, b=delta, y=y)


def lower_sum(at: Lowering, ops: Sequence[Op]) -> bool:
    """[scale] add: a sum, of which one addend may be scaled."""
    *scales, of = ops
    assert isinstance(of, Add)
    delta, factor = of.b, 1.0
    if scales:
        (scale,) = scales
        assert isinstance(scale, Scale)
        if scale.y is not of.b or not at.is_read_once(scale.y):
            return False
        delta, factor = scale.x, scale.factor
    append_sum(at, of.label, of, at.place(delta), factor)
    return True


def lower_added_vector(at: Lowering, of: AddVector) -> None:
    """Add a stored vector to every row."""
    kernel = add.Add(of.y.rows * of.y.width, width=of.y.width)
    at.launch(kernel, of.label, a=at.place(of.x), b=at.vector(of.vector), y=at.place(of.y))


def lower_scale(at: Lowering, of: Scale) -> None:
    """Multiply with a number, in place if the result may lie anywhere and nothing reads x later."""
    kernel = _rescale(of.y.rows * of.y.width, scale=of.factor)
    if not at.is_read_later(of.x):
        at.share(of.y, of.x)
    at.launch(kernel, of.label, x=at.place(of.x), y=at.place(of.y))


def lower_scale_by(at: Lowering, of: ScaleBy) -> None:
    """Multiply with a stored factor."""
    append_scale_by(at, of.label, of)


def append_scale_by(at: Lowering, label: str, of: ScaleBy) -> None:
    """Append the product of a tensor with a stored factor."""
    kernel, s = _rescale(of.y.rows * of.y.width, scaled=True), at.vector(of.factor)
    at.launch(kernel, label, x=at.place(of.x), s=s, y=at.place(of.y))


def lower_hide(at: Lowering, ops: Sequence[Op]) -> bool:
    """hide: set columns to the lowest f32 number, in place, so that nothing else may read x."""
    (of,) = ops
    assert isinstance(of, Hide)
    if at.is_read_later(of.x):
        return False
    at.share(of.y, of.x)
    kernel = hide.Hide(of.y.width, of.first, of.end - of.first, of.y.rows)
    at.launch(kernel, of.label, y=at.place(of.x))
    return True


def lower_recall(at: Lowering, of: Recall) -> None:
    """Mix the stream with banked streams, which lie side by side."""
    assert of.of.weight is not None
    kernel = recall.Recall(of.y.rows, of.y.width, len(of.banked), of.of.norm.eps)
    bank = at.work["banked"].slice(0, len(of.banked) * of.y.nbytes)
    weight = at.vector(of.of.weight)
    at.launch(kernel, of.label, x=at.place(of.x), bank=bank, weight=weight, y=at.place(of.y))


# ---- activations and gates ----


def lower_activate(at: Lowering, of: Activate) -> None:
    """f(x) as a separate launch."""
    width = of.y.width if of.divisors is not None else 0
    kernel = _activate(of.y.rows * of.y.width, of.f, width=width)
    by = None if of.divisors is None else at.vector(of.divisors)
    at.launch(kernel, of.label, x=at.place(of.x), by=by, y=at.place(of.y))


def lower_gate(at: Lowering, ops: Sequence[Op]) -> bool:
    """gate [add]: f(gate) * x, with a residual added if one follows, as a separate launch."""
    of, *adds = ops
    assert isinstance(of, Gate)
    if not adds and _gates_packed(at, of):
        return True
    y, added = of.y, None
    if adds:
        (add,) = adds
        assert isinstance(add, Add)
        if add.b is not of.y or not at.is_read_once(of.y):
            return False
        y, added = add.y, at.place(add.a)
    kernel = _activate(
        of.y.rows * of.y.width, of.f, gated=True, group=of.group, added=added is not None
    )
    gate, up = at.place(of.gate), at.place(of.x)
    at.launch(kernel, of.label, gate=gate, up=up, added=added, y=at.place(y))
    return True


def _gates_packed(at: Lowering, of: Gate) -> bool:
    """Append a gate of many rows that are left packed for the one product that reads them; False
    where none does."""
    y = of.y
    if of.group > 1 or y.width % 4 or not is_read_packed(at, y):
        return False
    kernel = _pack(y.rows, y.width, gated=of.f)
    at.packed[y] = at.work["packed"]
    at.launch(kernel, of.label, x=at.place(of.x), gate=at.place(of.gate), y=at.packed[y])
    return True


def lower_gate_of_columns(at: Lowering, ops: Sequence[Op]) -> bool:
    """columns gate: f(gate) times some columns of a wider tensor."""
    columns, of = ops
    assert isinstance(columns, Columns)
    assert isinstance(of, Gate)
    if of.x is not columns.y or not at.is_read_once(columns.y):
        return False
    width, whole = of.y.width, at.place(columns.x)
    kernel = _activate(of.y.rows * width, of.f, gated=True, width=width, stride=columns.x.width)
    up = whole.slice(4 * columns.first, whole.nbytes - 4 * columns.first)
    at.launch(kernel, of.label, gate=at.place(of.gate), up=up, y=at.place(of.y))
    return True


# ---- rows ----


def lower_gather(at: Lowering, of: Gather) -> None:
    """Gather the rows whose results the step needs."""
    assert at.outputs is not None
    kernel = gather.Gather(of.y.width, of.x.rows, of.y.rows)
    at.launch(kernel, of.label, x=at.place(of.x), index=at.outputs.index, y=at.place(of.y))


def lower_pool(at: Lowering, of: Pool) -> None:
    """Pool the rows of each text by their mean."""
    assert at.rows.texts is not None
    kernel = pool_rows.PoolRows(of.y.width, of.x.rows, of.y.rows)
    segment = at.rows.texts.segment
    at.launch(kernel, of.label, x=at.place(of.x), segment=segment, y=at.place(of.y))


def lower_embed(at: Lowering, of: Embed) -> None:
    """Look up the embedding of each row's token."""
    _append_embedding(at, of, None, of.y)


def lower_embed_with_types(at: Lowering, ops: Sequence[Op]) -> bool:
    """The same, plus that of each token's type."""
    of, types, add = ops
    assert isinstance(of, Embed)
    assert isinstance(types, Embed)
    assert isinstance(add, Add)
    is_sum = (add.a, add.b) == (of.y, types.y) and at.readers(of.y) == [add] == at.readers(types.y)
    tables = [at.parts.weights.matrix(each.table) for each in (of, types)]
    alike = tables[0].format == tables[1].format and types.scale == 1
    if not (is_sum and alike and types.types) or at.rows.texts is None or of.tokens is not None:
        return False
    _append_embedding(at, of, types, add.y)
    return True


def _append_embedding(at: Lowering, of: Embed, added: Embed | None, y: Tensor) -> None:
    weights, texts = at.parts.weights, at.rows.texts
    table = weights.matrix(of.table)
    positions = weights.positions if of.positions is not None else None
    known = 0 if positions is None else positions.nbytes // (4 * table.cols)
    where: dict[str, Slice]
    if texts is not None:
        max_len, sequences, tokens = known or at.rows.keys, 1, texts.tokens
        tokens = texts.types if of.types else tokens
        where = {"position": at.rows.position if positions is None else texts.places}
    else:
        assert isinstance(at.parts, StepParts)
        state = at.parts.state
        max_len, sequences, tokens = state.max_len, state.sequences, state["tokens"]
        where = at.rows.arguments
        if of.tokens is not None:
            tokens, where = at.place(of.tokens), {"position": at.rows.position}
    types = None if added is None else weights.matrix(added.table)
    if types is not None and texts is not None:
        where |= {"type_weights": types.data, "types": texts.types}
    kernel = embedding.Embedding(
        table.format,
        table.rows,
        table.cols,
        max_len,
        rows=of.y.rows,
        sequences=sequences,
        scale=of.scale,
        positions=known,
        texts=texts is not None or of.tokens is not None,
        types=0 if types is None else types.rows,
    )
    at.launch(
        kernel,
        of.label,
        weights=table.data,
        tokens=tokens,
        y=at.place(y),
        **where,
        position_table=positions,
    )


RULES: Sequence[Rule] = (
    launched("concat", lambda of: Join(of.a.rows, of.a.width, of.b.width)),
    *variants("scale? add", lower_sum),
    Rule("columns gate", lower_gate_of_columns),
    alone("add_vector", lower_added_vector),
    alone("scale", lower_scale),
    alone("scale_by", lower_scale_by),
    launched("copy", lambda of: _rescale(of.y.rows * of.y.width)),
    Rule("hide", lower_hide),
    alone("recall", lower_recall),
    alone("activate", lower_activate),
    *variants("gate add?", lower_gate),
    alone("gather", lower_gather),
    alone("pool", lower_pool),
    launched("reorder", lambda of: Reorder(of.y.width, of.y.rows)),
    Rule("embed embed add", lower_embed_with_types),
    alone("embed", lower_embed),
)
