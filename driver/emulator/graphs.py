"""Building graphs, making them executable, launching them."""

# ruff: noqa: N802, N803  (names as in the driver API)

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import cuda.bindings.driver as cuda

from urdir.driver.emulator.calls import (
    Refused,
    c_string,
    driver_call,
    expect,
    expect_enum,
    handle,
    size_t,
)
from urdir.driver.emulator.copies import Box, Fill, copy_3d
from urdir.driver.emulator.graph_model import (
    PLAIN,
    EdgeKind,
    Graph,
    Node,
    Topology,
    Work,
    add_edges,
    to_dot,
)
from urdir.driver.emulator.graph_run import GraphTask
from urdir.driver.emulator.launches import Launch, make_launch
from urdir.driver.emulator.scheduler import Task
from urdir.driver.emulator.state import Driver
from urdir.driver.emulator.streams import enqueue, stream_of

_INVALID = "CUDA_ERROR_INVALID_VALUE"
_TYPE = cuda.CUgraphNodeType


class Executable:
    """An instantiated graph: the work of each node, as it was then or has been set since."""

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
            raise Refused(_INVALID, "not a node of this kind in the executable graph")
        # Launches already queued keep the list they were given.
        self.works = [*self.works[:at], work, *self.works[at + 1 :]]
        self.launches = 0

    def next_task(self, driver: Driver) -> GraphTask:
        """The task of its next launch; races are looked for in launches 1, 2, 4, 8, ..."""
        self.launches += 1
        is_traced = self.launches & (self.launches - 1) == 0
        return GraphTask(driver, self.works, self.topology, is_traced)


# ---- building ----


@driver_call(results=1)
def cuGraphCreate(driver: Driver, flags: Any) -> Any:
    """An empty graph."""
    if int(flags):
        raise Refused(_INVALID, "cuGraphCreate takes no flags")
    return cuda.CUgraph(driver.context.graphs.add(Graph()))


@driver_call()
def cuGraphDestroy(driver: Driver, hGraph: Any) -> None:
    """Destroy a graph and its nodes; executable graphs made of it live on."""
    for node in driver.context.graphs.pop(hGraph).nodes:
        driver.context.nodes.pop(node.handle)


@driver_call(results=1)
def cuGraphAddKernelNode(
    driver: Driver, hGraph: Any, dependencies: Any, numDependencies: Any, nodeParams: Any
) -> Any:
    """Add a kernel; its arguments are copied now."""
    before = _dependencies(driver, dependencies, numDependencies)
    return _add(driver, hGraph, before, _kernel(driver, nodeParams))


@driver_call(results=1)
def cuGraphAddMemcpyNode(
    driver: Driver, hGraph: Any, dependencies: Any, numDependencies: Any, copyParams: Any, ctx: Any
) -> Any:
    """Add a copy."""
    before = _dependencies(driver, dependencies, numDependencies)
    _check_context(driver, ctx)
    return _add(driver, hGraph, before, _memcpy(driver, copyParams))


@driver_call(results=1)
def cuGraphAddMemsetNode(
    driver: Driver,
    hGraph: Any,
    dependencies: Any,
    numDependencies: Any,
    memsetParams: Any,
    ctx: Any,
) -> Any:
    """Add a fill."""
    before = _dependencies(driver, dependencies, numDependencies)
    _check_context(driver, ctx)
    return _add(driver, hGraph, before, _memset(driver, memsetParams))


@driver_call(results=1)
def cuGraphAddEmptyNode(
    driver: Driver, hGraph: Any, dependencies: Any, numDependencies: Any
) -> Any:
    """Add a node that does nothing."""
    return _add(driver, hGraph, _dependencies(driver, dependencies, numDependencies), None)


@driver_call(results=1)
def cuGraphAddNode(
    driver: Driver,
    hGraph: Any,
    dependencies: Any,
    dependencyData: Any,
    numDependencies: Any,
    nodeParams: Any,
) -> Any:
    """Add a kernel, copy, fill or empty node, with data for each edge that leads to it."""
    before = _dependencies(driver, dependencies, numDependencies, dependencyData)
    return _add(driver, hGraph, before, _any_work(driver, nodeParams))


@driver_call()
def cuGraphAddDependencies(
    driver: Driver, hGraph: Any, from_: Any, to: Any, edgeData: Any, numDependencies: Any
) -> None:
    """Add edges between nodes."""
    graph: Graph = driver.context.graphs[hGraph]
    count = size_t(numDependencies)
    before = expect("from_", from_, cuda.CUgraphNode, count)
    after = expect("to", to, cuda.CUgraphNode, count)
    kinds = _kinds(edgeData, count)
    if len(before) != count or len(after) != count:
        raise Refused(_INVALID, f"{count} edges, {len(before)} and {len(after)} nodes")
    nodes = driver.context.nodes
    pairs = [(nodes[b], nodes[a], k) for b, a, k in zip(before, after, kinds, strict=True)]
    add_edges(pairs, graph, driver.properties.has_clusters)


