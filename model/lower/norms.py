"""Rules for norms, alone or at the end of a block, as launches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from urdir.model.graph.op import Op
from urdir.model.graph.ops import Add, Gate, Norm, Product, Scale, ScaleBy
from urdir.model.graph.tensor import Tensor
from urdir.model.lower.lowering import Lowering
from urdir.model.lower.requests import packs, takes_bytes, takes_few_normed, takes_halves
from urdir.model.lower.rule import Rule, alone, variants
from urdir.model.lower.stream import append_scale_by
from urdir.ptxgen.kernels import normalise
from urdir.ptxgen.kernels.linear import pack
from urdir.ptxgen.kernels.linear.pack_after import PackAfter
from urdir.ptxgen.weights.halves import Halves

if TYPE_CHECKING:
    from urdir.driver.memory import Slice
    from urdir.model.memory.norms import NormLayer
    from urdir.model.memory.weights import Matrix
    from urdir.ptxgen.weights.packed_few import Order

# One object for equal kernels, with its cached properties.
_normalise = lru_cache(maxsize=64)(normalise.Normalise)
_pack = lru_cache(maxsize=64)(pack.Pack)
_pack_after = lru_cache(maxsize=64)(PackAfter)


def append_norm(at: Lowering, label: str, of: Norm, y: Slice) -> None:
    """Append the norm of each vector of x, into y (rows, cols)."""
    layer, rows = at.norm(of.of), of.x.rows * of.x.width // of.cols
    kernel = _normalise(rows, of.cols, layer.norm, **_weight_rows(of))
    if y is at.work["normed"]:
        at.completed = of.x, of.of
    at.launch(kernel, label, x=at.place(of.x), y=y, weight=layer.weight, bias=layer.bias)


def append_shared_norm(at: Lowering, of: Norm) -> None:
    """Append the norm of many rows that products read beside others, into "normed", and packed for
    these where they take it so."""
    y, cols = of.y, of.cols
    products = [op for op in at.readers(y) if isinstance(op, Product)]
    matrices = [at.matrix(op.of) for op in products]
    whole = cols == y.width and not _weight_rows(of) and pack.Pack.can_norm(cols)
    takes = [takes_halves(at, y.rows, [matrix]) for matrix in matrices]
    if not whole or not takes or not all(takes):
        append_norm(at, of.label, of, at.work["normed"])
        return
    layer, normed, packed = at.norm(of.of), at.work["normed"], at.work["packed norm"]
    kernel = _pack(y.rows, cols, layer.norm, keeps=True)
    weights = {"weight": layer.weight, "bias": layer.bias}
    at.launch(kernel, of.label, x=at.place(of.x), y=packed, z=normed, **weights)
    at.completed, at.packed[y] = (of.x, of.of), packed


def append_norm_after(
    at: Lowering,
    label: str,
    norm: Norm | None,
    delta: Slice,
    add: Add,
    next_norm: Norm | None,
    scale: float = 1.0,
) -> None:
    """Append residual + scale * norm(delta), without a ``norm`` of delta itself; a ``next_norm`` is
    computed by the same launch."""
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


def _append_pack_after(
    at: Lowering, label: str, norm: Norm, add: Add, next_norm: Norm | None, scale: float
) -> bool:
    """The same for many rows, which are left packed, after the ``next_norm`` if there is one; False
    unless products that take them so follow, and nothing else reads that norm."""
    of, cols, y = at.norm(norm.of), add.y.width, add.y if next_norm is None else next_norm.y
    if norm.cols != cols or _weight_rows(norm) or not pack.Pack.can_norm(cols):
        return False
    if next_norm is not None and (next_norm.cols != cols or _weight_rows(next_norm)):
        return False
    readers = at.readers(y)
    matrices = [at.matrix(op.of) for op in readers if isinstance(op, Product)]
    if any(takes_bytes(at, y.rows, [matrix]) for matrix in matrices):
        return False
    if next_norm is not None and len(matrices) < len(readers):
        return False
    packed, order, then = _packed(at, y), None, None if next_norm is None else at.norm(next_norm.of)
    if packed is None and then is not None:
        order = _few_order(at, y, matrices, then)
        packed = None if order is None else at.place(y)
    if packed is None:
        return False
    kernel = _pack_after(y.rows, cols, of.norm, None if then is None else then.norm, scale, order)
    tensors = {"x": norm.x, "residual": add.a, "total": add.y}
    launch: dict[str, Slice | None] = {name: at.place(of) for name, of in tensors.items()}
    launch |= {"after_weight": of.weight, "after_bias": of.bias, "y": packed}
    if then is not None:
        launch |= {"weight": then.weight, "bias": then.bias}
    at.launch(kernel, label, **launch)
    at.packed[y] = packed
    if order is not None:
        at.completed = None  # which lay there in f32
    return True


def normed_place(at: Lowering, norm: Norm) -> Slice:
    """The place of a norm's result, which is marked as computed for the products that read it."""
    if norm.y.name != "normed":
        return at.place(norm.y)
    at.completed = norm.x, norm.of
    return at.work["normed"]


