"""What one of several ranks takes of matrices and vectors, and where things may be cut.

Columns can be cut between blocks of the tensor's type only: every 32 values, or every 256.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

from urdir.model.families.stored import Linear, Run, StoredVector

#: Inner values of networks come in as many at once where they can: whole groups of the kernels'
#: accesses.
_GROUP = 32

#: The block of each tensor's type: values of a row that lie together.
Blocks = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Span:
    """Some of a row of things: from number ``first`` on, ``count`` of them."""

    first: int
    count: int

    @property
    def stop(self) -> int:
        """The number after the last."""
        return self.first + self.count

    @property
    def run(self) -> Run:
        """The same as bounds."""
        return self.first, self.stop

    def times(self, width: int) -> Span:
        """The values of these things, of ``width`` each."""
        return Span(width * self.first, width * self.count)

    def groups(self, size: int) -> Span:
        """The groups of ``size`` things that these are of: whole ones, or a part of one."""
        return Span(self.first // size, max(1, self.count // size))

    def after(self, number: int) -> Span:
        """The same things where ``number`` others lie before them."""
        return Span(number + self.first, self.count)


def spans(things: int, ranks: int, fits: Callable[[int], bool]) -> list[Span] | None:
    """``things`` for each of ``ranks``, as evenly as boundaries that fit allow; None where a rank
    would have none."""
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
    """``heads`` for each of ``ranks``: whole groups with the same keys, or some heads of one, where
    there are fewer keys than ranks; boundaries are multiples of ``unit`` heads. The most that a
    rank has are as few as can be. None where a rank would have none.
    """

    def fits(first: int, stop: int) -> bool:
        whole = first % group == 0 and stop % group == 0
        return (stop % unit == 0 or stop == heads) and (
            whole or first // group == (stop - 1) // group
        )

    @cache
    def best(first: int, left: int) -> tuple[int, int, tuple[int, ...]] | None:
        """The most heads of a rank, the sum of their squares, and the ends, for the last ranks."""
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
    """Cuts for one rank."""

    blocks: Blocks
    rank: int
    ranks: int

    def heads(self, heads: int, group: int, width: int, *after: Linear) -> Span | None:
        """This rank's heads, ``group`` of which have the same keys, where the columns of the
        matrices ``after``, ``width`` for each head, can be cut; None where they cannot."""
        block = self.block(*after)
        found = head_spans(heads, group, block // math.gcd(block, width), self.ranks)
        return None if found is None else found[self.rank]

    def inner(self, width: int, *after: Linear) -> Span | None:
        """This rank's inner values of a network, which the matrices ``after`` read; None where they
        cannot be cut."""
        unit = math.lcm(self.block(*after), _GROUP)
        found = spans(width, self.ranks, lambda at: at % unit == 0)
        return None if found is None else found[self.rank]

    def columns(self, of: Linear, *runs: Run) -> Linear:
        """Some columns; the first rank adds the bias."""
        return Linear(of.matrix.pick_columns(*runs), of.bias if self.rank == 0 else None)

    def block(self, *matrices: Linear) -> int:
        """Columns that lie together in all of them."""
        return math.lcm(*(self.blocks[of.matrix.name] for of in matrices))


def of_heads(of: Linear, heads: int, some: Span) -> Linear:
    """The rows of some of the ``heads`` that a matrix has."""
    return of.pick(some.times(of.matrix.taken // heads).run)


def values_of_heads(of: StoredVector, heads: int, some: Span) -> StoredVector:
    """The same of a vector."""
    return of.pick(some.times(of.size // heads).run)


def rows_of_each(of: Linear, width: int, some: Span) -> Linear:
    """Some rows of every expert's ``width``, which lie one expert after the other, perhaps beside
    those of another matrix."""
    matrix, bias = of.matrix, of.bias
    period = width if matrix.each == matrix.period else matrix.period
    if bias is not None:
        size, first = bias.size // width * some.count, bias.first + some.first
        bias = replace(bias, first=first, size=size, each=some.count, period=period)
    first = matrix.first + some.first
    return Linear(replace(matrix, first=first, each=some.count, period=period), bias)
