"""Explicit CUDA graphs: nodes added one by one with the edges they need, then instantiated.

Nothing is captured from a stream, so other work in a stream cannot be missed and cannot break the
recording. `Graph` is under construction, `RecordedGraph` can be launched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from urdir.driver.context import OpenDevice, Owned
from urdir.driver.dependencies import Edge, find_edges, missing_edges
from urdir.driver.errors import CudaError, DriverTooOldError, LaunchError, LifetimeError, check
from urdir.driver.launch import Argument
from urdir.driver.node import (
    GraphEdge,
    Node,
    add_copy_node,
    add_fill_node,
    add_kernel_node,
    connect,
    kernel_params,
    may_be_programmatic,
)
from urdir.driver.operation import Copy, Launch, Operation, allocation_of
from urdir.driver.parallel import Job, Work, completed
from urdir.driver.ranges import named

if TYPE_CHECKING:
    from urdir.driver.module import LoadedKernel
    from urdir.driver.stream import Stream

#: Device memory that the driver takes for a node of a recorded graph: 100 graphs with 30,000
#: kernels took 90 MB on an H200 (CUDA 13.0), in pieces of 2 MB.
NODE_NBYTES = 3 << 10


class Graph(Owned):
    """A graph under construction. Nodes are numbered from 0 and follow nodes already added.

    The driver gets plain edges with the node that waits, and all programmatic ones in one call when
    the graph is instantiated. If it fails to add a node or edges, the graph is closed.
    """

    kind = "graph"

    def __init__(self, device: OpenDevice, name: str) -> None:
        device.context.make_current()
        api = device.api
        super().__init__(device, name, check(api, api.cuGraphCreate(0), f"cuGraphCreate {name!r}"))
        self.nodes: list[Node] = []
        self.edges: list[GraphEdge] = []
        self._unconnected: list[GraphEdge] = []  # programmatic edges that the driver lacks

    def add(
        self,
        operation: Operation,
        loaded: LoadedKernel | None = None,
        after: Iterable[int] = (),
        programmatic: Iterable[int] = (),
    ) -> int:
        """Add a launch of ``loaded``, a copy or a fill, that waits for the nodes ``after``, and
        programmatically for others.

        Returns the node's number. Raises LaunchError for a programmatic edge unless it joins two
        non-cooperative kernels on sm_90 or newer and the second waits for its dependencies: other
        such edges would be races.
        """
        return self._add(self._enter(), operation, loaded, after, programmatic)

    def add_all(
        self,
        given: Iterable[tuple[Operation, LoadedKernel | None, Iterable[int], Iterable[int]]],
    ) -> None:
        """`add` several nodes; this thread's context is set once."""
        api = self._enter()
        for operation, loaded, after, programmatic in given:
            self._add(api, operation, loaded, after, programmatic)

    def instantiate(self, needed: Iterable[Edge] | None = None) -> RecordedGraph:
        """Instantiate the graph. Raises LaunchError if two conflicting nodes are unordered.

        ``needed`` are the edges that the operations need (`find_edges`), if known.
        """
        return completed(self.instantiating(needed))

    def instantiating(self, needed: Iterable[Edge] | None = None) -> Work[RecordedGraph]:
        """`instantiate` in pieces; all but the last are jobs for any thread."""
        job = Job(partial(self._instantiated, needed))
        try:
            yield job
        except BaseException:
            job.abandon(self._destroy_instance)
            raise
        return RecordedGraph(self, *job.result())

    def _instantiated(self, needed: Iterable[Edge] | None) -> tuple[Any, tuple[Owned, ...]]:
        """The driver's handle of the instance, and the objects that it holds."""
        operations = [node.operation for node in self.nodes]
        _check_ordered(self.name, operations, self.edges, needed)
        holds = _needed(self.nodes)
        api, what = self._enter(), f"cuGraphInstantiate {self.name!r}, {len(self.nodes)} nodes"
        self._connect(api)
        made = check(api, api.cuGraphInstantiate(self.handle, 0), what), holds
        try:
            self._upload(made[0])
        except CudaError:
            self._destroy_instance(made)
            raise
        return made

    def _upload(self, handle: Any) -> None:
        """Send the instance to the device: its first launch would wait for that."""
        api, what = self.device.api, f"cuGraphUpload {self.name!r}"
        flags = int(api.CUstream_flags.CU_STREAM_NON_BLOCKING)  # beside steps that run
        stream = check(api, api.cuStreamCreate(flags), f"cuStreamCreate for {what}")
        try:
            check(api, api.cuGraphUpload(handle, stream), what)
            check(api, api.cuStreamSynchronize(stream), f"cuStreamSynchronize after {what}")
        finally:
            ended = api.cuStreamDestroy(stream)
        check(api, ended, f"cuStreamDestroy after {what}")

    def _destroy_instance(self, made: tuple[Any, tuple[Owned, ...]]) -> None:
        handle, _ = made
        destroy, what = self.device.api.cuGraphExecDestroy, f"closing {self.name!r}"
        self.device.context.destroy(destroy, handle, what, quiet=True)

    @property
    def node_count(self) -> int:
        """Number of nodes according to the driver."""
        api = self._enter()
        result = api.cuGraphGetNodes(self.handle, 0)
        return int(check(api, result, f"cuGraphGetNodes of {self.name!r}")[1])

    def dot(self) -> str:
        """The graph in DOT (Graphviz): labels and kernels; programmatic edges are dashed."""
        lines = [f"digraph {_quote(self.name)} {{", "  node [shape=box];"]
        for index, node in enumerate(self.nodes):
            text = f"{index}: {node.operation.label}\n{node.operation.what}"
            lines.append(f"  n{index} [label={_quote(text)}];")
        for edge in self.edges:
            style = " [style=dashed]" if edge.programmatic else ""
            lines.append(f"  n{edge.before} -> n{edge.after}{style};")
        return "\n".join([*lines, "}", ""])

    def _enter(self) -> Any:
        """Check that it is open and make its context current."""
        _ = self.handle
        self.device.context.make_current()
        return self.device.api

    def _add(
        self,
        api: Any,
        operation: Operation,
        loaded: LoadedKernel | None,
        after: Iterable[int],
        programmatic: Iterable[int],
    ) -> int:
        """Add a node in the current context. If the driver fails the graph is closed: the node may
        lack an attribute, or edges. Raises LaunchError for an edge that the graph cannot have."""
        index = len(self.nodes)
        plain = [GraphEdge(before, index) for before in after]
        early = [GraphEdge(before, index, programmatic=True) for before in programmatic]
        edges = sorted((*plain, *early), key=lambda edge: edge.before)
        for edge in edges:
            before = self._node(edge.before)
            if edge.programmatic:
                self._check_programmatic(before, operation)
        handles = [self.nodes[edge.before].handle for edge in plain]
        try:
            handle = self._made(api, operation, loaded, handles)
        except CudaError:
            self.finish(quiet=True)
            raise
        self.nodes.append(Node(handle, operation, loaded))
        self._unconnected += early
        self.edges += edges
        return index

    def _made(
        self, api: Any, operation: Operation, loaded: LoadedKernel | None, before: Sequence[Any]
    ) -> Any:
        """The driver's node."""
        if isinstance(operation, Launch):
            assert loaded is not None
            return add_kernel_node(api, self.handle, loaded, operation, before)
        if isinstance(operation, Copy):
            return add_copy_node(api, self.handle, operation, before)
        return add_fill_node(api, self.handle, operation, before)

    def _connect(self, api: Any) -> None:
        try:
            connect(api, self.handle, self.nodes, self._unconnected)
        except CudaError:
            self.finish(quiet=True)
            raise
        self._unconnected = []

    def _node(self, index: int) -> Node:
        if not 0 <= index < len(self.nodes):
            raise LaunchError(
                f"graph {self.name}: an edge can only come from one of the {len(self.nodes)} nodes "
                f"added before, not from node {index}"
            )
        return self.nodes[index]

    def _check_programmatic(self, before: Node, after: Operation) -> None:
        if not may_be_programmatic(self.device, before.operation, after):
            raise LaunchError(
                f"graph {self.name}: no programmatic edge can lead from "
                f"{before.operation.label!r} to {after.label!r} on {self.device.target}: it takes "
                "two kernels that are not cooperative, the second with griddepcontrol.wait "
                "(waits_for_dependencies), and sm_90 or newer"
            )

    def _destroy(self, handle: Any) -> Any:
        return self.device.api.cuGraphDestroy(handle)