# ---- asking ----


@driver_call(results=2)
def cuGraphGetNodes(driver: Driver, hGraph: Any, numNodes: Any = 0) -> tuple[list[Any], int]:
    """Nodes in the order added; without ``numNodes`` only their number."""
    graph: Graph = driver.context.graphs[hGraph]
    return _some(graph.nodes, numNodes)


@driver_call(results=2)
def cuGraphGetRootNodes(
    driver: Driver, hGraph: Any, numRootNodes: Any = 0
) -> tuple[list[Any], int]:
    """Nodes without predecessors; without ``numRootNodes`` only their number."""
    graph: Graph = driver.context.graphs[hGraph]
    return _some([n for n in graph.nodes if not n.before], numRootNodes)


@driver_call(results=4)
def cuGraphGetEdges(
    driver: Driver, hGraph: Any, numEdges: Any = 0
) -> tuple[list[Any], list[Any], list[Any], int]:
    """Edges as three lists (from, to, data); without ``numEdges`` only their number."""
    graph: Graph = driver.context.graphs[hGraph]
    edges = graph.edges()
    shown = edges[: size_t(numEdges)]
    return (
        [cuda.CUgraphNode(b.handle) for b, _, _ in shown],
        [cuda.CUgraphNode(a.handle) for _, a, _ in shown],
        [_edge_data(kind) for _, _, kind in shown],
        len(shown) if size_t(numEdges) else len(edges),
    )


@driver_call(results=3)
def cuGraphNodeGetDependencies(
    driver: Driver, hNode: Any, numDependencies: Any = 0
) -> tuple[list[Any], list[Any], int]:
    """Predecessors of a node and the data of the edges from them."""
    node: Node = driver.context.nodes[hNode]
    nodes, count = _some(list(node.before), numDependencies)
    return nodes, [_edge_data(k) for k in node.before.values()][: len(nodes)], count


@driver_call(results=1)
def cuGraphNodeGetType(driver: Driver, hNode: Any) -> Any:
    """The type of a node."""
    node: Node = driver.context.nodes[hNode]
    return node.type


@driver_call(results=1)
def cuGraphKernelNodeGetParams(driver: Driver, hNode: Any) -> Any:
    """The parameters of a kernel node; ``kernelParams`` points to storage of the node."""
    launch = _kernel_of(driver, hNode)
    node: Node = driver.context.nodes[hNode]
    storage = ctypes.create_string_buffer(launch.params, max(1, len(launch.params)))
    base = ctypes.addressof(storage)
    pointers = (ctypes.c_void_p * len(launch.function.slots))(
        *(base + slot.offset for slot in launch.function.slots)
    )
    node.storage = (storage, pointers)
    result = cuda.CUDA_KERNEL_NODE_PARAMS()
    result.func = cuda.CUfunction(launch.handle)
    result.gridDimX, result.gridDimY, result.gridDimZ = launch.grid
    result.blockDimX, result.blockDimY, result.blockDimZ = launch.block
    result.sharedMemBytes = launch.shared_bytes
    result.kernelParams = ctypes.addressof(pointers) if launch.function.slots else 0
    result.ctx = cuda.CUcontext(driver.CONTEXT_HANDLE)
    return result


@driver_call()
def cuGraphDebugDotPrint(driver: Driver, hGraph: Any, path: Any, flags: Any) -> None:
    """Write the graph as a Graphviz file."""
    graph: Graph = driver.context.graphs[hGraph]
    int(flags)
    try:
        with open(c_string(path).decode(), "w", encoding="utf-8") as file:
            file.write(to_dot(graph))
    except OSError as exc:
        raise Refused("CUDA_ERROR_OPERATING_SYSTEM", str(exc)) from None


# ---- changing nodes ----


@driver_call()
def cuGraphKernelNodeSetParams(driver: Driver, hNode: Any, nodeParams: Any) -> None:
    """Replace the parameters of a kernel node; its attributes stay."""
    old = _kernel_of(driver, hNode)
    driver.context.nodes[hNode].work = _kernel(driver, nodeParams, old)


@driver_call()
def cuGraphKernelNodeSetAttribute(driver: Driver, hNode: Any, attr: Any, value: Any) -> None:
    """Set a kernel node's cluster, or make it cooperative; other attributes are accepted."""
    launch = _kernel_of(driver, hNode)
    name = expect_enum("attr", attr, cuda.CUlaunchAttributeID).name
    if name == "CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION":
        dim = value.clusterDim
        launch = launch.replaced(cluster=(dim.x, dim.y, dim.z))
    elif name == "CU_LAUNCH_ATTRIBUTE_COOPERATIVE":
        launch = launch.replaced(is_cooperative=bool(value.cooperative))
    launch.check(driver)
    driver.context.nodes[hNode].work = launch


