"""Graphs: building, asking, executing in any permitted order, races, programmatic edges."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import cuda.bindings.driver as cuda
import numpy as np
import pytest

N = 32
ZEROS = np.zeros(N, np.uint32)


class Builder:
    """A graph under construction."""

    def __init__(self, bench: Any) -> None:
        self.bench = bench
        self.api = bench.api
        self.graph = bench.ok(self.api.cuGraphCreate(0))

    def add(self, x: int, y: int, value: int, *before: Any, name: str = "add", n: int = N) -> Any:
        p = self.bench.node_params(name, self.bench.add(x, y, n, value))
        return self.bench.ok(
            self.api.cuGraphAddKernelNode(self.graph, list(before), len(before), p)
        )

    def programmatic(self, x: int, y: int, value: int, before: Any, name: str, *more: Any) -> Any:
        """A kernel behind programmatic edges."""
        p = cuda.CUgraphNodeParams()
        p.type = cuda.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
        kernel = self.bench.node_params(name, self.bench.add(x, y, N, value))
        for field in ("func", "kernelParams"):
            setattr(p.kernel, field, getattr(kernel, field))
        p.kernel.gridDimX = p.kernel.gridDimY = p.kernel.gridDimZ = 1
        p.kernel.blockDimX, p.kernel.blockDimY, p.kernel.blockDimZ = 32, 1, 1
        return self.bench.ok(
            self.api.cuGraphAddNode(
                self.graph,
                [before, *more],
                [programmatic_edge()] * (1 + len(more)),
                1 + len(more),
                p,
            )
        )

    def instantiate(self) -> Any:
        return self.bench.ok(self.api.cuGraphInstantiate(self.graph, 0))

    def run(self, executable: Any = None, times: int = 1) -> None:
        executable = self.instantiate() if executable is None else executable
        stream = self.bench.stream()
        for _ in range(times):
            self.bench.ok(self.api.cuGraphLaunch(executable, stream))
        self.bench.synchronize(stream)


def programmatic_edge() -> Any:
    data = cuda.CUgraphEdgeData()
    data.from_port = int(cuda.CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC)
    data.type = 1
    return data


@pytest.fixture
def builder(bench: Any) -> Builder:
    return Builder(bench)


def test_a_chain_runs_in_order_and_late(builder: Builder) -> None:
    bench, x = builder.bench, builder.bench.upload(ZEROS)
    y, z = bench.upload(ZEROS), bench.upload(ZEROS)
    first = builder.add(x, y, 1)
    second = builder.add(y, z, 10, first)
    builder.add(z, x, 100, second)
    executable, stream = builder.instantiate(), bench.stream(1)
    bench.ok(bench.api.cuGraphUpload(executable, stream))
    for _ in range(2):
        bench.ok(bench.api.cuGraphLaunch(executable, stream))
    assert bench.download(x, ZEROS).tolist() == [0] * N  # another stream: nothing has run
    bench.synchronize(stream)
    assert bench.download(x, ZEROS).tolist() == [222] * N
    bench.ok(bench.api.cuGraphExecDestroy(executable))
    bench.fails(bench.api.cuGraphLaunch(executable, stream), "INVALID_VALUE")


def test_copies_and_fills(builder: Builder) -> None:
    bench, api = builder.bench, builder.api
    x, y = bench.upload(ZEROS), bench.upload(ZEROS)
    fill = cuda.CUDA_MEMSET_NODE_PARAMS()
    fill.dst, fill.elementSize, fill.value = cuda.CUdeviceptr(x), 4, 7
    fill.width, fill.height = N, 1
    filled = bench.ok(api.cuGraphAddMemsetNode(builder.graph, None, 0, fill, bench.context))
    added = builder.add(x, x, 1, filled)
    copy = cuda.CUDA_MEMCPY3D()
    copy.srcMemoryType = copy.dstMemoryType = cuda.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copy.srcDevice, copy.dstDevice = cuda.CUdeviceptr(x), cuda.CUdeviceptr(y)
    copy.WidthInBytes, copy.Height, copy.Depth = 4 * N, 1, 1
    node = api.cuGraphAddMemcpyNode(builder.graph, [added], 1, copy, bench.context)
    copied = bench.ok(node)
    host = np.zeros(N, np.uint32)
    p = cuda.CUgraphNodeParams()
    p.type = cuda.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMCPY
    c = p.memcpy.copyParams
    c.srcMemoryType = cuda.CUmemorytype.CU_MEMORYTYPE_DEVICE
    c.dstMemoryType = cuda.CUmemorytype.CU_MEMORYTYPE_HOST
    c.srcDevice, c.dstHost = cuda.CUdeviceptr(y), host
    c.WidthInBytes, c.Height, c.Depth = 4 * N, 1, 1
    bench.ok(api.cuGraphAddNode(builder.graph, [copied], None, 1, p))
    builder.run()
    assert host.tolist() == [8] * N
    types = [bench.ok(api.cuGraphNodeGetType(n)).name for n in (filled, added, copied)]
    assert [t.removeprefix("CU_GRAPH_NODE_TYPE_") for t in types] == ["MEMSET", "KERNEL", "MEMCPY"]
    bench.fails(api.cuGraphAddMemcpyNode(builder.graph, [added], 1, copy, 0), "INVALID_CONTEXT")
    fill.elementSize = 3
    result = api.cuGraphAddMemsetNode(builder.graph, [], 0, fill, bench.context)
    bench.fails(result, "INVALID_VALUE")


def test_nodes_and_edges_can_be_asked_for(builder: Builder, tmp_path: Path) -> None:
    bench, api = builder.bench, builder.api
    x, y = bench.upload(ZEROS), bench.upload(ZEROS)
    a = builder.add(x, x, 1)
    b = builder.add(y, y, 1)
    c = builder.add(x, y, 1)
    bench.ok(api.cuGraphAddDependencies(builder.graph, [a, b], [c, c], None, 2))
    d = builder.programmatic(x, y, 1, c, "wait_first")
    assert bench.ok(api.cuGraphGetNodes(builder.graph)) == ([], 4)
    assert bench.ok(api.cuGraphGetNodes(builder.graph, 10)) == ([a, b, c, d], 4)
    assert bench.ok(api.cuGraphGetRootNodes(builder.graph, 10))[0] == [a, b]
    sources, targets, data, count = bench.ok(api.cuGraphGetEdges(builder.graph, 10))
    assert count == 3
    found = set(zip(map(int, sources), map(int, targets), [e.type for e in data], strict=True))
    assert found == {(int(a), int(c), 0), (int(b), int(c), 0), (int(c), int(d), 1)}
    assert bench.ok(api.cuGraphNodeGetDependencies(c, 9))[0] == [a, b]
    path = tmp_path / "graph.dot"
    bench.ok(api.cuGraphDebugDotPrint(builder.graph, str(path).encode(), 0))
    text = path.read_text()
    assert text.count("->") == 3
    assert "wait_first" in text
    bench.ok(api.cuGraphDestroy(builder.graph))
    bench.fails(api.cuGraphGetNodes(builder.graph), "INVALID_VALUE")
    bench.fails(api.cuGraphNodeGetType(a), "INVALID_VALUE")


def test_bad_edges(builder: Builder, make_bench: Any) -> None:
    bench, api, x = builder.bench, builder.api, builder.bench.upload(ZEROS)
    a = builder.add(x, x, 1)
    b = builder.add(x, x, 1, a)
    graph = builder.graph
    for before, after in (([a], [b]), ([a], [a])):
        result = api.cuGraphAddDependencies(graph, before, after, None, 1)
        bench.fails(result, "INVALID_VALUE")
    p = bench.node_params("add", bench.add(x, x, N, 1))
    bench.fails(api.cuGraphAddKernelNode(graph, [a, a], 2, p), "INVALID_VALUE")
    other = Builder(bench)
    foreign = other.add(x, x, 1)
    result = api.cuGraphAddDependencies(graph, [foreign], [b], None, 1)
    bench.fails(result, "INVALID_VALUE")
    empty = bench.ok(api.cuGraphAddEmptyNode(graph, [b], 1))
    edge = [programmatic_edge()]
    bench.fails(api.cuGraphAddDependencies(graph, [a], [empty], edge, 1), "INVALID_VALUE")
    edge[0].from_port = 0
    c = builder.add(x, x, 1, b)
    bench.fails(api.cuGraphAddDependencies(graph, [a], [c], edge, 1), "INVALID_VALUE")
    bench.ok(api.cuGraphAddDependencies(graph, [c], [a], None, 1))
    bench.fails(api.cuGraphInstantiate(graph, 0), "INVALID_VALUE")  # a cycle


def test_parameters_are_copied_into_the_node(builder: Builder) -> None:
    bench, api, x = builder.bench, builder.api, builder.bench.upload(ZEROS)
    value = ctypes.c_uint32(5)
    arguments = bench.arguments(x, x, ctypes.c_uint32(N), value)
    node = bench.ok(
        api.cuGraphAddKernelNode(builder.graph, [], 0, bench.node_params("add", arguments))
    )
    value.value = 50
    p = bench.ok(api.cuGraphKernelNodeGetParams(node))
    assert (p.gridDimX, p.blockDimX, p.sharedMemBytes) == (1, 32, 0)
    assert p.func == bench.function("add")
    pointers = (ctypes.c_void_p * 4).from_address(int(p.kernelParams))
    assert ctypes.c_uint64.from_address(pointers[0]).value == x
    assert ctypes.c_uint32.from_address(pointers[3]).value == 5
    builder.run()
    assert bench.download(x, ZEROS).tolist() == [5] * N


def test_executable_graph_can_be_updated(builder: Builder) -> None:
    bench, api, x = builder.bench, builder.api, builder.bench.upload(ZEROS)
    first = builder.add(x, x, 1)
    second = builder.add(x, x, 10, first)
    executable, stream = builder.instantiate(), bench.stream()
    bench.ok(api.cuGraphLaunch(executable, stream))
    p = bench.node_params("add", bench.add(x, x, N, 1000))
    bench.ok(api.cuGraphExecKernelNodeSetParams(executable, second, p))
    bench.synchronize(stream)  # the launch before the update keeps its arguments
    assert bench.download(x, ZEROS).tolist() == [11] * N
    builder.run(executable)
    assert bench.download(x, ZEROS).tolist() == [1012] * N
    builder.run()  # the graph itself is as it was
    assert bench.download(x, ZEROS).tolist() == [1023] * N
    bench.ok(api.cuGraphKernelNodeSetParams(first, p))
    bench.ok(api.cuGraphExecUpdate(executable, builder.graph))
    builder.run(executable)
    assert bench.download(x, ZEROS).tolist() == [2033] * N
    builder.add(x, x, 1, second)
    result = api.cuGraphExecUpdate(executable, builder.graph)
    bench.fails(result, "GRAPH_EXEC_UPDATE_FAILURE")


def test_kernel_node_attributes(builder: Builder) -> None:
    bench, api, x = builder.bench, builder.api, builder.bench.upload(ZEROS)
    p = bench.node_params("add", bench.add(x, x, N, 1), grid=(3, 1, 1))
    node = bench.ok(api.cuGraphAddKernelNode(builder.graph, [], 0, p))
    ids = cuda.CUlaunchAttributeID
    value = cuda.CUlaunchAttributeValue()
    value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = 3, 1, 1
    cluster = ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    bench.ok(api.cuGraphKernelNodeSetAttribute(node, cluster, value))
    assert bench.ok(api.cuGraphKernelNodeGetAttribute(node, cluster)).clusterDim.x == 3
    value.clusterDim.x = 2
    result = api.cuGraphKernelNodeSetAttribute(node, cluster, value)
    bench.fails(result, "INVALID_CLUSTER_SIZE")
    p.gridDimX = 0
    bench.fails(api.cuGraphAddKernelNode(builder.graph, [], 0, p), "INVALID_VALUE")


def test_unordered_nodes_run_in_different_orders(make_bench: Any) -> None:
    """Which three of six nodes have run when the fourth faults."""
    seen = set()
    for seed in range(8):
        bench = make_bench(seed=seed)
        builder = Builder(bench)
        addresses = [bench.upload(ZEROS) for _ in range(6)]
        for address in addresses:
            builder.add(address, address, 1)
        bench.api.inject("launch", nth=4)
        executable, stream = builder.instantiate(), bench.stream()
        bench.ok(bench.api.cuGraphLaunch(executable, stream))
        memory = bench.api._driver.context.memory
        bench.fails(bench.api.cuStreamSynchronize(stream), "ILLEGAL_ADDRESS")
        seen.add(tuple(memory.read(address, 1) == b"\1" for address in addresses))
    assert len(seen) > 2
    assert all(sum(ran) == 3 for ran in seen)


def test_the_order_is_that_of_the_seed(make_bench: Any) -> None:
    orders = []
    for _ in range(2):
        bench = make_bench(seed=5)
        builder = Builder(bench)
        addresses = [bench.upload(ZEROS) for _ in range(8)]
        for address in addresses:
            builder.add(address, address, 1)
        bench.api.inject("launch", nth=5)
        executable = builder.instantiate()
        bench.ok(bench.api.cuGraphLaunch(executable, 0))
        memory = bench.api._driver.context.memory
        bench.fails(bench.api.cuCtxSynchronize(), "ILLEGAL_ADDRESS")
        orders.append([memory.read(address, 1) for address in addresses])
    assert orders[0] == orders[1]


@pytest.mark.parametrize("kind", ["write write", "write read", "read write"])
def test_unordered_nodes_must_not_overlap(builder: Builder, kind: str) -> None:
    bench = builder.bench
    x = bench.upload(np.zeros(3 * N, np.uint32))
    y, z = x + 4 * N, x + 8 * N
    first, second = {
        "write write": ((x, z), (y, z)),
        "write read": ((x, y), (y, z)),
        "read write": ((x, y), (z, x)),
    }[kind]
    builder.add(*first, 1)
    builder.add(*second, 1)
    executable, stream = builder.instantiate(), bench.stream()
    bench.ok(bench.api.cuGraphLaunch(executable, stream))
    bench.fails(bench.api.cuStreamSynchronize(stream), "LAUNCH_FAILED")
    assert "race" in bench.api.last_fault
    assert "node 0 (kernel add) and node 1 (kernel add)" in bench.api.last_fault
    bench.fails(bench.api.cuMemAlloc(4), "LAUNCH_FAILED")


def test_neighbours_and_shared_inputs_are_no_races(builder: Builder) -> None:
    """Interleaved parts of one allocation, touching at their ends, and one input for all."""
    bench = builder.bench
    x = bench.upload(np.zeros(6 * N, np.uint32))
    source = bench.upload(ZEROS)
    for i in range(6):
        builder.add(source, x + 4 * N * i, i)
    builder.add(source, bench.upload(ZEROS), 1, n=N - 1)
    builder.run(times=5)
    found = bench.download(x, np.zeros(6 * N, np.uint32)).reshape(6, N)
    assert (found == np.arange(6)[:, None]).all()


def test_copies_and_fills_race_too(builder: Builder) -> None:
    bench, x = builder.bench, builder.bench.upload(ZEROS)
    builder.add(x, bench.upload(ZEROS), 1)
    fill = cuda.CUDA_MEMSET_NODE_PARAMS()
    fill.dst, fill.elementSize, fill.value = cuda.CUdeviceptr(x + 4 * N - 1), 1, 7
    fill.width, fill.height = 1, 1
    bench.ok(bench.api.cuGraphAddMemsetNode(builder.graph, [], 0, fill, bench.context))
    bench.ok(bench.api.cuGraphLaunch(builder.instantiate(), 0))
    bench.fails(bench.api.cuCtxSynchronize(), "LAUNCH_FAILED")
    assert "fill" in bench.api.last_fault


def test_memory_freed_under_a_graph_is_a_fault(builder: Builder) -> None:
    bench, x = builder.bench, builder.bench.upload(ZEROS)
    fill = cuda.CUDA_MEMSET_NODE_PARAMS()
    fill.dst, fill.elementSize, fill.value = cuda.CUdeviceptr(x), 4, 7
    fill.width, fill.height = N, 1
    bench.ok(bench.api.cuGraphAddMemsetNode(builder.graph, [], 0, fill, bench.context))
    executable = builder.instantiate()
    bench.ok(bench.api.cuMemFree(x))
    bench.ok(bench.api.cuGraphLaunch(executable, 0))
    bench.fails(bench.api.cuCtxSynchronize(), "ILLEGAL_ADDRESS")
    assert "freed" in bench.api.last_fault


def test_a_fault_names_the_node_and_those_without_order(builder: Builder) -> None:
    bench, x = builder.bench, builder.bench.upload(ZEROS)
    first = builder.add(x, x, 1)
    builder.add(x + 4096, x, 1, first)
    bench.ok(bench.api.cuGraphLaunch(builder.instantiate(), 0))
    bench.fails(bench.api.cuCtxSynchronize(), "ILLEGAL_ADDRESS")
    assert bench.api.last_fault.endswith("; graph node 1")


def test_programmatic_edges(builder: Builder) -> None:
    bench = builder.bench
    x, y, z = (bench.upload(ZEROS) for _ in range(3))
    first = builder.add(x, y, 1)
    second = builder.programmatic(y, z, 10, first, "wait_first")
    builder.programmatic(z, x, 100, second, "trigger_wait_first")
    builder.run(times=3)
    assert bench.download(x, ZEROS).tolist() == [333] * N


@pytest.mark.parametrize("seed", range(6))
def test_any_permitted_order_computes_the_same(make_bench: Any, seed: int) -> None:
    """Random chains over 6 buffers, with exactly the edges that the data needs, some programmatic.

    The expected values come from doing the same additions one after the other.
    """
    rng = np.random.default_rng(seed)
    bench = make_bench(seed=seed)
    builder, api = Builder(bench), bench.api
    expected = rng.integers(0, 1000, (6, N)).astype(np.uint32)
    buffers = [bench.upload(row) for row in expected]
    nodes: list[tuple[Any, int, int, str]] = []
    for _ in range(30):
        source, target = (int(i) for i in rng.integers(0, 6, 2))
        name = str(rng.choice(["add", "wait_first", "trigger_wait_first"]))
        value = int(rng.integers(1, 100))
        node = builder.add(buffers[source], buffers[target], value, name=name)
        for before, read, written, _ in nodes:
            if written in (source, target) or read == target:
                edge = None
                if name != "add" and rng.integers(2):
                    edge = [programmatic_edge()]
                result = api.cuGraphAddDependencies(builder.graph, [before], [node], edge, 1)
                bench.ok(result)
        nodes.append((node, source, target, name))
        expected[target] = expected[source] + np.uint32(value)
    builder.run()
    found = [bench.download(address, ZEROS) for address in buffers]
    assert (np.array(found) == expected).all()


@pytest.mark.parametrize("dropped", range(7))
def test_every_missing_edge_is_found(make_bench: Any, dropped: int) -> None:
    """Eight additions of which each depends on the one before, in some way, but for one edge."""
    chain = [(0, 1), (1, 2), (3, 1), (4, 3), (3, 4), (4, 4), (5, 4), (4, 0)]
    bench = make_bench(seed=dropped)
    builder = Builder(bench)
    buffers = [bench.upload(ZEROS) for _ in range(6)]
    nodes: list[Any] = []
    for at, (source, target) in enumerate(chain):
        before = nodes[-1:] if at != dropped + 1 else []
        nodes.append(builder.add(buffers[source], buffers[target], 1, *before))
    bench.ok(bench.api.cuGraphLaunch(builder.instantiate(), 0))
    bench.fails(bench.api.cuCtxSynchronize(), "LAUNCH_FAILED")
    assert "race in a graph" in bench.api.last_fault


def test_touching_before_the_wait_is_a_race(builder: Builder) -> None:
    bench = builder.bench
    x, y, z = (bench.upload(ZEROS) for _ in range(3))
    first = builder.add(x, y, 1)
    builder.programmatic(y, z, 10, first, "load_then_wait")
    bench.ok(bench.api.cuGraphLaunch(builder.instantiate(), 0))
    bench.fails(bench.api.cuCtxSynchronize(), "LAUNCH_FAILED")
    assert "griddepcontrol.wait" in bench.api.last_fault


def test_touching_a_grandparent_before_the_wait_is_a_race(builder: Builder) -> None:
    bench = builder.bench
    x, y, z, unrelated = (bench.upload(ZEROS) for _ in range(4))
    first = builder.add(x, y, 1)
    second = builder.programmatic(unrelated, unrelated, 1, first, "trigger_wait_first")
    builder.programmatic(y, z, 10, second, "load_then_wait")
    bench.ok(bench.api.cuGraphLaunch(builder.instantiate(), 0))
    bench.fails(bench.api.cuCtxSynchronize(), "LAUNCH_FAILED")
    assert "griddepcontrol.wait" in bench.api.last_fault


def test_a_kernel_begins_once_all_before_it_have_triggered(builder: Builder) -> None:
    """One of two predecessors triggers at once; the other waits first, so that what it waits for is
    complete when the kernel begins."""
    bench = builder.bench
    x, y, z, one, other = (bench.upload(ZEROS) for _ in range(5))
    first = builder.add(x, y, 1)
    early = builder.programmatic(one, one, 1, first, "trigger_wait_first")
    late = builder.programmatic(other, other, 1, first, "wait_first")
    builder.programmatic(y, z, 10, early, "load_then_wait", late)
    builder.run(times=2)
    assert bench.download(z, ZEROS).tolist() == [11] * N


def test_loading_something_else_before_the_wait_is_fine(builder: Builder) -> None:
    bench = builder.bench
    x, y, weights = (bench.upload(ZEROS) for _ in range(3))
    first = builder.add(x, y, 1)
    builder.programmatic(weights, x, 10, first, "load_then_wait")
    builder.run(times=2)
    assert bench.download(x, ZEROS).tolist() == [10] * N


def test_no_programmatic_edges_before_sm_90(make_bench: Any) -> None:
    bench = make_bench(target="sm_80")
    text = (
        ".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry empty()\n{\n    ret;\n}\n"
    )
    module = bench.ok(bench.api.cuModuleLoadData(text.encode()))
    p = cuda.CUDA_KERNEL_NODE_PARAMS()
    p.func = bench.ok(bench.api.cuModuleGetFunction(module, b"empty"))
    p.gridDimX = p.gridDimY = p.gridDimZ = p.blockDimX = p.blockDimY = p.blockDimZ = 1
    graph = bench.ok(bench.api.cuGraphCreate(0))
    a, b = (bench.ok(bench.api.cuGraphAddKernelNode(graph, [], 0, p)) for _ in range(2))
    result = bench.api.cuGraphAddDependencies(graph, [a], [b], [programmatic_edge()], 1)
    bench.fails(result, "NOT_SUPPORTED")


def test_spinning_node_lets_others_run(builder: Builder) -> None:
    bench = builder.bench
    for _ in range(4):  # whatever comes first
        flag, out, y = (bench.upload(ZEROS) for _ in range(3))
        graph = Builder(bench)
        p = bench.node_params("spin", bench.arguments(flag, out), block=(1, 1, 1))
        bench.ok(bench.api.cuGraphAddKernelNode(graph.graph, [], 0, p))
        graph.add(y, y, 1)
        stream, setter = bench.stream(1), bench.stream(1)
        bench.ok(bench.api.cuGraphLaunch(graph.instantiate(), stream))
        bench.ok(bench.launch("add", bench.add(flag, flag, 1, 3), setter))
        bench.synchronize(stream)
        assert bench.download(out, ZEROS)[0] == 3
        assert bench.download(y, ZEROS).tolist() == [1] * N


def test_injected_instantiation_failure(builder: Builder) -> None:
    builder.api.inject("instantiate")
    bench = builder.bench
    bench.fails(builder.api.cuGraphInstantiate(builder.graph, 0), "OUT_OF_MEMORY")
    bench.ok(builder.api.cuGraphInstantiateWithParams(builder.graph, None))
