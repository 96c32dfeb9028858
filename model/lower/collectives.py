"""Rules for sums and vectors of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from urdir.model.graph.op import Op
from urdir.model.graph.ops import Add, AllGather, AllReduce, Norm
from urdir.model.graph.tensor import Tensor
from urdir.model.lower.lowering import Lowering
from urdir.model.lower.rule import Rule, alone, variants
from urdir.model.memory.exchange import RankExchange
from urdir.model.memory.norms import NormLayer
from urdir.ptxgen.kernels.exchange import all_gather, all_reduce, all_reduce_two_shot
from urdir.ptxgen.kernels.linear.spec import MAX_BATCH

if TYPE_CHECKING:
    from urdir.driver.memory import Slice


def lower_sum_of_ranks(at: Lowering, ops: Sequence[Op]) -> bool:
    """all_reduce [add]: the sum of all ranks' parts, added to what was before. A launch for few
    rows begins the norm that follows."""
    of, *adds = ops
    assert isinstance(of, AllReduce)
    exchange, residual, y = at.parts.exchange, None, of.y
    assert exchange is not None
    if adds:
        (add,) = adds
        assert isinstance(add, Add)
        if add.b is not of.y or not at.is_read_once(of.y):
            return False
        residual, y = at.place(add.a), add.y
    given = of.x in at.sent
    norm = None if given or residual is None else _begun_norm(at, exchange, y)
    x = at.place(of.x)
    if norm is None or residual is None:
        append_sum_of_ranks(at, of.label, of.x.rows * of.x.width, x, at.place(y), residual, given)
        return True
    begun = at.begin_norm(y, norm, packed=False)
    share, capacity = exchange.share, exchange.shape.capacity
    kernel = all_reduce.AllReduce(
        y.rows * y.width, share.ranks, share.rank, capacity, residual=True, cols=y.width
    )
    at.launch(
        kernel,
        of.label,
        x=x,
        residual=residual,
        y=at.place(y),
        **begun.arguments,
        **exchange.arguments_of(kernel),
    )
    return True


def _begun_norm(at: Lowering, exchange: RankExchange, y: Tensor) -> NormLayer | None:
    """The norm that follows, where the sum of the ranks begins it: products of several rows take it
    so, and one launch makes the sum."""
    following, rows, cols = at.following(), y.rows, y.width
    if not isinstance(following, Norm) or following.x is not y:
        return None
    if not 1 < rows <= MAX_BATCH or at.exact:
        return None
    norm = at.norm(following.of)
    begins = (
        at.begins_block(following)
        and cols % 32 == 0
        and exchange.shape.takes_one_launch(rows * cols)
    )
    return norm if norm.is_scaled_rms and begins else None


def append_sum_of_ranks(
    at: Lowering,
    label: str,
    values: int,
    x: Slice,
    y: Slice,
    residual: Slice | None = None,
    given: bool = False,
) -> None:
    """y (values,) f32 = the sum of the ranks' x, plus the ``residual``; y may be either.

    Many values go in two shots, which give the same bits. ``given``: see `AllReduce`.
    """
    exchange = at.parts.exchange
    assert exchange is not None
    share, shape = exchange.share, exchange.shape
    two_shots = shape.takes_two_shots(values)
    most = share.ranks * shape.part if two_shots else shape.capacity
    for first in range(0, values, most):
        count, adds = min(most, values - first), residual is not None
        kernel: all_reduce.AllReduce | all_reduce_two_shot.AllReduceTwoShot
        if two_shots:
            kernel = all_reduce_two_shot.AllReduceTwoShot(
                count, share.ranks, share.rank, shape.part, residual=adds
            )
        else:
            ranks, rank, capacity = share.ranks, share.rank, shape.capacity
            kernel = all_reduce.AllReduce(count, ranks, rank, capacity, residual=adds, given=given)
        part = (4 * first, 4 * count)
        own = {"x": x.slice(*part), "y": y.slice(*part)}
        if residual is not None:
            own["residual"] = residual.slice(*part)
        others = exchange.stage_arguments if two_shots else exchange.arguments_of(kernel)
        at.launch(kernel, _numbered(label, first), **own, **others)


def lower_parts_of_ranks(at: Lowering, of: AllGather) -> None:
    """Gather the logits of all ranks, side by side."""
    exchange = at.parts.exchange
    assert exchange is not None
    share, capacity = exchange.share, exchange.shape.capacity
    widths, width = share.vocabulary, share.vocabulary[share.rank]
    at_once = capacity // max(widths)
    x, y = at.place(of.x), at.place(of.y)
    for first in range(0, of.x.rows, at_once):
        count = min(at_once, of.x.rows - first)
        kernel = all_gather.AllGather.of(count, widths, share.rank, capacity)
        at.launch(
            kernel,
            _numbered(of.label, first),
            x=x.slice(4 * first * width, 4 * count * width),
            y=y.slice(4 * first * sum(widths), 4 * count * sum(widths)),
            **exchange.arguments_of(kernel),
        )


def _numbered(label: str, first: int) -> str:
    return f"{label} from {first}" if first else label


RULES: Sequence[Rule] = (
    *variants("all_reduce add?", lower_sum_of_ranks),
    alone("all_gather", lower_parts_of_ranks),
)