@driver_call(results=1)
def cuGraphKernelNodeGetAttribute(driver: Driver, hNode: Any, attr: Any) -> Any:
    """A kernel node's cluster, or whether it is cooperative; other attributes are 0."""
    launch = _kernel_of(driver, hNode)
    name = expect_enum("attr", attr, cuda.CUlaunchAttributeID).name
    result = cuda.CUkernelNodeAttrValue()
    if name == "CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION":
        result.clusterDim.x, result.clusterDim.y, result.clusterDim.z = launch.cluster
    elif name == "CU_LAUNCH_ATTRIBUTE_COOPERATIVE":
        result.cooperative = int(launch.is_cooperative)
    return result


# ---- executing ----


@driver_call(results=1)
def cuGraphInstantiate(driver: Driver, hGraph: Any, flags: Any) -> Any:
    """Make a graph executable; later changes of the graph do not reach it."""
    int(flags)
    return _instantiate(driver, hGraph)


@driver_call(results=1)
def cuGraphInstantiateWithParams(driver: Driver, hGraph: Any, instantiateParams: Any) -> Any:
    """Make a graph executable; the result goes into the parameters as well."""
    executable = _instantiate(driver, hGraph)
    if instantiateParams is not None:
        success = cuda.CUgraphInstantiateResult.CUDA_GRAPH_INSTANTIATE_SUCCESS
        instantiateParams.result_out = success
    return executable


@driver_call()
def cuGraphUpload(driver: Driver, hGraphExec: Any, hStream: Any) -> None:
    """Nothing has to be uploaded."""
    _ = driver.context.executables[hGraphExec]
    stream_of(driver, hStream)


@driver_call()
def cuGraphLaunch(driver: Driver, hGraphExec: Any, hStream: Any) -> None:
    """Queue a graph; it never overlaps with an earlier launch of itself."""
    executable: Executable = driver.context.executables[hGraphExec]
    stream = stream_of(driver, hStream)
    after = (executable.last,) if executable.last is not None else ()
    executable.last = enqueue(driver, stream, executable.next_task(driver), after)


@driver_call()
def cuGraphExecDestroy(driver: Driver, hGraphExec: Any) -> None:
    """Destroy an executable graph; launches already queued still run."""
    driver.context.executables.pop(hGraphExec)


@driver_call()
def cuGraphExecKernelNodeSetParams(
    driver: Driver, hGraphExec: Any, hNode: Any, nodeParams: Any
) -> None:
    """Replace a kernel's parameters in an executable graph; the graph itself stays as it is."""
    executable: Executable = driver.context.executables[hGraphExec]
    old = _kernel_of(driver, hNode)
    executable.set_work(hNode, _kernel(driver, nodeParams, old))


@driver_call()
def cuGraphExecMemcpyNodeSetParams(
    driver: Driver, hGraphExec: Any, hNode: Any, copyParams: Any, ctx: Any
) -> None:
    """Replace a copy in an executable graph."""
    _check_context(driver, ctx)
    executable: Executable = driver.context.executables[hGraphExec]
    executable.set_work(hNode, _memcpy(driver, copyParams))


@driver_call()
def cuGraphExecMemsetNodeSetParams(
    driver: Driver, hGraphExec: Any, hNode: Any, memsetParams: Any, ctx: Any
) -> None:
    """Replace a fill in an executable graph."""
    _check_context(driver, ctx)
    executable: Executable = driver.context.executables[hGraphExec]
    executable.set_work(hNode, _memset(driver, memsetParams))


@driver_call(results=1)
def cuGraphExecUpdate(driver: Driver, hGraphExec: Any, hGraph: Any) -> Any:
    """Take all parameters from a graph of the same shape."""
    executable: Executable = driver.context.executables[hGraphExec]
    graph: Graph = driver.context.graphs[hGraph]
    kinds = [type(work) for work in executable.works]
    same = [type(n.work) for n in graph.nodes] == kinds
    if not same or not executable.topology.same_shape(Topology(graph.nodes)):
        message = "the graphs differ in shape"
        raise Refused("CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE", message)
    executable.works = [n.work for n in graph.nodes]
    executable.position = {n.handle: i for i, n in enumerate(graph.nodes)}
    executable.launches = 0
    result = cuda.CUgraphExecUpdateResultInfo()
    result.result = cuda.CUgraphExecUpdateResult.CU_GRAPH_EXEC_UPDATE_SUCCESS
    return result


