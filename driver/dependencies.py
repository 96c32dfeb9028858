"""Dependencies between operations: edges from byte intervals and declared access.

Names are irrelevant. An operation declares every interval of device memory that it may read or
write. Live allocations do not overlap, so an address interval identifies the allocation and
offsets. A reused workspace slice is handled like any other memory.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum


class Hazard(Enum):
    """Kinds of hazard between two operations, the strongest first."""

    READ_AFTER_WRITE = "read after write"
    WRITE_AFTER_WRITE = "write after write"
    WRITE_AFTER_READ = "write after read"


_STRENGTH = {hazard: rank for rank, hazard in enumerate(Hazard)}


@dataclass(frozen=True, slots=True)
class Use:
    """Bytes ``[start, stop)`` of device memory that an operation accesses."""

    start: int
    stop: int
    reads: bool
    writes: bool
    name: str = ""


@dataclass(frozen=True, slots=True)
class Edge:
    """Operation ``after`` may start only once operation ``before`` is complete.

    ``hazard`` is the strongest reason and ``name`` the argument of ``after`` that it concerns: both
    are for messages. Between two operations there is at most one edge.
    """

    before: int
    after: int
    hazard: Hazard
    name: str


def find_edges(operations: Iterable[Sequence[Use]]) -> tuple[Edge, ...]:
    """The fewest edges that order every pair of conflicting operations.

    Operations are numbered in the order given, which is the order that running them one after the
    other would have. Two conflict when they touch a byte in common and one of them writes it.
    Returned ordered by (after, before), transitively reduced: no edge follows from others.
    """
    found = Dependencies()
    return tuple(edge for uses in operations for edge in found.add(uses))


class Dependencies:
    """Incremental `find_edges`."""

    def __init__(self) -> None:
        self._memory = _Memory()
        self._ancestors: list[int] = []  # per operation, all operations before it, as a bit mask

    def add(self, declared: Sequence[Use]) -> Sequence[Edge]:
        """The edges that lead to the next operation, ordered by ``before``."""
        index = len(self._ancestors)
        uses = [use for use in declared if use.start < use.stop]
        kept = []
        before = 0
        # Latest first: the ancestors of an edge already kept imply many others.
        for edge in sorted(self._memory.conflicts(index, uses), key=lambda e: -e.before):
            if not before >> edge.before & 1:
                kept.append(edge)
                before |= self._ancestors[edge.before] | 1 << edge.before
        self._ancestors.append(before)
        self._memory.record(index, uses)
        return kept[::-1]


def missing_edges(
    needed: Iterable[Edge], edges: Iterable[tuple[int, int]], count: int
) -> tuple[Edge, ...]:
    """The edges of `find_edges` that ``edges`` do not imply.

    ``edges`` are pairs (before, after) with before < after among ``count`` operations.
    """
    ancestors = [0] * count
    for before, after in sorted(edges, key=lambda edge: edge[1]):
        ancestors[after] |= ancestors[before] | 1 << before
    return tuple(e for e in needed if not ancestors[e.after] >> e.before & 1)


@dataclass(slots=True)
class _Segment:
    """Bytes with a common history: the last writer, and the readers since."""

    start: int
    stop: int
    writer: int | None = None
    readers: list[int] = field(default_factory=list)

    def split(self, at: int) -> _Segment:
        """Cut at an inner address; keeps the lower part, returns the upper one."""
        upper = _Segment(at, self.stop, self.writer, list(self.readers))
        self.stop = at
        return upper


class _Memory:
    """The bytes touched so far, as disjoint segments in address order."""

    def __init__(self) -> None:
        self._segments: list[_Segment] = []
        self._starts: list[int] = []  # start addresses of the segments, for bisection

    def conflicts(self, index: int, uses: Sequence[Use]) -> Iterable[Edge]:
        """One edge, with the strongest hazard, from every operation that ``index`` conflicts with
        directly, without a write in between.
        """
        found: dict[int, Edge] = {}
        for use in uses:
            for before, hazard in self._hazards(use):
                known = found.get(before)
                if known is None or _STRENGTH[hazard] < _STRENGTH[known.hazard]:
                    found[before] = Edge(before, index, hazard, use.name)
        return found.values()

    def record(self, index: int, uses: Sequence[Use]) -> None:
        """Record the accesses of operation ``index``; its reads precede its writes."""
        for use in uses:
            if use.reads:
                for segment in self._tile(use):
                    segment.readers.append(index)
        for use in uses:
            if use.writes:
                first, last = self._bounds(use)
                self._segments[first:last] = [_Segment(use.start, use.stop, index)]
                self._starts[first:last] = [use.start]

    def _hazards(self, use: Use) -> Iterator[tuple[int, Hazard]]:
        first = bisect_right(self._starts, use.start)
        if first and self._segments[first - 1].stop > use.start:
            first -= 1
        last = bisect_left(self._starts, use.stop, first)
        for segment in self._segments[first:last]:
            if use.reads and segment.writer is not None:
                yield segment.writer, Hazard.READ_AFTER_WRITE
            if use.writes and segment.writer is not None:
                yield segment.writer, Hazard.WRITE_AFTER_WRITE
            if use.writes:
                for reader in segment.readers:
                    yield reader, Hazard.WRITE_AFTER_READ

    def _bounds(self, use: Use) -> tuple[int, int]:
        """Indices of the segments inside ``use``, after cutting those that overlap its ends."""
        return self._cut(use.start), self._cut(use.stop)

    def _cut(self, at: int) -> int:
        """Make ``at`` a boundary; returns the index of the first segment at or above it."""
        index = bisect_left(self._starts, at)
        if index and at < self._segments[index - 1].stop:
            self._segments.insert(index, self._segments[index - 1].split(at))
            self._starts.insert(index, at)
        return index

    def _tile(self, use: Use) -> list[_Segment]:
        """The segments that cover exactly ``use``, created if missing."""
        first, last = self._bounds(use)
        found = self._segments[first:last]
        if len(found) == 1 and (found[0].start, found[0].stop) == (use.start, use.stop):
            return found
        tiles: list[_Segment] = []
        at = use.start
        for segment in found:
            if at < segment.start:
                tiles.append(_Segment(at, segment.start))
            tiles.append(segment)
            at = segment.stop
        if at < use.stop:
            tiles.append(_Segment(at, use.stop))
        self._segments[first:last] = tiles
        self._starts[first:last] = [tile.start for tile in tiles]
        return tiles
