"""Conversion of node parameters of the API to the work of a node."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda

from urdir.driver.emulator.calls import Refused, handle
from urdir.driver.emulator.copies import Box, Fill, copy_3d
from urdir.driver.emulator.graph_model import Node, Work
from urdir.driver.emulator.launch_model import Launch
from urdir.driver.emulator.launches import make_launch
from urdir.driver.emulator.state import Driver

_INVALID = "CUDA_ERROR_INVALID_VALUE"
_TYPE = cuda.CUgraphNodeType


def kernel_of(driver: Driver, node_handle: Any) -> Launch:
    """The launch of a kernel node; INVALID_VALUE for another node."""
    node: Node = driver.context.nodes[node_handle]
    if not isinstance(node.work, Launch):
        raise Refused(_INVALID, f"not a kernel node but {node.label}")
    return node.work


def kernel_work(driver: Driver, p: Any, old: Launch | None = None) -> Launch:
    """A launch from CUDA_KERNEL_NODE_PARAMS, with the attributes of the ``old`` one."""
    if p is None:
        raise Refused(_INVALID, "null node parameters")
    grid = p.gridDimX, p.gridDimY, p.gridDimZ
    block = p.blockDimX, p.blockDimY, p.blockDimZ
    cluster, cooperative = (old.cluster, old.is_cooperative) if old else (None, False)
    shared, address = p.sharedMemBytes, p.kernelParams
    return make_launch(driver, p.func, grid, block, shared, address, p.extra, cluster, cooperative)


def copy_work(driver: Driver, p: Any) -> Work:
    """A copy from CUDA_MEMCPY3D."""
    memory = driver.context.memory
    copy = copy_3d(memory, p) if p is not None else None
    if copy is None:
        raise Refused(_INVALID, "an empty copy")
    copy.check(memory)
    return copy


def fill_work(driver: Driver, p: Any) -> Work:
    """A fill from CUDA_MEMSET_NODE_PARAMS."""
    if p is None or p.elementSize not in (1, 2, 4) or not p.width or not p.height:
        raise Refused(_INVALID, "an empty fill, or elements that are not of 1, 2 or 4 bytes")
    width = p.width * p.elementSize
    pitch = p.pitch if p.height > 1 else width
    box = Box(int(p.dst), width, True, p.height, 1, pitch, 0)
    fill = Fill(box, p.value & ((1 << 8 * p.elementSize) - 1), p.elementSize)
    fill.check(driver.context.memory)
    return fill


def any_work(driver: Driver, p: Any) -> Work:
    """Work from CUgraphNodeParams."""
    if p is None:
        raise Refused(_INVALID, "null node parameters")
    if p.type == _TYPE.CU_GRAPH_NODE_TYPE_KERNEL:
        return kernel_work(driver, p.kernel)
    if p.type == _TYPE.CU_GRAPH_NODE_TYPE_MEMCPY:
        return copy_work(driver, p.memcpy.copyParams)
    if p.type == _TYPE.CU_GRAPH_NODE_TYPE_MEMSET:
        return fill_work(driver, p.memset)
    if p.type == _TYPE.CU_GRAPH_NODE_TYPE_EMPTY:
        return None
    raise Refused("CUDA_ERROR_NOT_SUPPORTED", p.type.name)


def check_context(driver: Driver, ctx: Any) -> None:
    """Refuse a handle that is not the current context."""
    if handle(ctx) != driver.current_handle:
        raise Refused("CUDA_ERROR_INVALID_CONTEXT", f"no context {handle(ctx):#x}")