# ---- how ----


def _instantiate(driver: Driver, hGraph: Any) -> Any:
    graph: Graph = driver.context.graphs[hGraph]
    if code := driver.injections.strike("instantiate"):
        raise Refused(code, "injected fault")
    return cuda.CUgraphExec(driver.context.executables.add(Executable(graph)))


def _add(driver: Driver, hGraph: Any, before: dict[Node, EdgeKind], work: Work) -> Any:
    graph: Graph = driver.context.graphs[hGraph]
    node = Node(graph, work)
    pairs = ((b, node, kind) for b, kind in before.items())
    add_edges(pairs, graph, driver.properties.has_clusters)
    graph.nodes.append(node)
    node.handle = driver.context.nodes.add(node)
    return cuda.CUgraphNode(node.handle)


def _dependencies(
    driver: Driver, dependencies: Any, count: Any, data: Any = None
) -> dict[Node, EdgeKind]:
    number = size_t(count)
    handles = expect("dependencies", dependencies, cuda.CUgraphNode, number)
    kinds = _kinds(data, number)
    nodes = [driver.context.nodes[h] for h in handles]
    if len(nodes) != number or len(set(nodes)) != number:
        raise Refused(_INVALID, f"{number} dependencies: null, or one of them twice")
    return dict(zip(nodes, kinds, strict=True))


def _kinds(data: Any, count: int) -> list[EdgeKind]:
    if not data:
        return [PLAIN] * count
    found = expect("edgeData", data, cuda.CUgraphEdgeData, count)
    return [EdgeKind(d.from_port, d.to_port, d.type) for d in found]


def _edge_data(kind: EdgeKind) -> Any:
    data = cuda.CUgraphEdgeData()
    data.from_port, data.to_port, data.type = kind.from_port, kind.to_port, kind.type
    return data


def _some(nodes: Iterable[Node], count: Any) -> tuple[list[Any], int]:
    found = list(nodes)
    shown = [cuda.CUgraphNode(n.handle) for n in found[: size_t(count)]]
    return shown, len(shown) if size_t(count) else len(found)


def _kernel_of(driver: Driver, hNode: Any) -> Launch:
    node: Node = driver.context.nodes[hNode]
    if not isinstance(node.work, Launch):
        raise Refused(_INVALID, f"not a kernel node but {node.label}")
    return node.work


def _kernel(driver: Driver, p: Any, old: Launch | None = None) -> Launch:
    if p is None:
        raise Refused(_INVALID, "null node parameters")
    grid = p.gridDimX, p.gridDimY, p.gridDimZ
    block = p.blockDimX, p.blockDimY, p.blockDimZ
    cluster, cooperative = (old.cluster, old.is_cooperative) if old else (None, False)
    shared, address = p.sharedMemBytes, p.kernelParams
    return make_launch(driver, p.func, grid, block, shared, address, p.extra, cluster, cooperative)


def _memcpy(driver: Driver, p: Any) -> Work:
    memory = driver.context.memory
    copy = copy_3d(memory, p) if p is not None else None
    if copy is None:
        raise Refused(_INVALID, "an empty copy")
    copy.check(memory)
    return copy


def _memset(driver: Driver, p: Any) -> Work:
    if p is None or p.elementSize not in (1, 2, 4) or not p.width or not p.height:
        raise Refused(_INVALID, "an empty fill, or elements that are not of 1, 2 or 4 bytes")
    width = p.width * p.elementSize
    pitch = p.pitch if p.height > 1 else width
    box = Box(int(p.dst), width, True, p.height, 1, pitch, 0)
    fill = Fill(box, p.value & ((1 << 8 * p.elementSize) - 1), p.elementSize)
    fill.check(driver.context.memory)
    return fill


def _any_work(driver: Driver, p: Any) -> Work:
    if p is None:
        raise Refused(_INVALID, "null node parameters")
    if p.type == _TYPE.CU_GRAPH_NODE_TYPE_KERNEL:
        return _kernel(driver, p.kernel)
    if p.type == _TYPE.CU_GRAPH_NODE_TYPE_MEMCPY:
        return _memcpy(driver, p.memcpy.copyParams)
    if p.type == _TYPE.CU_GRAPH_NODE_TYPE_MEMSET:
        return _memset(driver, p.memset)
    if p.type == _TYPE.CU_GRAPH_NODE_TYPE_EMPTY:
        return None
    raise Refused("CUDA_ERROR_NOT_SUPPORTED", p.type.name)


def _check_context(driver: Driver, ctx: Any) -> None:
    if handle(ctx) != driver.CONTEXT_HANDLE:
        raise Refused("CUDA_ERROR_INVALID_CONTEXT", f"no context {handle(ctx):#x}")
