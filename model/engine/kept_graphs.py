"""Recorded graphs by the shape of their step, in a bounded room."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, Generic, TypeVar

from urdir.driver.context import close_all
from urdir.model.owner import Owner

if TYPE_CHECKING:
    from urdir.driver.execute import Recorded

Shape = TypeVar("Shape", bound=Hashable)

#: The most rows of texts or prompts whose launches begin before the ones before are complete:
#: longer ones fill the device by themselves. Prompts of 16, 128 and 512 rows take 1.867, 3.803 and
#: 11.859 ms so, and 2.054, 3.939 and 12.049 without (8B Q4_K_M, an H200).
EARLY_ROWS = 512


class KeptGraphs(Owner, Generic[Shape]):
    """Graphs that take about ``most_bytes`` of device memory at most: those that were not used for
    longest make room. ``nbytes`` are those of all graphs (`RecordedGraph.nbytes`)."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.nbytes = 0
        self._graphs: dict[Shape, Recorded] = {}  # the last one used comes last

    def __iter__(self) -> Iterator[Shape]:
        """The shapes, in the order of their last use."""
        return iter(self._graphs)

    def __contains__(self, shape: object) -> bool:
        return shape in self._graphs

    def values(self) -> tuple[Recorded, ...]:
        """The graphs, in the order of their last use."""
        return tuple(self._graphs.values())

    def use(self, shape: Shape) -> Recorded | None:
        """The graph of a shape, None without it."""
        if (graph := self._graphs.pop(shape, None)) is not None:
            self._graphs[shape] = graph
        return graph

    def keep(self, shape: Shape, graph: Recorded, others: int = 0) -> dict[Shape, Recorded]:
        """Keep a new graph, beside ``others`` bytes of the same room. Returns the graphs that are
        forgotten for it, which the caller closes; one that still runs is freed when it is complete.
        """
        self._graphs[shape] = graph
        self.nbytes += graph.nbytes
        forgotten = {}
        while self.nbytes + others > self.most_bytes and len(self._graphs) > 1:
            oldest = next(iter(self._graphs))
            forgotten[oldest] = self._graphs.pop(oldest)
            self.nbytes -= forgotten[oldest].nbytes
        return forgotten

    def forget(self, shape: Shape) -> None:
        """Free the graph of a shape, if there is one: once it is complete, if it still runs."""
        if (graph := self._graphs.pop(shape, None)) is not None:
            self.nbytes -= graph.nbytes
            graph.close()

    def close(self) -> None:
        """Free the graphs. Idempotent."""
        graphs = self.values()
        self._graphs.clear()
        self.nbytes = 0
        close_all(graphs)