def lower_norm(at: Lowering, of: Norm) -> None:
    """A norm that several launches read, or of heads: a separate launch, unless it is computed
    already."""
    if of.y.name == "normed" and at.completed == (of.x, of.of):
        return
    whole = of.y.is_stream and of.cols == of.y.width and not _weight_rows(of)
    packed = _packed(at, of.y) if whole and pack.Pack.can_norm(of.cols) else None
    if packed is not None:
        layer, kernel = at.norm(of.of), _pack(of.y.rows, of.cols, at.norm(of.of).norm, keeps=True)
        weights = {"weight": layer.weight, "bias": layer.bias}
        at.launch(kernel, of.label, x=at.place(of.x), y=packed, z=at.place(of.y), **weights)
        at.packed[of.y] = packed
        return
    append_norm(at, of.label, of, at.place(of.y))


def _few_order(
    at: Lowering, y: Tensor, matrices: Sequence[Matrix], norm: NormLayer
) -> Order | None:
    """In which order few rows are left packed for products with the matrices: all take them so,
    together and each of them, and follow."""
    pair = isinstance(at.following(2), Gate) and len(matrices) == 2
    orders = {Halves(matrix.format).order for matrix in matrices}
    each = all(takes_few_normed(at, y.rows, [matrix], norm, False) for matrix in matrices)
    together = takes_few_normed(at, y.rows, matrices, norm, pair)
    follow = all(
        isinstance(op := at.following(i), Product) and op.x is y for i in range(len(matrices))
    )
    return orders.pop() if len(orders) == 1 and each and together and follow else None


def _packed(at: Lowering, y: Tensor) -> Slice | None:
    """The place of y's packed vectors, if products that take packed activations follow; None
    otherwise."""
    following: list[Matrix] = []
    while isinstance(op := at.following(len(following)), Product) and op.x is y:
        following.append(at.matrix(op.of))
    # other products might come when the vectors are others already
    others = [op for op in at.readers(y) if isinstance(op, Product)]
    if not following or len(others) > len(following):
        return None
    return at.work["packed"] if packs(at, y.rows, following) else None


def lower_norm_after(at: Lowering, ops: Sequence[Op]) -> bool:
    """norm [scale] add [norm | scale_by]: the end of a block that normalises its result. A stored
    factor that follows is multiplied in place."""
    norm, *rest = ops
    assert isinstance(norm, Norm)
    y, factor = norm.y, 1.0
    if isinstance(scale := rest[0], Scale):
        y, factor = scale.y, scale.factor
        rest.pop(0)
    add, next_norm = rest[0], rest[1] if len(rest) > 1 else None
    assert isinstance(add, Add)
    if add.b is not y or not (at.is_read_once(norm.y) and at.is_read_once(y)):
        return False
    scale_by = None
    if isinstance(next_norm, ScaleBy):
        if add.y.rows > 1 or factor != 1.0 or next_norm.x is not add.y:
            return False
        if not at.is_read_once(add.y):
            return False
        scale_by, next_norm = next_norm, None
        at.share(scale_by.y, add.y)
    if next_norm is not None:
        assert isinstance(next_norm, Norm)
        if next_norm.x is not add.y or not at.begins_block(next_norm):
            return False
    packs_too = scale_by is None and _append_pack_after(
        at, norm.label, norm, add, next_norm, factor
    )
    if not packs_too:
        append_norm_after(at, norm.label, norm, at.place(norm.x), add, next_norm, factor)
    if scale_by is not None:
        append_scale_by(at, f"{norm.label}.scale", scale_by)
    return True


def _weight_rows(of: Norm) -> dict[str, int]:
    return {"weight_rows": of.sets} if of.over or of.sets > 1 else {}


def before_norm(at: Lowering, x: Tensor, norm: Norm | None) -> tuple[Slice, NormLayer | None]:
    """What a launch reads, and the norm that it computes."""
    if norm is None:
        return at.place(x), None
    if at.completed == (norm.x, norm.of):
        return at.work["normed"], None
    return at.place(norm.x), at.norm(norm.of)


RULES: Sequence[Rule] = (
    *variants("norm scale? add norm", lower_norm_after),
    Rule("norm add scale_by", lower_norm_after),
    *variants("norm scale? add", lower_norm_after),
    alone("norm", lower_norm),
)