class RecordedGraph(Owned):
    """An instantiated graph: launched repeatedly with the same arguments.

    It owns the packed arguments and holds its buffers and kernels: closing one of these raises
    LifetimeError until the graph is closed. Created by `Graph.instantiate`.
    """

    kind = "recorded graph"

    def __init__(self, graph: Graph, handle: Any, holds: tuple[Owned, ...]) -> None:
        super().__init__(graph.device, graph.name, handle)
        self._graph = graph
        try:
            self._hold(holds)
        except LifetimeError:
            self.finish(quiet=True)
            raise

    @property
    def node_count(self) -> int:
        """Number of nodes according to the driver."""
        return self._graph.node_count

    @property
    def nbytes(self) -> int:
        """Approximate device memory of the graph in bytes."""
        return NODE_NBYTES * len(self._graph.nodes)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes, in the order they were added."""
        return tuple(self._graph.nodes)

    @property
    def edges(self) -> tuple[GraphEdge, ...]:
        """The edges, ordered by the waiting node."""
        return tuple(self._graph.edges)

    def dot(self) -> str:
        """The graph in DOT (Graphviz)."""
        return self._graph.dot()

    def tools_ids(self) -> tuple[int, ...] | None:
        """The ids by which tools (CUPTI, Nsight Systems) name the nodes: ``originalGraphNodeId`` of
        their tables. None where the driver does not tell (cuGraphNodeGetToolsId), or not of these
        nodes."""
        _ = self.handle
        self.device.context.make_current()
        api = self.device.api
        what = f"cuGraphNodeGetToolsId of {self.name!r}"
        try:
            found = [check(api, api.cuGraphNodeGetToolsId(of.handle), what) for of in self.nodes]
        except (AttributeError, DriverTooOldError):  # older bindings, an older driver
            return None
        except CudaError as error:
            if error.name == "CUDA_ERROR_NOT_SUPPORTED":
                return None
            raise
        return tuple(map(int, found))

    def table(self) -> list[dict[str, Any]]:
        """Every node with its label, its operation (of a launch, the kernel's entry) and the tools'
        id, to join a tool's rows with; the id is None without `tools_ids`."""
        ids = self.tools_ids() or (None,) * len(self.nodes)
        return [
            {"tools_id": tools_id, "label": node.operation.label, "operation": node.operation.what}
            for tools_id, node in zip(ids, self.nodes, strict=True)
        ]

    def launch(self, stream: Stream) -> None:
        """Queue one run of the whole graph on ``stream``, in an NVTX range of its name. Raises
        CudaError, LifetimeError."""
        handle, queue = self.handle, stream.handle
        self.device.context.make_current()
        api = self.device.api
        with named(self.name):
            check(api, api.cuGraphLaunch(handle, queue), f"cuGraphLaunch {self.name!r}")

    def update(self, index: int, /, **args: Argument) -> None:
        """Replace some arguments of a launch, from the next launch of the graph on.

        Raises LaunchError for arguments that a plan would refuse, for a node that is not a kernel,
        and if the new memory would need an edge that the graph lacks.
        """
        old = self._graph.nodes[index]
        if not isinstance(old.operation, Launch) or old.loaded is None:
            raise LaunchError(
                f"graph {self.name}: node {index} {old.operation.label!r} is a "
                f"{old.operation.what}, only launches have arguments"
            )
        merged: Mapping[str, Argument] = {**old.operation.args, **args}
        launch = Launch(old.operation.kernel, old.operation.label, merged)
        nodes = list(self._graph.nodes)
        nodes[index] = replace(old, operation=launch)
        _check_ordered(self.name, [node.operation for node in nodes], self._graph.edges)
        handle = self.handle
        self.device.context.make_current()
        api = self.device.api
        params = kernel_params(api, old.loaded, launch)
        result = api.cuGraphExecKernelNodeSetParams(handle, old.handle, params)
        check(api, result, f"cuGraphExecKernelNodeSetParams {launch.label!r}")
        self._graph.nodes[index] = nodes[index]
        self._hold(_needed(nodes))

    def finish(self, quiet: bool) -> None:
        """Destroy it and release its buffers and kernels."""
        try:
            super().finish(quiet)
        finally:
            self._hold(())

    def _hold(self, needed: tuple[Owned, ...]) -> None:
        for owned in needed:
            _ = owned.handle  # LifetimeError, before any is held
        former, self._held = getattr(self, "_held", ()), needed
        for owned in needed:
            owned.hold()
        for owned in former:
            owned.release()

    def _destroy(self, handle: Any) -> Any:
        return self.device.api.cuGraphExecDestroy(handle)


def _needed(nodes: Iterable[Node]) -> tuple[Owned, ...]:
    """The allocations and kernels of all nodes, each once."""
    needed: dict[int, Owned] = {}
    distinct = {id(node.operation): node for node in nodes}.values()  # of steps that are repeated
    for node in distinct:
        needed |= {id(a): a for a in map(allocation_of, node.operation.memory())}
        if node.loaded is not None:
            needed[id(node.loaded)] = node.loaded
    return tuple(needed.values())


def _check_ordered(
    name: str,
    operations: list[Operation],
    edges: Iterable[GraphEdge],
    needed: Iterable[Edge] | None = None,
) -> None:
    if needed is None:
        needed = find_edges(operation.uses() for operation in operations)
    for edge in missing_edges(needed, [(e.before, e.after) for e in edges], len(operations)):
        first, second = operations[edge.before], operations[edge.after]
        raise LaunchError(
            f"graph {name}: no path leads from node {edge.before} {first.label!r} to node "
            f"{edge.after} {second.label!r}, which must come after it ({edge.hazard.value}, "
            f"argument {edge.name!r})"
        )


def _quote(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
