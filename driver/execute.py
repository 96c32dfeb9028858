"""Interpreters of a plan: run it, record it as a graph, evaluate it in numpy, time it.

All interpreters walk the same operations in the same order. A plan is bound to a device once
(kernels loaded and checked against the device) and may then be run, recorded and profiled
repeatedly: functions that take a plan also take a bound one.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from urdir.driver.compare import written_params
from urdir.driver.dependencies import Edge
from urdir.driver.errors import DriverError, LaunchError, MismatchError
from urdir.driver.graph import Graph, RecordedGraph
from urdir.driver.kernel import access_of
from urdir.driver.launch import launch
from urdir.driver.operation import Copy, Launch, Memory, Operation, allocation_of
from urdir.driver.parallel import PIECE, Work, completed, pieces
from urdir.driver.pinned import PinnedBuffer
from urdir.driver.plan import Plan, StopAfter
from urdir.driver.ranges import named
from urdir.driver.recorded_parts import RecordedParts
from urdir.driver.stream import Stream
from urdir.driver.streamed import check_transfers
from urdir.driver.waits import Waits, waits_of

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.driver.module import LoadedKernel

Array = npt.NDArray[Any]
Step = tuple[Operation, "LoadedKernel | None"]
Recorded = RecordedGraph | RecordedParts


@dataclass(frozen=True, slots=True)
class BoundPlan:
    """A plan with the loaded kernel of every operation on ``device`` (None for copies, fills and
    work of the host)."""

    plan: Plan
    device: Device
    kernels: tuple[LoadedKernel | None, ...]

    def __len__(self) -> int:
        return len(self.kernels)

    def steps(self, stop_after: StopAfter = None) -> Iterator[Step]:
        """The operations with their kernels, in order."""
        count = self.plan.position(stop_after)
        return zip(self.plan[:count], self.kernels[:count], strict=True)

    def part(self, first: int, stop: int) -> BoundPlan:
        """The operations from ``first`` up to ``stop``."""
        return BoundPlan(self.plan[first:stop], self.device, self.kernels[first:stop])


@dataclass(frozen=True, slots=True)
class Timing:
    """The time of one operation: the median of ``repeats`` runs, in milliseconds.

    ``gb_per_s`` is the effective bandwidth in 10^9 bytes per second.
    """

    index: int
    label: str
    what: str
    ms: float
    repeats: int
    bytes_moved: int

    @property
    def gb_per_s(self) -> float:
        """Effective memory bandwidth."""
        return self.bytes_moved / self.ms / 1e6 if self.ms else 0.0


def bind(plan: Plan | BoundPlan, device: Device) -> BoundPlan:
    """Load every kernel of a plan. Raises LaunchError for a launch that exceeds the device, or
    whose memory the device cannot access (another device outside its group).

    Operations appended to the plan later are not part of the bound plan.
    """
    if isinstance(plan, Plan):
        device.load_all(plan.kernels())  # compiles in threads
        return completed(binding(plan, device))
    if plan.device is not device:
        raise LaunchError(
            f"plan {plan.plan.name} is bound to {plan.device.name}, it cannot run on {device.name}"
        )
    return plan


def binding(plan: Plan, device: Device) -> Generator[None, None, BoundPlan]:
    """`bind` in small pieces: a few operations, or a kernel. Kernels should be loaded already:
    others are compiled one after the other."""
    fixed = plan[:]
    check_transfers(fixed)
    reached: set[int] = set()
    distinct = {id(each): each for each in fixed}.values()  # steps may be repeated
    yield from pieces(distinct, lambda operation: _check_memory(operation, device, reached))
    loaded = {}
    for kernel in fixed.kernels():
        loaded[id(kernel)] = device.load(kernel)
        yield
    kernels = (loaded.get(id(op.kernel)) if isinstance(op, Launch) else None for op in fixed)
    return BoundPlan(fixed, device, tuple(kernels))


def _check_memory(operation: Operation, device: Device, reached: set[int]) -> None:
    """Raise LaunchError, naming operation and argument, for memory that the device cannot
    access. ``reached`` are the allocations that it can, by their identity."""
    for number, memory in enumerate(operation.memory()):
        owner = allocation_of(memory)
        if id(owner) in reached:
            continue
        if not device.context.reaches(owner.device.context):
            name = operation.uses()[number].name
            raise LaunchError(
                f"{operation.label}: {operation.what}, argument {name!r}: {memory.name!r} "
                f"belongs to another device, {owner.device.name}, not to {device.name}"
            )
        reached.add(id(owner))


def run(
    plan: Plan | BoundPlan, device: Device, stream: Stream, stop_after: StopAfter = None
) -> None:
    """Queue the operations on ``stream``, one driver call each, in NVTX ranges of their labels.
    Raises CudaError, LifetimeError."""
    bound = bind(plan, device)
    with named(bound.plan.name):
        for operation, loaded in bound.steps(stop_after):
            queue(operation, loaded, stream)


def queue(operation: Operation, loaded: LoadedKernel | None, stream: Stream) -> None:
    """Queue one operation on ``stream``, in an NVTX range of its label; ``loaded`` is the kernel of
    a launch."""
    with named(operation.label):
        _queue(operation, loaded, stream)


def _queue(operation: Operation, loaded: LoadedKernel | None, stream: Stream) -> None:
    if isinstance(operation, Launch) and operation.is_on_host:
        operation.perform(stream)
    elif isinstance(operation, Launch):
        assert loaded is not None
        launch(loaded, operation.packed, stream)
    elif isinstance(operation, Copy):
        src = operation.src
        if isinstance(src, PinnedBuffer):
            operation.dst.upload_async(src, src.nbytes, 0, stream)
        else:
            operation.dst.copy_from(src, stream)
    else:
        operation.dst.fill(operation.byte, stream)


def record(plan: Plan | BoundPlan, device: Device, *, programmatic: bool = True) -> RecordedGraph:
    """Record a graph with one node per operation and the edges of ``plan.edges()``, or as a chain
    (`_in_order`).

    Edges are programmatic where possible (`may_be_programmatic`), unless switched off. Raises
    LaunchError, also for work of the host (`recording` takes it), CudaError, and DriverError if the
    numbers of nodes and operations differ.
    """
    graph = completed(recording(plan, device, programmatic=programmatic))
    if isinstance(graph, RecordedParts):
        graph.close()
        raise LaunchError(f"{graph.name}: work of the host between launches is not in one graph")
    return graph


def recording(
    plan: Plan | BoundPlan, device: Device, *, programmatic: bool = True
) -> Work[Recorded]:
    """`record` in small pieces of a few operations; the generator returns the graph, or of a plan
    with work of the host a graph of each part between. A long piece is yielded, and may be run in
    another thread before the next one."""
    bound = bind(plan, device)
    hosts = [n for n, op in enumerate(bound.plan) if isinstance(op, Launch) and op.is_on_host]
    if not hosts:
        return (yield from _graph_of(bound, programmatic))
    parts: list[RecordedGraph | Launch] = []
    try:
        for before, at in pairwise([-1, *hosts, len(bound)]):
            if at > before + 1:
                parts.append((yield from _graph_of(bound.part(before + 1, at), programmatic)))
            if at < len(bound):
                work = bound.plan[at]
                assert isinstance(work, Launch)
                parts.append(work)
    except BaseException:
        RecordedParts(device, bound.plan.name, parts).close()
        raise
    return RecordedParts(device, bound.plan.name, parts)


def _graph_of(bound: BoundPlan, programmatic: bool) -> Work[RecordedGraph]:
    needed, waits = yield from waits_of([*bound.plan], bound.device, programmatic)
    graph = Graph(bound.device, bound.plan.name)
    try:
        return (yield from _recording(bound, graph, waits, needed))
    except BaseException:
        graph.finish(quiet=True)
        raise


def _recording(
    bound: BoundPlan, graph: Graph, waits: Sequence[Waits], needed: Sequence[Edge]
) -> Work[RecordedGraph]:
    given = [
        (operation, loaded, *wait)
        for operation, loaded, wait in zip(bound.plan, bound.kernels, waits, strict=True)
    ]
    for first in range(0, len(given), PIECE):
        graph.add_all(given[first : first + PIECE])
        yield None
    if graph.node_count != len(bound):
        raise DriverError(
            f"plan {bound.plan.name} has {len(bound)} operations, its graph {graph.node_count} "
            "nodes: recording has lost some"
        )
    return (yield from graph.instantiating(needed))


def evaluate(plan: Plan | BoundPlan, stop_after: StopAfter = None) -> None:
    """Run the kernels' numpy references on the device's memory, instead of the kernels.

    Every argument is downloaded, every result uploaded: slow, for comparisons. Waits for earlier
    work. Raises MismatchError for a reference of another shape or type, CudaError.
    """
    plan = plan if isinstance(plan, Plan) else plan.plan
    for operation in plan[: plan.position(stop_after)]:
        if isinstance(operation, Launch) and operation.is_on_host:
            with Stream(allocation_of(operation.memory()[0]).device) as stream:
                operation.perform(stream)
                stream.synchronize()
        elif isinstance(operation, Launch):
            for name, array in reference(operation).items():
                _write(operation.packed.regions[name], array)
        elif isinstance(operation, Copy):
            src = operation.src
            operation.dst.upload(read(src, np.dtype(np.uint8), (src.nbytes,)))
        else:
            operation.dst.upload(np.full(operation.dst.nbytes, operation.byte, np.uint8))


def reference(operation: Launch) -> dict[str, Array]:
    """The expected results of a launch, given its current arguments; writes nothing."""
    kernel, regions = operation.kernel, operation.packed.regions
    inputs: dict[str, Any] = {}
    for p in kernel.params:
        if not p.is_pointer:
            inputs[p.name] = operation.args[p.name]
        elif access_of(p) != "out":
            inputs[p.name] = read(regions[p.name], p.numpy_dtype, kernel.shape_of(p))
    outputs = kernel.reference(**inputs)
    for p in written_params(kernel):
        array = outputs.get(p.name)
        wanted = (p.numpy_dtype, kernel.shape_of(p))
        if array is None or (array.dtype, array.shape) != wanted:
            given = "nothing" if array is None else f"{array.dtype} {array.shape}"
            raise MismatchError(
                f"{operation.label}: the reference of {kernel.name} gives {given} for {p.name}, "
                f"which is {wanted[0]} {wanted[1]}"
            )
    return outputs


def read(memory: Memory, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """The array at the start of ``memory``, after earlier work."""
    if isinstance(memory, PinnedBuffer):
        memory.device.synchronize()
        return memory.view(dtype, shape).copy()
    return memory.download(dtype, shape)


def _write(memory: Memory, array: Array) -> None:
    if isinstance(memory, PinnedBuffer):
        memory.view(array.dtype, array.shape)[...] = array
    else:
        memory.upload(np.ascontiguousarray(array))


def profile(
    plan: Plan | BoundPlan, device: Device, stream: Stream, repeats: int = 1
) -> tuple[Timing, ...]:
    """Time every operation between two events, in ``repeats`` runs of the whole plan.

    The plan really runs ``repeats`` times. Each event adds a few microseconds, and each time
    includes the start-up of the operation, so the sum exceeds the plan's time. Raises as `bind` and
    `run`, and LaunchError for fewer than one run.
    """
    from statistics import median

    if repeats < 1:
        raise LaunchError(f"profile of plan: {repeats} repeats, at least 1 is needed")
    bound = bind(plan, device)
    times: list[list[float]] = [[] for _ in range(len(bound))]
    events = [stream.record() for _ in range(len(bound) + 1)]
    for _ in range(repeats):
        stream.record(events[0])
        for (operation, loaded), event in zip(bound.steps(), events[1:], strict=True):
            queue(operation, loaded, stream)
            stream.record(event)
        stream.synchronize()
        for start, end, ms in zip(events, events[1:], times, strict=False):
            ms.append(end.elapsed_ms_since(start))
    return tuple(
        Timing(i, op.label, op.what, median(times[i]), repeats, op.bytes_moved())
        for i, op in enumerate(bound.plan)
    )
