"""Nodes and edges of a CUDA graph, and their driver structures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from urdir.driver.errors import check, error_of
from urdir.driver.kernel import signature
from urdir.driver.operation import Copy, Fill, Launch, Operation
from urdir.driver.pinned import PinnedBuffer

if TYPE_CHECKING:
    from urdir.driver.context import OpenDevice
    from urdir.driver.module import LoadedKernel

#: CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC: the edge leaves when all CTAs have let dependents start.
PROGRAMMATIC_PORT = 1
#: Programmatic edges need griddepcontrol (PTX ISA 9.7.13.13), introduced with sm_90.
PROGRAMMATIC_SINCE = (9, 0)


@dataclass(frozen=True, slots=True)
class Node:
    """A node: the driver's handle, its operation and, for a launch, the loaded kernel."""

    handle: Any
    operation: Operation
    loaded: LoadedKernel | None = None


@dataclass(frozen=True, slots=True)
class GraphEdge:
    """Node ``after`` waits for node ``before``.

    Across a programmatic edge it starts early and waits in its ``griddepcontrol.wait``, for
    completion of ``before`` and for its memory operations to be visible.
    """

    before: int
    after: int
    programmatic: bool = False


def may_be_programmatic(device: OpenDevice, before: Operation, after: Operation) -> bool:
    """Whether a programmatic edge may lead from one operation to another.

    A kernel that waits (``waits_for_dependencies``) does so before it finishes. So when it is
    complete, its dependencies are complete, and ordering along a path of plain edges also holds
    along programmatic ones. A cooperative grid must become resident at once and gets plain edges
    only.
    """
    if not isinstance(before, Launch) or not isinstance(after, Launch):
        return False
    of = signature(after.kernel)
    return (
        of.waits
        and not of.shape.cooperative
        and not signature(before.kernel).shape.cooperative
        and device.properties.compute_capability >= PROGRAMMATIC_SINCE
    )


def add_kernel_node(
    api: Any, graph: Any, loaded: LoadedKernel, launch: Launch, after: Sequence[Any]
) -> Any:
    """Add a launch to a CUgraph, with plain edges from the CUgraphNodes ``after``; returns its
    CUgraphNode. Raises CudaError."""
    made = launch.packed.node
    if made is None or made[0] is not loaded:
        made = loaded, kernel_params(api, loaded, launch), _attributes(api, launch)
        launch.packed.node = made  # the launch may be in other graphs, and several times in one
    _, params, attributes = made
    status, node = api.cuGraphAddKernelNode(graph, after, len(after), params)
    if status:
        what = f"cuGraphAddKernelNode {launch.label!r} ({launch.kernel.name})"
        raise error_of(api, status, what)
    for attribute, value in attributes:
        (status,) = api.cuGraphKernelNodeSetAttribute(node, attribute, value)
        if status:
            what = f"cuGraphKernelNodeSetAttribute {attribute.name} of {launch.label!r}"
            raise error_of(api, status, what)
    return node


def add_copy_node(api: Any, graph: Any, copy: Copy, after: Sequence[Any]) -> Any:
    """Add a copy to device memory to a CUgraph, as `add_kernel_node` does. Raises CudaError."""
    params = api.CUDA_MEMCPY3D()
    params.dstMemoryType = api.CUmemorytype.CU_MEMORYTYPE_DEVICE
    params.dstDevice = copy.dst.address
    if isinstance(copy.src, PinnedBuffer):
        params.srcMemoryType = api.CUmemorytype.CU_MEMORYTYPE_HOST
        params.srcHost = copy.src.address
    else:
        params.srcMemoryType = api.CUmemorytype.CU_MEMORYTYPE_DEVICE
        params.srcDevice = copy.src.address
    params.WidthInBytes, params.Height, params.Depth = copy.src.nbytes, 1, 1
    result = api.cuGraphAddMemcpyNode(graph, after, len(after), params, _context(api))
    return check(api, result, f"cuGraphAddMemcpyNode {copy.label!r}")


def add_fill_node(api: Any, graph: Any, fill: Fill, after: Sequence[Any]) -> Any:
    """Add a fill of device memory to a CUgraph, as `add_kernel_node` does. Raises CudaError."""
    params = api.CUDA_MEMSET_NODE_PARAMS()
    params.dst, params.value, params.elementSize = fill.dst.address, fill.byte, 1
    params.width, params.height, params.pitch = fill.dst.nbytes, 1, fill.dst.nbytes
    result = api.cuGraphAddMemsetNode(graph, after, len(after), params, _context(api))
    return check(api, result, f"cuGraphAddMemsetNode {fill.label!r}")


def connect(api: Any, graph: Any, nodes: Sequence[Node], edges: Sequence[GraphEdge]) -> None:
    """Add programmatic edges to a CUgraph, all in one call. Raises CudaError.

    The calls that add nodes take no edge data. Plain edges have no place here: in a call with edges
    of both kinds the driver gives all of them the kind of the first (580.159.04).
    """
    if not edges:
        return
    data = api.CUgraphEdgeData()  # takes no keywords
    data.from_port = PROGRAMMATIC_PORT
    data.type = api.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
    result = api.cuGraphAddDependencies(
        graph,
        [nodes[edge.before].handle for edge in edges],
        [nodes[edge.after].handle for edge in edges],
        [data] * len(edges),
        len(edges),
    )
    label = nodes[edges[0].after].operation.label
    check(api, result, f"cuGraphAddDependencies, {len(edges)} edges, the first to {label!r}")


def kernel_params(api: Any, loaded: LoadedKernel, launch: Launch) -> Any:
    """The CUDA_KERNEL_NODE_PARAMS of a launch; points into ``launch.packed``, which it needs."""
    shape = signature(launch.kernel).shape
    params = api.CUDA_KERNEL_NODE_PARAMS()
    params.func = loaded.function
    params.gridDimX, params.gridDimY, params.gridDimZ = shape.grid
    params.blockDimX, params.blockDimY, params.blockDimZ = shape.block
    params.sharedMemBytes = shape.shared_bytes
    params.kernelParams = launch.packed.address
    return params


def _attributes(api: Any, launch: Launch) -> Sequence[tuple[Any, Any]]:
    """Attributes of a node beside the parameters of its launch, with their values."""
    shape, ids, found = signature(launch.kernel).shape, api.CUlaunchAttributeID, []
    if shape.cooperative:
        value = api.CUkernelNodeAttrValue()
        value.cooperative = 1
        found.append((ids.CU_LAUNCH_ATTRIBUTE_COOPERATIVE, value))
    if tuple(shape.cluster) != (1, 1, 1):
        value = api.CUkernelNodeAttrValue()
        dim = value.clusterDim
        dim.x, dim.y, dim.z = shape.cluster
        found.append((ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, value))
    return found


def _context(api: Any) -> Any:
    return check(api, api.cuCtxGetCurrent(), "cuCtxGetCurrent")
