"""Dependencies between operations: edges from byte intervals and declared access.

Names are irrelevant. An operation declares every interval of device memory that it may read or
write. Live allocations do not overlap, so an address interval identifies the allocation and
offsets. A reused workspace slice is handled like any other memory.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


class Hazard(Enum):
    """Kinds of hazard between two operations, the strongest first."""

    READ_AFTER_WRITE = "read after write"
    WRITE_AFTER_WRITE = "write after write"
    WRITE_AFTER_READ = "write after read"


_HAZARDS = tuple(Hazard)
_READ_AFTER_WRITE, _WRITE_AFTER_WRITE, _WRITE_AFTER_READ = range(3)  # indices: the strongest first


class Use(NamedTuple):
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


def conflict(before: Sequence[Use], after: Sequence[Use]) -> bool:
    """Whether two operations touch a byte in common that one of them writes. Where they are
    neighbours, `find_edges` has an edge between them then."""
    for b in after:
        for a in before:
            if (a.writes or b.writes) and max(a.start, b.start) < min(a.stop, b.stop):
                return True
    return False


class Dependencies:
    """Incremental `find_edges`."""

    def __init__(self) -> None:
        self._memory = _Memory()
        self._ancestors: list[int] = []  # per operation, all operations before it, as a bit mask

    def add(self, declared: Sequence[Use]) -> Sequence[Edge]:
        """The edges that lead to the next operation, ordered by ``before``."""
        index = len(self._ancestors)
        uses = [use for use in declared if use.start < use.stop and (use.reads or use.writes)]
        found = self._memory.conflicts(uses)
        kept = []
        before = 0
        # Latest first: the ancestors of an edge already kept imply many others.
        for other in sorted(found, reverse=True):
            if not before >> other & 1:
                hazard, name = found[other]
                kept.append(Edge(other, index, _HAZARDS[hazard], name))
                before |= self._ancestors[other] | 1 << other
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

    def conflicts(self, uses: Sequence[Use]) -> dict[int, tuple[int, str]]:
        """The operations that ``uses`` conflict with directly, without a write in between: the
        index of the strongest hazard, and the argument that it concerns."""
        found: dict[int, tuple[int, str]] = {}
        for start, stop, reads, writes, name in uses:
            after_write = _READ_AFTER_WRITE if reads else _WRITE_AFTER_WRITE
            for segment in self._touched(start, stop):
                if segment.writer is not None:
                    known = found.get(segment.writer)
                    if known is None or after_write < known[0]:
                        found[segment.writer] = after_write, name
                if writes:
                    for reader in segment.readers:
                        found.setdefault(reader, (_WRITE_AFTER_READ, name))
        return found

    def record(self, index: int, uses: Sequence[Use]) -> None:
        """Record the accesses of operation ``index``; its reads precede its writes."""
        for start, stop, reads, _, _ in uses:
            if reads:
                for segment in self._tile(start, stop):
                    segment.readers.append(index)
        for start, stop, _, writes, _ in uses:
            if writes:
                if (known := self._exact(start, stop)) is not None:
                    known.writer, known.readers = index, []
                    continue
                first, last = self._cut(start), self._cut(stop)
                self._segments[first:last] = [_Segment(start, stop, index)]
                self._starts[first:last] = [start]

    def _touched(self, start: int, stop: int) -> Sequence[_Segment]:
        """The segments that have a byte of ``[start, stop)``."""
        first = bisect_right(self._starts, start)
        if first and self._segments[first - 1].stop > start:
            first -= 1
        return self._segments[first : bisect_left(self._starts, stop, first)]

    def _exact(self, start: int, stop: int) -> _Segment | None:
        """The segment ``[start, stop)``, if there is one."""
        index = bisect_left(self._starts, start)
        if index < len(self._starts):
            segment = self._segments[index]
            if segment.start == start and segment.stop == stop:
                return segment
        return None

    def _cut(self, at: int) -> int:
        """Make ``at`` a boundary; returns the index of the first segment at or above it."""
        index = bisect_left(self._starts, at)
        if index and at < self._segments[index - 1].stop:
            self._segments.insert(index, self._segments[index - 1].split(at))
            self._starts.insert(index, at)
        return index

    def _tile(self, start: int, stop: int) -> list[_Segment]:
        """The segments that cover exactly ``[start, stop)``, created if missing."""
        if (known := self._exact(start, stop)) is not None:
            return [known]
        first, last = self._cut(start), self._cut(stop)
        tiles: list[_Segment] = []
        at = start
        for segment in self._segments[first:last]:
            if at < segment.start:
                tiles.append(_Segment(at, segment.start))
            tiles.append(segment)
            at = segment.stop
        if at < stop:
            tiles.append(_Segment(at, stop))
        self._segments[first:last] = tiles
        self._starts[first:last] = [tile.start for tile in tiles]
        return tiles
