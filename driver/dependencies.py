"""Which operation must wait for which: edges from byte intervals and declared access.

Names play no part. An operation states every interval of device memory that it may read or write.
Live allocations do not overlap, so an interval of addresses names the allocation and the offsets in
it. A workspace slice that is used again for something else is seen like any other memory.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum


class Hazard(Enum):
    """Why two operations keep their order, the strongest reason first."""

    READ_AFTER_WRITE = "read after write"
    WRITE_AFTER_WRITE = "write after write"
    WRITE_AFTER_READ = "write after read"


_STRENGTH = {hazard: rank for rank, hazard in enumerate(Hazard)}


@dataclass(frozen=True, slots=True)
class Use:
    """Bytes ``[start, stop)`` of the device's address space that an operation touches."""

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
    """`find_edges` for operations that come one by one."""

    def __init__(self) -> None:
        self._memory = _Memory()
        self._ancestors: list[int] = []  # per operation, the set of all before it, as a bit mask

    def add(self, declared: Sequence[Use]) -> Sequence[Edge]:
        """The edges that lead to the next operation, ordered by ``before``."""
        index = len(self._ancestors)
        uses = [use for use in declared if use.start < use.stop]
        kept = []
        before = 0
        # Latest first: whatever an edge kept already implies is among its ancestors.
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
    """What ``edges``, pairs (before, after) with before < after, leave unordered.

    Of the edges that ``count`` operations need (`find_edges`), those that no path of ``edges``
    implies.
    """
    ancestors = [0] * count
    for before, after in sorted(edges, key=lambda edge: edge[1]):
        ancestors[after] |= ancestors[before] | 1 << before
    return tuple(e for e in needed if not ancestors[e.after] >> e.before & 1)


@dataclass(slots=True)
class _Segment:
    """Bytes with one history: the last writer, and who has read them since."""

    start: int
    stop: int
    writer: int | None = None
    readers: list[int] = field(default_factory=list)

    def split(self, at: int) -> _Segment:
        """Cut at an address inside; this keeps the lower part, the upper one is returned."""
        upper = _Segment(at, self.stop, self.writer, list(self.readers))
        self.stop = at
        return upper


class _Memory:
    """The bytes touched so far, as disjoint segments in address order."""

    def __init__(self) -> None:
        self._segments: list[_Segment] = []
        self._starts: list[int] = []  # of the segments: what is searched in

    def conflicts(self, index: int, uses: Sequence[Use]) -> Iterable[Edge]:
        """One edge, with the strongest reason, from every operation seen here that ``index``
        conflicts with directly (with nobody having written in between).
        """
        found: dict[int, Edge] = {}
        for use in uses:
            for before, hazard in self._hazards(use):
                known = found.get(before)
                if known is None or _STRENGTH[hazard] < _STRENGTH[known.hazard]:
                    found[before] = Edge(before, index, hazard, use.name)
        return found.values()

    def record(self, index: int, uses: Sequence[Use]) -> None:
        """Note what operation ``index`` does; its reads come before its writes."""
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
        """Indices of the segments inside ``use``, after cutting those that stick out of it."""
        return self._cut(use.start), self._cut(use.stop)

    def _cut(self, at: int) -> int:
        """Make ``at`` a boundary; returns the index of the first segment at or above it."""
        index = bisect_left(self._starts, at)
        if index and at < self._segments[index - 1].stop:
            self._segments.insert(index, self._segments[index - 1].split(at))
            self._starts.insert(index, at)
        return index

    def _tile(self, use: Use) -> list[_Segment]:
        """The segments that cover exactly ``use``, made where there were none."""
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
