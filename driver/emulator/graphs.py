"""Building, querying and changing graphs."""

# ruff: noqa: N802, N803  (names as in the driver API)

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import cuda.bindings.driver as cuda

from urdir.driver.emulator.calls import Refused, c_string, driver_call, expect, expect_enum, size_t
from urdir.driver.emulator.graph_model import PLAIN, EdgeKind, Graph, Node, Work, add_edges, to_dot
from urdir.driver.emulator.graph_work import (
    any_work,
    check_context,
    copy_work,
    fill_work,
    kernel_of,
    kernel_work,
)
from urdir.driver.emulator.state import Driver

_INVALID = "CUDA_ERROR_INVALID_VALUE"


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
    return _add(driver, hGraph, before, kernel_work(driver, nodeParams))


@driver_call(results=1)
def cuGraphAddMemcpyNode(
    driver: Driver, hGraph: Any, dependencies: Any, numDependencies: Any, copyParams: Any, ctx: Any
) -> Any:
    """Add a copy."""
    before = _dependencies(driver, dependencies, numDependencies)
    check_context(driver, ctx)
    return _add(driver, hGraph, before, copy_work(driver, copyParams))


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
    check_context(driver, ctx)
    return _add(driver, hGraph, before, fill_work(driver, memsetParams))


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
    return _add(driver, hGraph, before, any_work(driver, nodeParams))


@driver_call()
def cuGraphAddDependencies(
    driver: Driver, hGraph: Any, from_: Any, to: Any, edgeData: Any, numDependencies: Any
) -> None:
    """Add edges between nodes. All are of the kind of the first, as with a real driver (H200,
    580.159.04)."""
    graph: Graph = driver.context.graphs[hGraph]
    count = size_t(numDependencies)
    before = expect("from_", from_, cuda.CUgraphNode, count)
    after = expect("to", to, cuda.CUgraphNode, count)
    kinds = _kinds(edgeData, count)
    if len(before) != count or len(after) != count:
        raise Refused(_INVALID, f"{count} edges, {len(before)} and {len(after)} nodes")
    nodes = driver.context.nodes
    pairs = [(nodes[b], nodes[a], kinds[0]) for b, a in zip(before, after, strict=True)]
    add_edges(pairs, graph, driver.properties.has_clusters)


# ---- queries ----


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
def cuGraphNodeGetToolsId(driver: Driver, hNode: Any) -> int:
    """The id of a node in tools: its handle, as no tool looks on."""
    node: Node = driver.context.nodes[hNode]
    return node.handle


@driver_call(results=1)
def cuGraphKernelNodeGetParams(driver: Driver, hNode: Any) -> Any:
    """The parameters of a kernel node; ``kernelParams`` points to storage of the node."""
    launch = kernel_of(driver, hNode)
    node: Node = driver.context.nodes[hNode]
    storage = ctypes.create_string_buffer(launch.params, max(1, len(launch.params)))
    base = ctypes.addressof(storage)
    offsets = [offset for offset, _ in launch.function.parameters]
    pointers = (ctypes.c_void_p * len(offsets))(*(base + offset for offset in offsets))
    node.storage = (storage, pointers)
    result = cuda.CUDA_KERNEL_NODE_PARAMS()
    result.func = cuda.CUfunction(launch.handle)
    result.gridDimX, result.gridDimY, result.gridDimZ = launch.grid
    result.blockDimX, result.blockDimY, result.blockDimZ = launch.block
    result.sharedMemBytes = launch.shared_bytes
    result.kernelParams = ctypes.addressof(pointers) if offsets else 0
    result.ctx = cuda.CUcontext(driver.context.handle)
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
    old = kernel_of(driver, hNode)
    driver.context.nodes[hNode].work = kernel_work(driver, nodeParams, old)


@driver_call()
def cuGraphKernelNodeSetAttribute(driver: Driver, hNode: Any, attr: Any, value: Any) -> None:
    """Set a kernel node's cluster, or make it cooperative; other attributes are accepted."""
    launch = kernel_of(driver, hNode)
    name = expect_enum("attr", attr, cuda.CUlaunchAttributeID).name
    if name == "CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION":
        dim = value.clusterDim
        launch = launch.replaced(cluster=(dim.x, dim.y, dim.z))
    elif name == "CU_LAUNCH_ATTRIBUTE_COOPERATIVE":
        launch = launch.replaced(is_cooperative=bool(value.cooperative))
    launch.check(driver.properties)
    driver.context.nodes[hNode].work = launch


@driver_call(results=1)
def cuGraphKernelNodeGetAttribute(driver: Driver, hNode: Any, attr: Any) -> Any:
    """A kernel node's cluster, or whether it is cooperative; other attributes are 0."""
    launch = kernel_of(driver, hNode)
    name = expect_enum("attr", attr, cuda.CUlaunchAttributeID).name
    result = cuda.CUkernelNodeAttrValue()
    if name == "CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION":
        result.clusterDim.x, result.clusterDim.y, result.clusterDim.z = launch.cluster
    elif name == "CU_LAUNCH_ATTRIBUTE_COOPERATIVE":
        result.cooperative = int(launch.is_cooperative)
    return result


# ---- helpers ----


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
