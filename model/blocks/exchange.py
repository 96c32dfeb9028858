"""What the ranks of a group exchange in a step, as launches appended to a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from urdir.model.memory.exchange import RankExchange
from urdir.ptxgen.kernels.exchange.all_gather import AllGather
from urdir.ptxgen.kernels.exchange.all_reduce import AllReduce
from urdir.ptxgen.kernels.exchange.all_reduce_two_shot import AllReduceTwoShot

if TYPE_CHECKING:
    from urdir.driver.memory import Slice
    from urdir.driver.plan import Plan


def append_sum_of_ranks(
    plan: Plan,
    exchange: RankExchange,
    label: str,
    values: int,
    x: Slice,
    y: Slice,
    residual: Slice | None = None,
    *,
    given: bool = False,
) -> None:
    """y (values,) f32 = the sum of the ranks' x, plus the ``residual``; y may be either.

    Many values go in two shots, which give the same bits. ``given``: see `AllReduce`.
    """
    share, shape = exchange.share, exchange.shape
    two_shots = shape.takes_two_shots(values)
    most = share.ranks * shape.part if two_shots else shape.capacity
    for first in range(0, values, most):
        count, adds = min(most, values - first), residual is not None
        kernel: AllReduce | AllReduceTwoShot
        if two_shots:
            kernel = AllReduceTwoShot(count, share.ranks, share.rank, shape.part, residual=adds)
        else:
            ranks, rank, capacity = share.ranks, share.rank, shape.capacity
            kernel = AllReduce(count, ranks, rank, capacity, residual=adds, given=given)
        part = (4 * first, 4 * count)
        own = {"x": x.slice(*part), "y": y.slice(*part)}
        if residual is not None:
            own["residual"] = residual.slice(*part)
        others = exchange.stage_arguments if two_shots else exchange.arguments_of(kernel)
        plan.launch(kernel, _numbered(label, first), **own, **others)


def append_begun_sum_of_ranks(
    plan: Plan,
    exchange: RankExchange,
    label: str,
    rows: int,
    cols: int,
    **arguments: Slice,
) -> None:
    """y (rows, cols) f32 = the sum of the ranks' x, plus the ``residual``, with the norm that
    follows begun; ``arguments`` by the names that `AllReduce` has. There are few rows."""
    share, capacity = exchange.share, exchange.shape.capacity
    kernel = AllReduce(rows * cols, share.ranks, share.rank, capacity, residual=True, cols=cols)
    plan.launch(kernel, label, **arguments, **exchange.arguments_of(kernel))


def begins_norms(exchange: RankExchange, rows: int, cols: int) -> bool:
    """Whether one launch makes such a sum and begins the norm after it."""
    return cols % 32 == 0 and exchange.shape.takes_one_launch(rows * cols)


def append_parts_of_ranks(
    plan: Plan, exchange: RankExchange, label: str, rows: int, x: Slice, y: Slice
) -> None:
    """y (rows, vocabulary) f32 = the ranks' logits x (rows, their own), side by side."""
    share, capacity = exchange.share, exchange.shape.capacity
    widths, width = share.vocabulary, share.vocabulary[share.rank]
    at_once = capacity // max(widths)
    for first in range(0, rows, at_once):
        count = min(at_once, rows - first)
        kernel = AllGather.of(count, widths, share.rank, capacity)
        plan.launch(
            kernel,
            _numbered(label, first),
            x=x.slice(4 * first * width, 4 * count * width),
            y=y.slice(4 * first * sum(widths), 4 * count * sum(widths)),
            **exchange.arguments_of(kernel),
        )


def _numbered(label: str, first: int) -> str:
    return f"{label} from {first}" if first else label
