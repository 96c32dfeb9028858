"""Graphs as data: nodes with their work, edges with their kind, permitted orders."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import cuda.bindings.driver as cuda

from urdir.driver.emulator.calls import Refused, handle
from urdir.driver.emulator.copies import Copy, Fill
from urdir.driver.emulator.launch_model import Launch
from urdir.driver.emulator.scheduler import Task

#: The work of a node; None is an empty node.
Work = Launch | Copy | Fill | None

PROGRAMMATIC = int(cuda.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC)
_PROGRAMMATIC_PORTS = (1, 2)


@dataclass(frozen=True, slots=True)
class EdgeKind:
    """The data of an edge, as in CUgraphEdgeData."""

    from_port: int = 0
    to_port: int = 0
    type: int = 0

    @property
    def is_programmatic(self) -> bool:
        """Whether the dependent may start before its predecessor is complete."""
        return self.type == PROGRAMMATIC

    def check(self, before: Node, after: Node, has_programmatic: bool) -> None:
        """Refuse an edge that these nodes, or the device, do not support."""
        if self.is_programmatic:
            kernels = all(isinstance(n.work, Launch) for n in (before, after))
            if not kernels or self.from_port not in _PROGRAMMATIC_PORTS:
                raise Refused(
                    "CUDA_ERROR_INVALID_VALUE",
                    "a programmatic edge goes from port 1 or 2 of a kernel node to a kernel node",
                )
            if not has_programmatic:
                raise Refused("CUDA_ERROR_NOT_SUPPORTED", "programmatic edges need sm_90")
        elif self.type or self.from_port or self.to_port:
            raise Refused("CUDA_ERROR_INVALID_VALUE", f"edge data {self}")


PLAIN = EdgeKind()


@dataclass(eq=False)
class Node:
    """A node; ``handle`` is its number, ``graph`` the graph it belongs to."""

    graph: Graph
    work: Work
    handle: int = 0
    before: dict[Node, EdgeKind] = field(default_factory=dict)
    #: Arguments returned by cuGraphKernelNodeGetParams, kept alive.
    storage: Any = None

    @property
    def label(self) -> str:
        """A short description."""
        match self.work:
            case Launch():
                return self.work.name
            case Copy():
                return "MEMCPY"
            case Fill():
                return "MEMSET"
        return "EMPTY"

    @property
    def type(self) -> cuda.CUgraphNodeType:
        """Its type as the API names it."""
        kind = "KERNEL" if isinstance(self.work, Launch) else self.label
        return getattr(cuda.CUgraphNodeType, f"CU_GRAPH_NODE_TYPE_{kind}")


@dataclass(eq=False)
class Graph:
    """Nodes in the order they were added."""

    nodes: list[Node] = field(default_factory=list)

    def edges(self) -> list[tuple[Node, Node, EdgeKind]]:
        """(from, to, kind), by the dependent's position."""
        return [(b, n, kind) for n in self.nodes for b, kind in n.before.items()]


class Topology:
    """The shape of a graph, by position of its nodes; raises INVALID_VALUE for a cycle."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        position = {node: i for i, node in enumerate(nodes)}
        self.before = [{position[b]: k for b, k in n.before.items()} for n in nodes]
        self.after: list[list[int]] = [[] for _ in nodes]
        for i, before in enumerate(self.before):
            for b in before:
                self.after[b].append(i)
        self.programmatic_after = [
            [a for a in after if self.before[a][i].is_programmatic]
            for i, after in enumerate(self.after)
        ]
        self.full_before = [
            [b for b, kind in before.items() if not kind.is_programmatic] for before in self.before
        ]
        self.ancestors = self._ancestors()
        self.unordered = self._unordered()
        self.programmatic_before = [
            [b for b, kind in before.items() if kind.is_programmatic] for before in self.before
        ]
        has_programmatic = any(self.programmatic_after)
        #: Nodes that can take part in a race.
        self.is_raced = [has_programmatic or bool(others) for others in self.unordered]

    def _ancestors(self) -> list[int]:
        """Per node, the set of all that come before it, as a bit mask."""
        ancestors = [0] * len(self.before)
        left = [len(before) for before in self.before]
        ready = [i for i, n in enumerate(left) if not n]
        for i in ready:
            for a in self.after[i]:
                ancestors[a] |= ancestors[i] | 1 << i
                left[a] -= 1
                if not left[a]:
                    ready.append(a)
        if len(ready) < len(left):
            raise Refused("CUDA_ERROR_INVALID_VALUE", "the graph has a cycle")
        return ancestors

    def _unordered(self) -> list[list[int]]:
        """Per node, all nodes unordered with it."""
        sets = self.ancestors
        nodes = range(len(sets))
        return [
            [j for j in nodes if i != j and not (sets[j] >> i | sets[i] >> j) & 1] for i in nodes
        ]

    def same_shape(self, other: Topology) -> bool:
        """Whether edges and their kinds are equal."""
        return self.before == other.before


class Executable:
    """An instantiated graph: the work of each node, at instantiation or as set later."""

    def __init__(self, graph: Graph) -> None:
        self.position = {node.handle: i for i, node in enumerate(graph.nodes)}
        self.works: list[Work] = [node.work for node in graph.nodes]
        self.topology = Topology(graph.nodes)
        self.launches = 0
        self.last: Task | None = None

    def set_work(self, node: Any, work: Work) -> None:
        """Replace the work of one node by other work of its kind."""
        at = self.position.get(handle(node))
        if at is None or type(self.works[at]) is not type(work):
            message = "not a node of this kind in the executable graph"
            raise Refused("CUDA_ERROR_INVALID_VALUE", message)
        # Launches already queued keep the list they were given.
        self.works = [*self.works[:at], work, *self.works[at + 1 :]]
        self.launches = 0

    def count_launch(self) -> bool:
        """Count a launch; whether it is checked for races, as launches 1, 2, 4, 8, ... are."""
        self.launches += 1
        return self.launches & (self.launches - 1) == 0


def add_edges(
    pairs: Iterable[tuple[Node, Node, EdgeKind]], graph: Graph, has_programmatic: bool
) -> None:
    """Add edges; INVALID_VALUE for one that exists, joins a node to itself or another graph."""
    checked = list(pairs)
    for before, after, kind in checked:
        if before is after or before in after.before:
            raise Refused("CUDA_ERROR_INVALID_VALUE", "an edge twice, or from a node to itself")
        if before.graph is not graph or after.graph is not graph:
            raise Refused("CUDA_ERROR_INVALID_VALUE", "a node of another graph")
        kind.check(before, after, has_programmatic)
    for before, after, kind in checked:
        after.before[before] = kind


def to_dot(graph: Graph) -> str:
    """The graph in Graphviz's language."""
    lines = ["digraph dot {", "  node [shape=box];"]
    number = {node: i for i, node in enumerate(graph.nodes)}
    lines += [f'  node_{i} [label="{i}\\n{node.label}"];' for node, i in number.items()]
    for before, after, kind in graph.edges():
        style = " [style=dashed]" if kind.is_programmatic else ""
        lines.append(f"  node_{number[before]} -> node_{number[after]}{style};")
    return "\n".join([*lines, "}", ""])
