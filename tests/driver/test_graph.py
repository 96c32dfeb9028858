"""Explicit graphs: nodes, edges, replay, update, lifetimes; programmatic edges with tiny PTX."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from urdir.driver import ranges
from urdir.driver.bindings import GuardedApi, emulated
from urdir.driver.device import Device
from urdir.driver.diff import diff
from urdir.driver.errors import CudaError, LaunchError, LifetimeError, check
from urdir.driver.execute import evaluate, record, run
from urdir.driver.graph import Graph
from urdir.driver.memory import Arena
from urdir.driver.operation import Copy, Fill, Launch
from urdir.driver.plan import Plan
from urdir.ptxgen.ptx.architecture import number_of
from urdir.ptxgen.spec import Access, LaunchShape, Param, Tolerance

N = 37

BODY = """
{
    .reg .pred %done;
    .reg .b32 %i, %value, %amount;
    .reg .b64 %x, %y, %offset;
    ld.param.u64 %x, [x];
    ld.param.u64 %y, [y];
    ld.param.s32 %amount, [amount];
WAIT
    mov.u32 %i, %tid.x;
    setp.ge.u32 %done, %i, COUNT;
    @%done bra DONE;
    mul.wide.u32 %offset, %i, 4;
    add.u64 %x, %x, %offset;
    add.u64 %y, %y, %offset;
    ld.global.b32 %value, [%x];
    add.s32 %value, %value, %amount;
    st.global.b32 [%y], %value;
DONE:
    ret;
}
"""


@dataclass(frozen=True)
class Shift:
    """y = x + amount, one CTA; on sm_90 and newer it lets dependents start early, and waits."""

    n: int = N
    waits_for_dependencies: bool = True
    cooperative: bool = False

    name = "shift"
    params = (
        Param("x", "s32", ("n",), Access.IN),
        Param("y", "s32", ("n",), Access.OUT),
        Param("amount", "s32"),
    )
    tolerance = Tolerance()

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape((1, 1, 1), (64, 1, 1), cooperative=self.cooperative)

    def key(self, target: str) -> str:
        return f"{self}-{target}"

    def ptx(self, target: str) -> str:
        waits = self.waits_for_dependencies and number_of(target) >= 90
        wait = "    griddepcontrol.launch_dependents;\n    griddepcontrol.wait;" if waits else ""
        version = "8.0" if number_of(target) <= 90 else "8.7"
        head = (
            f".version {version}\n.target {target}\n.address_size 64\n"
            ".visible .entry shift(.param .u64 x, .param .u64 y, .param .s32 amount)\n"
            ".maxntid 64, 1, 1"
        )
        return head + BODY.replace("WAIT", wait).replace("COUNT", str(self.n))

    def shape_of(self, param: Param) -> tuple[int, ...]:
        return (self.n,) if param.is_pointer else ()

    def nbytes(self, param: Param) -> int:
        return 4 * self.n

    def reference(self, **inputs: Any) -> dict[str, Any]:
        return {"y": (inputs["x"] + np.int32(inputs["amount"])).astype(np.int32)}

    def bytes_moved(self) -> int:
        return 8 * self.n

    def flops(self) -> int:
        return self.n


SHIFT = Shift()
NO_WAIT = Shift(waits_for_dependencies=False)
COUNT = np.arange(N, dtype=np.int32)


@pytest.fixture
def memory(device: Device) -> Iterator[Arena]:
    with device.arena(dict.fromkeys("abcde", 4 * N), "work") as arena:
        for piece in arena.values():
            piece.upload(COUNT)
        yield arena


def shift(memory: Arena, x: str, y: str, amount: int, kernel: Shift = SHIFT) -> Launch:
    return Launch(kernel, f"{x}->{y}", {"x": memory[x], "y": memory[y], "amount": amount})


def read(memory: Arena, name: str) -> np.ndarray[Any, Any]:
    return memory[name].download(np.int32, (N,))


def test_nodes_run_in_the_order_of_their_edges(device: Device, memory: Arena) -> None:
    graph = Graph(device, "chain")
    loaded = device.load(SHIFT)
    first = graph.add(shift(memory, "a", "b", 5), loaded)
    second = graph.add(Copy(memory["c"], memory["b"], "keep"), after=[first])
    third = graph.add(Fill(memory["b"], 0xFF, "clear"), after=[second])
    graph.add(shift(memory, "b", "d", 7), loaded, after=[third])
    with graph.instantiate() as recorded, device.create_stream() as stream:
        assert recorded.node_count == len(recorded.nodes) == 4
        assert [(e.before, e.after) for e in recorded.edges] == [(0, 1), (1, 2), (2, 3)]
        assert np.array_equal(read(memory, "c"), COUNT)  # building runs nothing
        recorded.launch(stream)
        stream.synchronize()
        assert np.array_equal(read(memory, "c"), COUNT + 5)
        assert np.array_equal(read(memory, "b"), np.full(N, -1))
        assert np.array_equal(read(memory, "d"), np.full(N, 6))


def test_every_replay_reads_memory_anew(device: Device, memory: Arena) -> None:
    plan = Plan("replay")
    plan.extend([shift(memory, "a", "b", 1), shift(memory, "b", "a", 1)])
    with record(plan, device) as recorded, device.create_stream() as stream:
        for _ in range(3):
            recorded.launch(stream)
        stream.synchronize()
        assert np.array_equal(read(memory, "a"), COUNT + 6)
        memory["a"].upload(COUNT * 10)
        recorded.launch(stream)
        stream.synchronize()
        assert np.array_equal(read(memory, "a"), COUNT * 10 + 2)


def test_a_graph_without_an_edge_it_needs_is_refused(device: Device, memory: Arena) -> None:
    graph = Graph(device, "race")
    loaded = device.load(SHIFT)
    graph.add(shift(memory, "a", "b", 1), loaded)
    graph.add(shift(memory, "c", "a", 1), loaded)
    with pytest.raises(LaunchError, match=r"'a->b' to node 1 'c->a'.*write after read.*'y'"):
        graph.instantiate()


@pytest.mark.parametrize("before", [-1, 1])
def test_edges_come_from_nodes_added_before(device: Device, memory: Arena, before: int) -> None:
    graph = Graph(device, "order")
    graph.add(Fill(memory["a"], 0, "first"))
    with pytest.raises(LaunchError, match=f"not from node {before}"):
        graph.add(Fill(memory["b"], 0, "second"), after=[before])


def test_the_emulator_detects_a_missing_edge(emulator: Device) -> None:
    with emulator.arena(dict.fromkeys("ab", 4 * N), "work") as memory:
        for piece in memory.values():
            piece.upload(COUNT)
        graph = Graph(emulator, "race")
        loaded = emulator.load(NO_WAIT)
        graph.add(shift(memory, "a", "b", 1, NO_WAIT), loaded)
        graph.add(shift(memory, "b", "a", 1, NO_WAIT), loaded)
        api = emulator.api  # below the check of `instantiate`
        executable = check(api, api.cuGraphInstantiate(graph.handle, 0), "instantiate")
        with emulator.create_stream() as stream:
            api.cuGraphLaunch(executable, stream.handle)
            race = r"race in a graph: node 0 \(kernel shift\) and node 1 \(kernel shift\)"
            with pytest.raises(CudaError, match=race):
                stream.synchronize()


def test_updated_arguments_count_from_the_next_launch(device: Device, memory: Arena) -> None:
    plan = Plan("update")
    plan.extend([shift(memory, "a", "b", 1), shift(memory, "b", "c", 10)])
    with record(plan, device) as recorded, device.create_stream() as stream:
        recorded.update(1, amount=100)
        recorded.launch(stream)
        stream.synchronize()
        assert np.array_equal(read(memory, "c"), COUNT + 101)
        recorded.update(1, y=memory["d"])
        recorded.launch(stream)
        stream.synchronize()
        assert np.array_equal(read(memory, "d"), COUNT + 101)
        for change, message in (
            ({"y": None}, "null"),
            ({"amount": 2**40}, "amount"),
            ({"z": 1}, "unexpected z"),
        ):
            with pytest.raises(LaunchError, match=message):
                recorded.update(0, **change)
        assert recorded.nodes[0].operation == plan[0]  # refused changes change nothing


def test_an_update_that_needs_another_edge_is_refused(device: Device, memory: Arena) -> None:
    plan = Plan("update")
    plan.extend([shift(memory, "a", "b", 1), shift(memory, "c", "d", 10)])
    with record(plan, device) as recorded:
        assert recorded.edges == ()
        with pytest.raises(LaunchError, match=r"no path leads.*read after write, argument 'x'"):
            recorded.update(1, x=memory["b"])
        recorded.update(1, x=memory["e"])
        with pytest.raises(LaunchError, match="no path leads"):
            recorded.update(0, x=memory["d"])


def test_only_launches_have_arguments(device: Device, memory: Arena) -> None:
    plan = Plan("fill")
    plan.fill(memory["a"], 0, "clear")
    with record(plan, device) as recorded, pytest.raises(LaunchError, match="'clear' is a fill"):
        recorded.update(0, amount=1)


def test_a_graph_keeps_its_buffers(device: Device) -> None:
    buffers = [device.allocate(4 * N, name) for name in "xyz"]
    x, y, z = buffers
    plan = Plan("held")
    plan.launch(SHIFT, "s", x=x, y=y, amount=1)
    recorded, second = record(plan, device), record(plan, device)
    for buffer in (x, y):
        with pytest.raises(LifetimeError, match=buffer.name):
            buffer.close()
    second.update(0, y=z)
    with pytest.raises(LifetimeError, match="z"):
        z.close()
    recorded.close()
    recorded.close()
    y.close()  # the second graph uses z by now
    with pytest.raises(LifetimeError, match="x"):
        x.close()
    second.close()
    for buffer in buffers:
        buffer.close()
    with device.create_stream() as stream, pytest.raises(LifetimeError, match="closed"):
        recorded.launch(stream)


def test_kernels_may_write_pinned_memory_and_it_is_kept(device: Device, memory: Arena) -> None:
    pinned = device.pinned(4 * N, "results")
    plan = Plan("pinned")
    plan.launch(SHIFT, "s", x=memory["a"], y=pinned, amount=3)
    assert "out y=results[0:148]" in str(plan)
    with record(plan, device) as recorded, device.create_stream() as stream:
        for allocation in (pinned, device.load(SHIFT)):
            with pytest.raises(LifetimeError, match="is held by 1"):
                allocation.close()
        recorded.launch(stream)
        stream.synchronize()
        assert np.array_equal(pinned.view(np.int32, N), COUNT + 3)
        pinned.array[:] = 0
        evaluate(plan)
        assert np.array_equal(pinned.view(np.int32, N), COUNT + 3)
        assert diff(plan, device, stream) is None
    pinned.close()


def test_a_forgotten_graph_lets_its_buffers_go(device: Device) -> None:
    x, y = device.allocate(4 * N, "x"), device.allocate(4 * N, "y")
    plan = Plan("forgotten")
    plan.launch(SHIFT, "s", x=x, y=y, amount=1)
    graph = weakref.ref(record(plan, device))
    gc.collect()
    assert graph() is None
    x.close()
    y.close()


def test_a_device_that_closes_ends_its_graphs(device_name: str) -> None:
    with Device.open(device_name) as device:
        x, y = device.allocate(4 * N, "x"), device.allocate(4 * N, "y")
        plan = Plan("ends")
        plan.launch(SHIFT, "s", x=x, y=y, amount=1)
        recorded = record(plan, device)
    assert recorded.closed
    assert x.closed


def two_shifts(memory: Arena) -> Plan:
    plan = Plan("two shifts")
    plan.fill(memory["b"], 0, "clear")
    plan.extend([shift(memory, "a", "b", 1), shift(memory, "b", "c", 1)])
    return plan


def test_tools_know_nodes_by_their_ids(device: Device, memory: Arena) -> None:
    """Where the driver tells them: one each, and the same when asked again."""
    with (
        record(two_shifts(memory), device) as recorded,
        record(two_shifts(memory), device) as other,
    ):
        ids, table = recorded.tools_ids(), recorded.table()
        assert [row["label"] for row in table] == ["clear", "a->b", "b->c"]
        assert [row["operation"] for row in table] == ["fill", "shift", "shift"]
        if ids is None:
            assert not device.is_emulated
            assert {row["tools_id"] for row in table} == {None}
            return
        assert [row["tools_id"] for row in table] == [*ids] == [*(recorded.tools_ids() or ())]
        assert len({*ids, *(other.tools_ids() or ())}) == 6


def test_nodes_that_tools_have_no_ids_of() -> None:
    """A driver that has the function may not support it. Other errors are raised."""
    api = emulated()
    with Device.open("emulator", api=api) as device, device.allocate(64, "x") as buffer:
        plan = Plan("one")
        plan.fill(buffer, 0, "clear")
        with record(plan, device) as recorded:
            api.inject("cuGraphNodeGetToolsId", code="CUDA_ERROR_NOT_SUPPORTED")
            assert recorded.tools_ids() is None
            api.inject("cuGraphNodeGetToolsId", code="CUDA_ERROR_UNKNOWN")
            with pytest.raises(CudaError, match="cuGraphNodeGetToolsId"):
                recorded.tools_ids()
            assert recorded.tools_ids() is not None


def test_a_driver_that_tells_no_ids_leaves_them_out() -> None:
    api = emulated()
    api.remove("cuGraphNodeGetToolsId")
    with (
        Device.open("emulator", api=GuardedApi(api)) as device,
        device.allocate(64, "x") as buffer,
    ):
        plan = Plan("one")
        plan.fill(buffer, 0, "clear")
        with record(plan, device) as recorded:
            assert recorded.tools_ids() is None
            (row,) = recorded.table()
            assert (row["tools_id"], row["label"]) == (None, "clear")


class Nvtx(ModuleType):
    """What `ranges` needs of the package: a domain, here one that notes what is pushed."""

    def __init__(self) -> None:
        super().__init__("nvtx")
        self.open: list[str] = []
        self.found: list[tuple[str, ...]] = []

    def get_domain(self, name: str) -> Nvtx:
        assert name == "urdir"
        return self

    def get_event_attributes(self, message: str) -> str:
        return message

    def push_range(self, attributes: str) -> None:
        self.open.append(attributes)
        self.found.append((*self.open,))

    def pop_range(self) -> None:
        self.open.pop()


@pytest.fixture
def nvtx(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nvtx]:
    made = Nvtx()
    monkeypatch.setitem(sys.modules, "nvtx", made)
    for cached in (ranges.named, ranges._domain):
        cached.cache_clear()
    yield made
    for cached in (ranges.named, ranges._domain):
        cached.cache_clear()


def test_launches_and_replays_are_ranges(emulator: Device, nvtx: Nvtx) -> None:
    """Of their names, also where the driver fails; without the package there are none."""
    with emulator.arena(dict.fromkeys("abc", 4 * N), "work") as memory:
        memory["a"].upload(COUNT)
        plan = two_shifts(memory)
        with emulator.create_stream() as stream:
            run(plan, emulator, stream)
            labels = ("clear", "a->b", "b->c")
            assert nvtx.found == [("two shifts",), *(("two shifts", label) for label in labels)]
            with record(plan, emulator) as recorded:
                nvtx.found.clear()
                recorded.launch(stream)
                assert nvtx.found == [("two shifts",)]
                emulator.api.inject("cuGraphLaunch")
                with pytest.raises(CudaError):
                    recorded.launch(stream)
    assert nvtx.open == []


def test_without_nvtx_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvtx", None)
    ranges._domain.cache_clear()
    ranges.named.cache_clear()
    with ranges.named("x") as entered:
        assert entered is None
    ranges._domain.cache_clear()
    ranges.named.cache_clear()


def test_dot_names_what_runs(device: Device, memory: Arena) -> None:
    plan = Plan('the "plan"')
    plan.fill(memory["b"], 0, "clear")
    plan.extend([shift(memory, "a", "b", 1), shift(memory, "b", "c", 1)])
    with record(plan, device) as recorded:
        lines = recorded.dot().splitlines()
    assert lines[0] == 'digraph "the \\"plan\\"" {'
    assert '  n0 [label="0: clear\\nfill"];' in lines
    assert '  n1 [label="1: a->b\\nshift"];' in lines
    assert "  n0 -> n1;" in lines
    early = device.properties.compute_capability >= (9, 0)
    assert ("  n1 -> n2 [style=dashed];" if early else "  n1 -> n2;") in lines
    assert lines[-1] == "}"


def test_programmatic_edges_lead_only_to_kernels_that_wait(device: Device, memory: Arena) -> None:
    if device.properties.compute_capability < (9, 0):
        pytest.skip("griddepcontrol came with sm_90")
    plan = Plan("programmatic")
    plan.fill(memory["c"], 0, "clear")  # 0
    plan.extend(
        [
            shift(memory, "a", "b", 1),  # 1
            shift(memory, "b", "c", 10),  # 2: waits for 0 (a fill) and 1
            shift(memory, "c", "d", 100, NO_WAIT),  # 3: does not wait
            shift(memory, "d", "a", 1000),  # 4
        ]
    )
    with record(plan, device) as recorded, device.create_stream() as stream:
        assert [(e.before, e.after, e.programmatic) for e in recorded.edges] == [
            (0, 2, False),
            (1, 2, True),
            (2, 3, False),
            (3, 4, True),
        ]
        for _ in range(3):
            recorded.launch(stream)
        stream.synchronize()
        assert np.array_equal(read(memory, "a"), COUNT + 3333)
    with record(plan, device, programmatic=False) as recorded:
        assert not any(edge.programmatic for edge in recorded.edges)


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_the_driver_has_the_edges_of_the_graph(
    seed: int, wait: bool, device: Device, memory: Arena
) -> None:
    """Of both kinds, at the same nodes too, whichever comes first."""
    if device.properties.compute_capability < (9, 0):
        pytest.skip("griddepcontrol came with sm_90")
    rng, last = np.random.default_rng(seed), SHIFT if wait else NO_WAIT
    with Graph(device, "both kinds") as graph:
        for number in range(12):
            launch = shift(memory, "a", "b", 1, SHIFT if number % 4 else last)
            before = rng.permutation(number)[:3].tolist()
            early = [of for of in before if of % 2 and launch.kernel.waits_for_dependencies]
            plain = [of for of in before if of not in early]
            graph.add(launch, device.load(launch.kernel), plain, early)
        graph.instantiate(needed=()).close()
        found = edges_of(graph)
        kinds = {kind for _, _, kind in found}
        assert found == {(edge.before, edge.after, edge.programmatic) for edge in graph.edges}
    assert kinds == {True, False}


def edges_of(graph: Graph) -> set[tuple[int, int, bool]]:
    """Edges as the driver tells them: numbers of nodes, and whether they are programmatic."""
    api = graph.device.api
    number = {int(node.handle): at for at, node in enumerate(graph.nodes)}
    count = check(api, api.cuGraphGetEdges(graph.handle, 0), "cuGraphGetEdges")[-1]
    before, after, data, _ = check(api, api.cuGraphGetEdges(graph.handle, count), "the same")
    early = api.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
    rows = zip(before, after, data, strict=True)
    return {(number[int(b)], number[int(a)], of.type == early) for b, a, of in rows}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (SHIFT, NO_WAIT),
        (SHIFT, Shift(cooperative=True)),
        (Shift(cooperative=True), SHIFT),
        (None, SHIFT),
    ],
)
def test_an_illegal_programmatic_edge_is_refused(
    device: Device, memory: Arena, first: Shift | None, second: Shift
) -> None:
    graph = Graph(device, "illegal")
    if first is None:
        graph.add(Fill(memory["b"], 0, "first"))
    else:
        graph.add(shift(memory, "a", "b", 1, first), device.load(first))
    with pytest.raises(LaunchError, match="no programmatic edge can lead"):
        graph.add(shift(memory, "b", "c", 1, second), device.load(second), programmatic=[0])


def test_before_sm_90_all_edges_are_plain() -> None:
    with Device.open("emulator:sm_80") as device, device.create_stream() as stream:
        arena = device.arena(dict.fromkeys("abc", 4 * N), "work")
        arena["a"].upload(COUNT)
        plan = Plan("plain")
        plan.extend([shift(arena, "a", "b", 1), shift(arena, "b", "c", 1)])
        recorded = record(plan, device)
        assert [edge.programmatic for edge in recorded.edges] == [False]
        recorded.launch(stream)
        stream.synchronize()
        assert np.array_equal(read(arena, "c"), COUNT + 2)


def test_a_cooperative_node_runs(device: Device, memory: Arena) -> None:
    plan = Plan("cooperative")
    plan.extend([shift(memory, "a", "b", 1, Shift(cooperative=True)), shift(memory, "b", "c", 1)])
    with record(plan, device) as recorded, device.create_stream() as stream:
        recorded.launch(stream)
        stream.synchronize()
    assert np.array_equal(read(memory, "c"), COUNT + 2)


RANKS = """
.version 7.8
.target sm_90
.address_size 64
.visible .entry ranks(.param .u64 y)
{
    .reg .b32 %rank, %size, %own, %far, %peer, %cta, %value;
    .reg .b64 %y, %offset;
    .shared .b32 mine;
    ld.param.u64 %y, [y];
    mov.u32 %rank, %cluster_ctarank;
    mov.u32 %size, %cluster_nctarank;
    mov.u32 %cta, %ctaid.x;
    add.u32 %value, %cta, 100;
    st.shared.u32 [mine], %value;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    sub.u32 %peer, %size, %rank;
    sub.u32 %peer, %peer, 1;
    mov.u32 %own, mine;
    mapa.shared::cluster.u32 %far, %own, %peer;
    ld.shared::cluster.u32 %value, [%far];
    mul.wide.u32 %offset, %cta, 4;
    add.u64 %y, %y, %offset;
    st.global.u32 [%y], %value;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    ret;
}
"""


@pytest.mark.parametrize("cluster", [1, 2, 4, 8])
def test_a_cluster_is_one_in_a_graph_too(
    device: Device, make_kernel: Callable[..., Any], cluster: int
) -> None:
    """Each CTA writes what its opposite in the cluster has: the kernel launched, and as a node."""
    if device.properties.compute_capability < (9, 0):
        pytest.skip("the device has no clusters")
    shape = LaunchShape((16, 1, 1), (32, 1, 1), cluster=(cluster, 1, 1))
    params = (Param("y", "u32", (16,), Access.OUT),)
    ranks = make_kernel(
        text=RANKS, name="ranks", params=params, launch_shape=shape, spec_key=f"ranks-{cluster}"
    )
    want = 100 + np.arange(16).reshape(-1, cluster)[:, ::-1].ravel()
    with device.arena({"y": 64}, "work") as arena, device.create_stream() as stream:
        plan = Plan("cluster")
        plan.extend([Launch(ranks, "ranks", {"y": arena["y"]})])
        run(plan, device, stream)
        stream.synchronize()
        assert np.array_equal(arena["y"].download(np.uint32, (16,)), want)
        arena["y"].upload(np.zeros(16, np.uint32))
        with record(plan, device) as recorded:
            recorded.update(0, y=arena["y"])  # new arguments leave the cluster as it is
            recorded.launch(stream)
            stream.synchronize()
        assert np.array_equal(arena["y"].download(np.uint32, (16,)), want)


@pytest.mark.parametrize("seed", range(5))
def test_random_plans_replay_as_they_run(device: Device, seed: int) -> None:
    """Launches, copies and fills over overlapping slices of one buffer."""
    rng = np.random.default_rng(seed)
    width = 256
    start = rng.integers(0, 1000, 12 * width // 4).astype(np.int32)
    with device.allocate(12 * width, "work") as work, device.create_stream() as stream:

        def piece() -> Any:
            return work.slice(int(rng.integers(0, 21)) * width // 2, 4 * N)

        plan = Plan(f"random{seed}")
        while len(plan) < 25:
            x, y = piece(), piece()
            apart = abs(x.offset - y.offset) >= 4 * N
            if rng.random() < 0.2:
                plan.fill(y, int(rng.integers(0, 256)), f"fill {len(plan)}")
            elif apart and rng.random() < 0.3:
                plan.copy(y, x, f"copy {len(plan)}")
            elif apart or x.offset == y.offset:
                kernel = SHIFT if rng.random() < 0.7 else NO_WAIT
                plan.launch(kernel, f"{len(plan)}", x=x, y=y, amount=int(rng.integers(0, 100)))
        work.upload(start)
        run(plan, device, stream)
        stream.synchronize()
        eager = work.download(np.int32)
        assert not np.array_equal(eager, start)
        with record(plan, device) as recorded:
            assert recorded.node_count == len(plan)
            for _ in range(3):
                work.upload(start)
                recorded.launch(stream)
                stream.synchronize()
                assert np.array_equal(work.download(np.int32), eager)


@pytest.mark.parametrize("forks", [1, 3])
def test_a_plan_with_few_forks_is_recorded_as_a_chain(device: Device, forks: int) -> None:
    """One of 42 launches that no other waits for has an edge to the next one; three of 46 do not.
    The results are those of the plan."""
    memory = device.arena(dict.fromkeys("abx", 4 * N), "work")
    memory["a"].upload(COUNT)
    plan = Plan("nearly a chain")
    for i in range(40 + 2 * forks):
        plan.extend([shift(memory, *("ab" if i % 2 == 0 else "ba"), 1)])
        if i % 10 == 5 and i // 10 < forks:
            plan.extend([shift(memory, "a", "x", i)])
    chain = [(at, at + 1) for at in range(len(plan) - 1)]
    pairs = [(edge.before, edge.after) for edge in plan.edges()]
    assert pairs != chain
    with record(plan, device) as recorded, device.create_stream() as stream:
        found = sorted((edge.before, edge.after) for edge in recorded.edges)
        assert found == (chain if forks == 1 else sorted(pairs))
        recorded.launch(stream)
        stream.synchronize()
    last = [i for i in range(40 + 2 * forks) if i % 10 == 5 and i // 10 < forks][-1]
    assert np.array_equal(read(memory, "a"), COUNT + 40 + 2 * forks)
    assert np.array_equal(read(memory, "x"), COUNT + last + 1 + last)


@pytest.mark.parametrize("seed", range(4))
def test_any_order_that_the_edges_permit_gives_the_same(seed: int) -> None:
    with Device.open("emulator", api=emulated(seed=seed)) as device:
        memory = device.arena(dict.fromkeys([*"abcde", "sum"], 4 * N), "work")
        memory["a"].upload(COUNT)
        plan = Plan("branches")
        for i, y in enumerate("bcde"):
            plan.extend([shift(memory, "a", y, i), shift(memory, y, y, 10)])
        plan.extend([shift(memory, "e", "sum", 100), shift(memory, "b", "a", 1000)])
        with record(plan, device) as recorded, device.create_stream() as stream:
            before = {edge.after: edge.before for edge in recorded.edges}
            assert not {0, 2, 4, 6} & before.keys()  # the branches start together
            recorded.launch(stream)
            stream.synchronize()
        assert np.array_equal(read(memory, "sum"), COUNT + 113)
        assert np.array_equal(read(memory, "a"), COUNT + 1010)


def test_a_fault_in_a_graph_is_reported_and_everything_still_closes() -> None:
    with Device.open("emulator") as device, device.create_stream() as stream:
        memory = device.arena(dict.fromkeys("abc", 4 * N), "work")
        memory["a"].upload(COUNT)
        plan = Plan("faulty")
        plan.extend([shift(memory, "a", "b", 1), shift(memory, "b", "c", 1)])
        with record(plan, device) as recorded:
            device.api.inject("launch", nth=2)
            recorded.launch(stream)
            with pytest.raises(CudaError, match="poisoned") as caught:
                stream.synchronize()
            assert caught.value.name == "CUDA_ERROR_ILLEGAL_ADDRESS"
            with pytest.raises(CudaError, match="cuGraphLaunch 'faulty'"):
                recorded.launch(stream)
        memory.close()


def test_a_graph_that_cannot_be_instantiated_holds_nothing() -> None:
    with Device.open("emulator") as device:
        x, y = device.allocate(4 * N, "x"), device.allocate(4 * N, "y")
        plan = Plan("large")
        plan.launch(SHIFT, "s", x=x, y=y, amount=1)
        device.api.inject("instantiate")
        with pytest.raises(CudaError, match=r"cuGraphInstantiate 'large', 1 nodes.*OUT_OF_MEMORY"):
            record(plan, device)
        x.close()
        y.close()
