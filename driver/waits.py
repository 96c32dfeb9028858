"""What the operations of a recorded graph wait for."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import pairwise

from urdir.driver.context import OpenDevice
from urdir.driver.dependencies import Dependencies, Edge, conflict
from urdir.driver.node import may_be_programmatic
from urdir.driver.operation import Operation
from urdir.driver.parallel import pieces
from urdir.driver.streamed import transfers_of

#: The share of operations that need not wait for the one just before them, up to which all do.
_FEW_BREAKS = 1 / 20
#: The operations that one waits for, by their numbers: for some plainly, for others
#: programmatically.
Waits = tuple[Sequence[int], Sequence[int]]


def waits_of(
    operations: Sequence[Operation], device: OpenDevice, programmatic: bool
) -> Generator[None, None, tuple[Sequence[Edge], Sequence[Waits]]]:
    """The edges that the operations of a graph need, and what each of them waits for: with
    ``programmatic`` edges where these are allowed. In small pieces."""
    transfers = transfers_of(operations)
    chain = yield from _chain(operations, transfers)
    edges: list[Sequence[Edge]] = []
    if not chain or any(transfers):  # what is a chain whole needs no edges but its own
        dependencies = Dependencies()
        yield from pieces(operations, lambda of: edges.append(dependencies.add(of.uses())))
    found = [[edge.before for edge in of] for of in edges] or [[] for _ in operations]
    before = _in_order(found, transfers, chain)
    waits: list[Waits] = []

    def look(number: int) -> None:
        plain: list[int] = []
        early: list[int] = []
        for other in before[number]:
            # kernels read weights before they wait: not those of a slot that is still filled
            may = programmatic and not (transfers[other] or transfers[number])
            may = may and may_be_programmatic(device, operations[other], operations[number])
            (early if may else plain).append(other)
        waits.append((plain, early))

    yield from pieces(range(len(operations)), look)
    return [edge for of in edges for edge in of], waits


def _chain(
    operations: Sequence[Operation], transfers: Sequence[bool]
) -> Generator[None, None, Sequence[tuple[int, int]]]:
    """Each operation that is no transfer with the one before it, if few need not wait for that;
    else none. In small pieces.

    A fork makes every launch of a graph slower: a decode step of Qwen3.5-4B took 1.050 ms as a
    chain of 165 launches, 1.094 with one more that forked (H200, 2026-11-28).
    """
    others = [number for number, is_one in enumerate(transfers) if not is_one]
    pairs, breaks = [*pairwise(others)], list[int]()

    def look(pair: tuple[int, int]) -> None:
        earlier, number = pair
        if not conflict(operations[earlier].uses(), operations[number].uses()):
            breaks.append(number)

    yield from pieces(pairs, look)
    return pairs if len(breaks) <= _FEW_BREAKS * len(others) else ()


def _in_order(
    before: Sequence[Sequence[int]], transfers: Sequence[bool], chain: Sequence[tuple[int, int]]
) -> Sequence[Sequence[int]]:
    """The operations that each one waits for: those of ``before``, or in a ``chain`` the one just
    before. Transfers are apart: a chain of their own, since they share a link, beside the
    launches."""
    waits: list[Sequence[int]] = [*before]
    for earlier, number in chain:
        waits[number] = [earlier, *(of for of in before[number] if transfers[of])]
    last = None
    for number, is_one in enumerate(transfers):
        if is_one:
            waits[number] = [
                *waits[number],
                *([] if last is None or last in waits[number] else [last]),
            ]
            last = number
    return waits
