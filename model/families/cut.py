"""Tensor-parallel cuts of matrices and vectors: where cuts are allowed, and one rank's part.

Columns can be cut only between quantisation blocks of the tensor: every 32 or 256 values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

from urdir.model.families.stored import Linear, Run, StoredVector

#: Inner values of FFNs are cut in multiples of this where possible: whole groups of the kernels'
#: accesses.
_GROUP = 32

#: Values per quantisation block of each tensor type.
Blocks = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Span:
    """A range of numbered items: ``count`` of them from ``first`` on."""

    first: int
    count: int

    @property
    def stop(self) -> int:
        """The number after the last item."""
        return self.first + self.count

    @property
    def run(self) -> Run:
        """The range as (first, stop)."""
        return self.first, self.stop

    def times(self, width: int) -> Span:
        """The range of values, with ``width`` values per item."""
        return Span(width * self.first, width * self.count)

    def groups(self, size: int) -> Span:
        """The range of groups of ``size`` items: whole groups, or part of one."""
        return Span(self.first // size, max(1, self.count // size))

    def after(self, number: int) -> Span:
        """The same range shifted by ``number`` items."""
        return Span(number + self.first, self.count)


def spans(things: int, ranks: int, fits: Callable[[int], bool]) -> list[Span] | None:
    """Split ``things`` over ``ranks`` as evenly as the allowed boundaries permit; None if a rank
    would get nothing."""
    allowed = [at for at in range(things + 1) if at in (0, things) or fits(at)]
    ends = [0]
    for rank in range(1, ranks + 1):
        ideal = things * rank / ranks
        left = [at for at in allowed if at > ends[-1]]
        if not left:
            return None
        ends.append(things if rank == ranks else min(left, key=lambda at: abs(at - ideal)))
    if ends[-2] >= things:
        return None
    return [Span(a, b - a) for a, b in pairwise(ends)]


@cache
def head_spans(heads: int, group: int, unit: int, ranks: int) -> tuple[Span, ...] | None:
    """Split ``heads`` over ``ranks``; None if a rank would get nothing.

    A rank gets whole groups of heads with the same keys, or part of one group if there are more
    ranks than key heads. Boundaries are multiples of ``unit`` heads. The largest share is minimal.
    """

    def fits(first: int, stop: int) -> bool:
        whole = first % group == 0 and stop % group == 0
        return (stop % unit == 0 or stop == heads) and (
            whole or first // group == (stop - 1) // group
        )

    @cache
    def best(first: int, left: int) -> tuple[int, int, tuple[int, ...]] | None:
        """Split the heads over the last ranks: largest share, sum of squared shares, range ends."""
        if left == 0:
            return (0, 0, ()) if first == heads else None
        found = []
        for stop in range(first + 1, heads - left + 2):
            if fits(first, stop) and (rest := best(stop, left - 1)) is not None:
                count = stop - first
                found.append((max(count, rest[0]), count * count + rest[1], (stop, *rest[2])))
        return min(found, default=None)

    found = best(0, ranks)
    if found is None:
        return None
    return tuple(Span(a, b - a) for a, b in pairwise((0, *found[2])))


@dataclass(frozen=True, slots=True)
class Cut:
    """Cuts that one rank applies."""

    blocks: Blocks
    rank: int
    ranks: int

    def heads(self, heads: int, group: int, width: int, *after: Linear) -> Span | None:
        """This rank's heads, ``group`` of which share keys. None if the columns of the matrices
        ``after``, ``width`` for each head, cannot be cut there."""
        if not all(map(_reads_in_order, after)):
            return None
        block = self.block(*after)
        found = head_spans(heads, group, block // math.gcd(block, width), self.ranks)
        return None if found is None else found[self.rank]

    def inner(self, width: int, *after: Linear) -> Span | None:
        """This rank's inner values of an FFN, which the matrices ``after`` read; None if they
        cannot be cut."""
        if not all(map(_reads_in_order, after)):
            return None
        unit = math.lcm(self.block(*after), _GROUP)
        found = spans(width, self.ranks, lambda at: at % unit == 0)
        return None if found is None else found[self.rank]

    def columns(self, of: Linear, *runs: Run) -> Linear:
        """Select columns, which are those of x; only rank 0 adds the bias."""
        return Linear(of.matrix.pick_columns(*runs), of.bias if self.rank == 0 else None)

    def block(self, *matrices: Linear) -> int:
        """The smallest number of columns that no block of these matrices crosses."""
        return math.lcm(*(self.blocks[of.matrix.name] for of in matrices))


def _reads_in_order(of: Linear) -> bool:
    """Whether some columns are multiplied with the same values of x: not those in another order,
    which belong to x of any rank."""
    return of.order is None and of.low is None


def of_heads(of: Linear, heads: int, some: Span) -> Linear:
    """Select the rows of some of a matrix's ``heads``."""
    return of.pick(some.times(of.matrix.taken // heads).run)


def values_of_heads(of: StoredVector, heads: int, some: Span) -> StoredVector:
    """Select the values of some of a vector's ``heads``."""
    return of.pick(some.times(of.size // heads).run)


def rows_of_each(of: Linear, width: int, some: Span) -> Linear:
    """Select some of the ``width`` rows of every expert; experts follow each other, perhaps beside
    those of another matrix."""
    matrix, bias = of.matrix, of.bias
    period = width if matrix.each == matrix.period else matrix.period
    if bias is not None:
        size, first = bias.size // width * some.count, bias.first + some.first
        bias = replace(bias, first=first, size=size, each=some.count, period=period)
    first = matrix.first + some.first
    return Linear(replace(matrix, first=first, each=some.count, period=period), bias, of.order)
