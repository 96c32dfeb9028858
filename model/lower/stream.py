"""Rules for norms, sums and what else happens to vectors between products, as launches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from urdir.model.graph.ops import (
    Activate,
    Add,
    AddVector,
    Columns,
    Concat,
    Copy,
    Embed,
    Gate,
    Gather,
    Hide,
    Norm,
    Op,
    Product,
    Recall,
    Reorder,
    Scale,
    ScaleBy,
)
from urdir.model.graph.pooling import Pool
from urdir.model.lower.lowering import Lowering
from urdir.model.lower.parts import StepParts
from urdir.model.lower.requests import packs
from urdir.model.lower.rule import Rule, variants
from urdir.ptxgen.kernels import (
    activate,
    add,
    embedding,
    gather,
    hide,
    normalise,
    pool_rows,
    recall,
    reorder,
    rescale,
)
from urdir.ptxgen.kernels.join import Join
from urdir.ptxgen.kernels.linear import pack

if TYPE_CHECKING:
    from urdir.driver.memory import Slice
    from urdir.model.memory.weights import Matrix

# One object for equal kernels, with its cached properties.
_activate = lru_cache(maxsize=64)(activate.Activate)
_add = lru_cache(maxsize=64)(add.Add)
_normalise = lru_cache(maxsize=64)(normalise.Normalise)
_pack = lru_cache(maxsize=64)(pack.Pack)
_rescale = lru_cache(maxsize=64)(rescale.Rescale)


# ---- norms ----


def append_norm(at: Lowering, label: str, of: Norm, y: Slice) -> None:
    """The norm of its vectors, in y (rows, cols)."""
    layer, rows = at.norm(of.of), of.x.rows * of.x.width // of.cols
    kernel = _normalise(rows, of.cols, layer.norm, **_weight_rows(of))
    if y is at.work["normed"]:
        at.completed = of.x, of.of
    at.launch(kernel, label, x=at.place(of.x), y=y, weight=layer.weight, bias=layer.bias)


def append_norm_after(
    at: Lowering,
    label: str,
    norm: Norm | None,
    delta: Slice,
    add: Add,
    next_norm: Norm | None,
    scale: float = 1.0,
) -> None:
    """The sum of what was before and scale * norm(delta), or delta itself; with the ``next_norm``
    completed if it is given."""
    of = None if norm is None else at.norm(norm.of)
    then = None if next_norm is None else at.norm(next_norm.of)
    cols = add.y.width if norm is None else norm.cols
    rows = add.y.rows * add.y.width // cols
    kernel = _normalise(
        rows,
        cols,
        None if of is None else of.norm,
        residual=True,
        scale=scale,
        then=None if then is None else then.norm,
    )
    launch: dict[str, Slice | None] = {}
    if of is not None:
        launch |= {"weight": of.weight, "bias": of.bias}
    residual, y = at.place(add.a), at.place(add.y)
    if then is not None and next_norm is not None:
        z = normed_place(at, next_norm)
        launch |= {"next_weight": then.weight, "next_bias": then.bias, "z": z}
    at.launch(kernel, label, x=delta, residual=residual, y=y, **launch)


def normed_place(at: Lowering, norm: Norm) -> Slice:
    """Where a norm is completed for the products that read it."""
    if norm.y.name != "normed":
        return at.place(norm.y)
    at.completed = norm.x, norm.of
    return at.work["normed"]


def lower_norm(at: Lowering, ops: Sequence[Op]) -> bool:
    """A norm that several launches read, or of heads: a launch of its own, unless it is made."""
    (of,) = ops
    assert isinstance(of, Norm)
    if of.y.name == "normed" and at.completed == (of.x, of.of):
        return True
    if (packed := _packed_norm(at, of)) is not None:
        layer, kernel = at.norm(of.of), _pack(of.y.rows, of.cols, at.norm(of.of).norm, keeps=True)
        weights = {"weight": layer.weight, "bias": layer.bias}
        at.launch(kernel, of.label, x=at.place(of.x), y=packed, z=at.place(of.y), **weights)
        at.packed[of.y] = packed
        return True
    append_norm(at, of.label, of, at.place(of.y))
    return True


def _packed_norm(at: Lowering, of: Norm) -> Slice | None:
    """Where a norm that is the stream too is left packed, if products that take it so follow."""
    whole = of.y.is_stream and of.cols == of.y.width and not _weight_rows(of)
    if not whole or not pack.Pack.can_norm(of.cols):
        return None
    following: list[Matrix] = []
    while isinstance(op := at.following(len(following)), Product) and op.x is of.y:
        following.append(at.matrix(op.of))
    # other products might come when the vectors are others already
    others = [op for op in at.readers(of.y) if isinstance(op, Product)]
    if not following or len(others) > len(following):
        return None
    return at.work["packed"] if packs(at, of.y.rows, following) else None


def lower_norm_after(at: Lowering, ops: Sequence[Op]) -> bool:
    """norm [scale] add [norm]: the end of a block with a norm after it. A factor that follows is
    multiplied in place."""
    norm, *rest = ops
    assert isinstance(norm, Norm)
    y, factor = norm.y, 1.0
    if isinstance(scale := rest[0], Scale):
        y, factor = scale.y, scale.factor
        rest.pop(0)
    add, next_norm = rest[0], rest[1] if len(rest) > 1 else None
    assert isinstance(add, Add)
    if add.b is not y or at.readers(norm.y) != [ops[1]]:
        return False
    scale_by = None
    if isinstance(next_norm, ScaleBy):
        if add.y.rows > 1 or factor != 1.0 or next_norm.x is not add.y:
            return False
        scale_by, next_norm = next_norm, None
        at.share(scale_by.y, add.y)
    if next_norm is not None:
        assert isinstance(next_norm, Norm)
        if next_norm.x is not add.y or not at.begins_block(next_norm):
            return False
    append_norm_after(at, norm.label, norm, at.place(norm.x), add, next_norm, factor)
    if scale_by is not None:
        place, kernel = at.place(add.y), _rescale(add.y.width, scaled=True)
        s = at.vector(scale_by.factor)
        at.launch(kernel, f"{norm.label}.scale", x=place, s=s, y=place)
    return True


def _weight_rows(of: Norm) -> dict[str, int]:
    return {"weight_rows": of.sets} if of.over or of.sets > 1 else {}


# ---- sums and factors ----


def append_sum(at: Lowering, label: str, of: Add, delta: Slice, scale: float = 1.0) -> None:
    """What was before plus scale * delta."""
    kernel = _add(of.y.rows * of.y.width, scale)
    residual, y = at.place(of.a), at.place(of.y)
    at.launch(kernel, label, a=residual, b=delta, y=y)


def lower_sum(at: Lowering, ops: Sequence[Op]) -> bool:
    """[scale] add."""
    *scales, of = ops
    assert isinstance(of, Add)
    delta, factor = of.b, 1.0
    if scales:
        (scale,) = scales
        assert isinstance(scale, Scale)
        if scale.y is not of.b:
            return False
        delta, factor = scale.x, scale.factor
    append_sum(at, of.label, of, at.place(delta), factor)
    return True


def lower_added_vector(at: Lowering, ops: Sequence[Op]) -> bool:
    """A weight added to every row."""
    (of,) = ops
    assert isinstance(of, AddVector)
    kernel = add.Add(of.y.rows * of.y.width, width=of.y.width)
    at.launch(kernel, of.label, a=at.place(of.x), b=at.vector(of.vector), y=at.place(of.y))
    return True


def lower_scale(at: Lowering, ops: Sequence[Op]) -> bool:
    """A factor, in place."""
    (of,) = ops
    assert isinstance(of, Scale)
    place = at.place(of.x)
    at.share(of.y, of.x)
    at.launch(_rescale(of.y.rows * of.y.width, scale=of.factor), of.label, x=place, y=place)
    return True


def lower_scale_by(at: Lowering, ops: Sequence[Op]) -> bool:
    """A factor that is a weight."""
    (of,) = ops
    assert isinstance(of, ScaleBy)
    kernel, s = _rescale(of.y.rows * of.y.width, scaled=True), at.vector(of.factor)
    at.launch(kernel, of.label, x=at.place(of.x), s=s, y=at.place(of.y))
    return True


def lower_copy(at: Lowering, ops: Sequence[Op]) -> bool:
    """The stream, kept."""
    (of,) = ops
    assert isinstance(of, Copy)
    kernel = _rescale(of.y.rows * of.y.width)
    at.launch(kernel, of.label, x=at.place(of.x), y=at.place(of.y))
    return True


def lower_hide(at: Lowering, ops: Sequence[Op]) -> bool:
    """Columns with the lowest number, in place."""
    (of,) = ops
    assert isinstance(of, Hide)
    at.share(of.y, of.x)
    kernel = hide.Hide(of.y.width, of.first, of.end - of.first, of.y.rows)
    at.launch(kernel, of.label, y=at.place(of.x))
    return True


def lower_recall(at: Lowering, ops: Sequence[Op]) -> bool:
    """A sum with banked streams, which lie side by side."""
    (of,) = ops
    assert isinstance(of, Recall)
    assert of.of.weight is not None
    kernel = recall.Recall(of.y.rows, of.y.width, len(of.banked), of.of.norm.eps)
    bank = at.work["banked"].slice(0, len(of.banked) * of.y.nbytes)
    weight = at.vector(of.of.weight)
    at.launch(kernel, of.label, x=at.place(of.x), bank=bank, weight=weight, y=at.place(of.y))
    return True


# ---- activations and gates ----


def lower_activate(at: Lowering, ops: Sequence[Op]) -> bool:
    """f(x), in a launch of its own."""
    (of,) = ops
    assert isinstance(of, Activate)
    width = of.y.width if of.divisors is not None else 0
    kernel = _activate(of.y.rows * of.y.width, of.f, width=width)
    by = None if of.divisors is None else at.vector(of.divisors)
    at.launch(kernel, of.label, x=at.place(of.x), by=by, y=at.place(of.y))
    return True


def lower_gate(at: Lowering, ops: Sequence[Op]) -> bool:
    """gate [add]: f(gate) * x, added to what was before, in a launch of its own."""
    of, *adds = ops
    assert isinstance(of, Gate)
    y, added = of.y, None
    if adds:
        (add,) = adds
        assert isinstance(add, Add)
        if add.b is not of.y:
            return False
        y, added = add.y, at.place(add.a)
    kernel = _activate(
        of.y.rows * of.y.width, of.f, gated=True, group=of.group, added=added is not None
    )
    gate, up = at.place(of.gate), at.place(of.x)
    at.launch(kernel, of.label, gate=gate, up=up, added=added, y=at.place(y))
    return True


def lower_gate_of_columns(at: Lowering, ops: Sequence[Op]) -> bool:
    """columns gate: f(gate) times some columns of a wider tensor."""
    columns, of = ops
    assert isinstance(columns, Columns)
    assert isinstance(of, Gate)
    if of.x is not columns.y:
        return False
    width, whole = of.y.width, at.place(columns.x)
    kernel = _activate(of.y.rows * width, of.f, gated=True, width=width, stride=columns.x.width)
    up = whole.slice(4 * columns.first, whole.nbytes - 4 * columns.first)
    at.launch(kernel, of.label, gate=at.place(of.gate), up=up, y=at.place(of.y))
    return True


# ---- rows ----


def lower_gather(at: Lowering, ops: Sequence[Op]) -> bool:
    """The rows whose results are wanted."""
    (of,) = ops
    assert isinstance(of, Gather)
    assert at.outputs is not None
    kernel = gather.Gather(of.y.width, of.x.rows, of.y.rows)
    at.launch(kernel, of.label, x=at.place(of.x), index=at.outputs.index, y=at.place(of.y))
    return True


def lower_pool(at: Lowering, ops: Sequence[Op]) -> bool:
    """The mean of each text."""
    (of,) = ops
    assert isinstance(of, Pool)
    assert at.rows.texts is not None
    kernel = pool_rows.PoolRows(of.y.width, of.x.rows, of.y.rows)
    segment = at.rows.texts.segment
    at.launch(kernel, of.label, x=at.place(of.x), segment=segment, y=at.place(of.y))
    return True


def lower_reorder(at: Lowering, ops: Sequence[Op]) -> bool:
    """Columns in another order."""
    (of,) = ops
    assert isinstance(of, Reorder)
    kernel = reorder.Reorder(of.y.width, of.y.rows)
    order = at.parts.weights.vector(of.order)
    at.launch(kernel, of.label, x=at.place(of.x), order=order, y=at.place(of.y))
    return True


def lower_embed(at: Lowering, ops: Sequence[Op]) -> bool:
    """Rows of a table, for the rows' tokens."""
    (of,) = ops
    assert isinstance(of, Embed)
    weights, texts = at.parts.weights, at.rows.texts
    table = weights.matrix(of.table)
    positions = weights.positions if of.positions is not None else None
    known = 0 if positions is None else positions.nbytes // (4 * table.cols)
    where: dict[str, Slice] = {"position": at.rows.position}
    if texts is not None:
        max_len, sequences, tokens = known or at.rows.keys, 1, texts.tokens
        tokens = texts.types if of.types else tokens
    else:
        assert isinstance(at.parts, StepParts)
        state = at.parts.state
        max_len, sequences, tokens = state.max_len, state.sequences, state["tokens"]
        if of.tokens is not None:
            tokens = at.place(of.tokens)
        else:
            where = at.rows.arguments
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
    )
    at.launch(
        kernel,
        of.label,
        weights=table.data,
        tokens=tokens,
        y=at.place(of.y),
        **where,
        position_table=positions,
    )
    return True


def lower_concat(at: Lowering, ops: Sequence[Op]) -> bool:
    """Two vectors, one after the other."""
    (of,) = ops
    assert isinstance(of, Concat)
    kernel = Join(of.x.rows, of.x.width, of.other.width)
    at.launch(kernel, of.label, a=at.place(of.x), b=at.place(of.other), y=at.place(of.y))
    return True


RULES: Sequence[Rule] = (
    Rule("concat", lower_concat),
    *variants("norm scale? add norm", lower_norm_after),
    Rule("norm add scale_by", lower_norm_after),
    *variants("norm scale? add", lower_norm_after),
    *variants("scale? add", lower_sum),
    Rule("columns gate", lower_gate_of_columns),
    Rule("norm", lower_norm),
    Rule("add_vector", lower_added_vector),
    Rule("scale", lower_scale),
    Rule("scale_by", lower_scale_by),
    Rule("copy", lower_copy),
    Rule("hide", lower_hide),
    Rule("recall", lower_recall),
    Rule("activate", lower_activate),
    *variants("gate add?", lower_gate),
    Rule("gather", lower_gather),
    Rule("pool", lower_pool),
    Rule("reorder", lower_reorder),
    Rule("embed", lower_embed),
)
