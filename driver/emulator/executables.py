"""Executable graphs: instantiating, launching, updating."""

# ruff: noqa: N802, N803  (names as in the driver API)

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda

from urdir.driver.emulator.calls import Refused, driver_call
from urdir.driver.emulator.graph_model import Executable, Graph, Topology
from urdir.driver.emulator.graph_run import GraphTask
from urdir.driver.emulator.graph_work import (
    check_context,
    copy_work,
    fill_work,
    kernel_of,
    kernel_work,
)
from urdir.driver.emulator.state import Driver
from urdir.driver.emulator.streams import enqueue, stream_of


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
    is_traced = executable.count_launch()
    task = GraphTask(driver, executable.works, executable.topology, is_traced)
    executable.last = enqueue(driver, stream, task, after)


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
    old = kernel_of(driver, hNode)
    executable.set_work(hNode, kernel_work(driver, nodeParams, old))


@driver_call()
def cuGraphExecMemcpyNodeSetParams(
    driver: Driver, hGraphExec: Any, hNode: Any, copyParams: Any, ctx: Any
) -> None:
    """Replace a copy in an executable graph."""
    check_context(driver, ctx)
    executable: Executable = driver.context.executables[hGraphExec]
    executable.set_work(hNode, copy_work(driver, copyParams))


@driver_call()
def cuGraphExecMemsetNodeSetParams(
    driver: Driver, hGraphExec: Any, hNode: Any, memsetParams: Any, ctx: Any
) -> None:
    """Replace a fill in an executable graph."""
    check_context(driver, ctx)
    executable: Executable = driver.context.executables[hGraphExec]
    executable.set_work(hNode, fill_work(driver, memsetParams))


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


def _instantiate(driver: Driver, hGraph: Any) -> Any:
    graph: Graph = driver.context.graphs[hGraph]
    if code := driver.injections.strike("instantiate"):
        raise Refused(code, "injected fault")
    return cuda.CUgraphExec(driver.context.executables.add(Executable(graph)))
