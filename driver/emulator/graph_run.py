"""Executing a graph: seeded random topological order, early dependents, races as errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from urdir.driver.emulator.graph_model import Topology, Work
from urdir.driver.emulator.launch_model import Launch
from urdir.driver.emulator.launches import KernelRun
from urdir.driver.emulator.machine.faults import LAUNCH_FAILED, KernelFault
from urdir.driver.emulator.scheduler import Task
from urdir.driver.emulator.state import Driver
from urdir.driver.emulator.tracing import Trace, TracedMemory


class GraphTask(Task):
    """One launch of an executable graph in a stream.

    Nodes run one at a time in a new random order for each launch. Before a kernel runs, those that
    follow it across a programmatic edge run up to their griddepcontrol.wait. A kernel that spins is
    suspended while other nodes run.
    spins is put aside while other nodes run.

    With ``is_traced``, the accesses of each node are recorded. It is a fault if two unordered nodes
    access a byte and one of them writes it, or if a kernel accesses, before its wait, a byte that
    an unfinished predecessor accesses.
    """

    def __init__(
        self, driver: Driver, works: Sequence[Work], topology: Topology, is_traced: bool
    ) -> None:
        super().__init__()
        self._driver = driver
        self._memory = driver.context.memory
        self._works = works
        self._topology = topology
        self._is_traced = is_traced
        self._begun = False

    def advance(self) -> bool:
        """Run until every node is done, or all runnable ones spin."""
        if not self._begun:
            self._begin()
        ready, spinning, rng = self._ready, self._spinning, self._driver.rng
        while ready:
            node = ready.pop(rng.randrange(len(ready)))
            try:
                ended = self._advance_node(node)
            except KernelFault as fault:
                raise KernelFault(fault.code, fault.message + self._position(node)) from None
            if ended:
                self._complete(node)
                ready += spinning
                spinning.clear()
            else:
                spinning.append(node)
        if self._left:
            ready += spinning
            spinning.clear()
            return False
        return True

    def describe(self) -> str:
        """The spinning kernels."""
        runs = [self._runs[i].describe() for i in self._ready if i in self._runs]
        return f"graph: {', '.join(runs)}"

    def _begin(self) -> None:
        self._begun = True
        topology = self._topology
        self._left = len(self._works)
        self._pending = [len(before) for before in topology.before]
        self._done = [False] * self._left
        self._ready = [i for i, n in enumerate(self._pending) if not n]
        self._spinning: list[int] = []
        self._runs: dict[int, KernelRun] = {}
        #: Accesses of nodes, while unordered nodes are still to run.
        self._traces: dict[int, list[Trace]] = {}
        self._to_compare = [len(others) for others in topology.unordered]
        self._memories: dict[int, TracedMemory] = {}
        #: Accesses of early kernels before their wait.
        self._early: dict[int, Trace] = {}

    def _advance_node(self, node: int) -> bool:
        work = self._works[node]
        if isinstance(work, Launch):
            self._begin_dependents(node)
            return self._run_of(node, work).advance()
        if work is not None:
            memory = self._memory
            if self._needs_trace(node):
                self._new_trace(node).add_intervals(memory, work.reads(), work.writes())
            work.run(memory)
        return True

    def _begin_dependents(self, node: int) -> None:
        """Start the kernels that follow one about to run across a programmatic edge.

        Also those that follow them in turn, if a kernel may trigger its dependents before its own
        wait.
        """
        programmatic = self._topology.programmatic_before
        for after in self._topology.programmatic_after[node]:
            full = self._topology.full_before[after]
            if after in self._runs or not all(self._done[b] for b in full):
                continue
            if not all(b == node or self._triggers(b) for b in programmatic[after]):
                continue
            work = self._works[after]
            assert isinstance(work, Launch)
            self._run_of(after, work).begin_early()
            if after in self._memories:
                # From its wait on, the kernel may touch what its predecessors wrote.
                self._early[after] = self._memories[after].trace
                self._memories[after].trace = self._new_trace(after)
            if work.function.triggers_dependents:
                self._begin_dependents(after)

    def _triggers(self, node: int) -> bool:
        """Whether a node may have triggered its dependents: it is done, or has started and may
        trigger before its own wait."""
        work = self._works[node]
        early = isinstance(work, Launch) and work.function.triggers_dependents
        return self._done[node] or (node in self._runs and early)

    def _run_of(self, node: int, work: Launch) -> KernelRun:
        if node not in self._runs:
            memory: Any = self._memory
            if self._needs_trace(node):
                memory = self._memories[node] = TracedMemory(memory, self._new_trace(node))
            self._runs[node] = KernelRun(self._driver, work, memory)
        return self._runs[node]

    def _needs_trace(self, node: int) -> bool:
        return self._is_traced and self._topology.is_raced[node]

    def _new_trace(self, node: int) -> Trace:
        trace = Trace()
        self._traces.setdefault(node, []).append(trace)
        return trace

    def _complete(self, node: int) -> None:
        self._done[node] = True
        self._left -= 1
        self.completed += 1
        self._runs.pop(node, None)
        self._early.pop(node, None)
        self._memories.pop(node, None)
        if self._is_traced:
            self._check_races(node)
            self._forget_traces(node)
        for after in self._topology.after[node]:
            self._pending[after] -= 1
            if not self._pending[after]:
                self._ready.append(after)

    def _check_races(self, node: int) -> None:
        """Compare a finished node with unordered ones, and with those that started before its
        end."""
        for other in self._topology.unordered[node]:
            if self._done[other]:
                for theirs in self._traces.get(other, ()):
                    self._compare(node, other, theirs, "are not ordered by edges")
        for other, early in self._early.items():
            if self._topology.ancestors[other] >> node & 1:
                why = f"overlap: node {other} has not yet executed griddepcontrol.wait"
                self._compare(node, other, early, why)

    def _forget_traces(self, node: int) -> None:
        """Drop traces that no later node is compared with."""
        for other in self._topology.unordered[node]:
            self._to_compare[other] -= 1
        for each in (node, *self._topology.unordered[node]):
            if self._done[each] and not self._to_compare[each]:
                self._traces.pop(each, None)

    def _compare(self, node: int, other: int, theirs: Trace, why: str) -> None:
        for mine in self._traces.get(node, ()):
            if (at := mine.conflict(theirs)) is not None:
                self._report(node, other, at, why)

    def _report(self, node: int, other: int, address: int, why: str) -> None:
        names = [f"node {i} ({self._name(i)})" for i in sorted((node, other))]
        where = self._memory.describe(address)
        raise KernelFault(
            LAUNCH_FAILED,
            f"race in a graph: {' and '.join(names)} {why}, and both touch 0x{address:x}, {where}, "
            "which at least one of them writes",
        )

    def _position(self, node: int) -> str:
        """The node of a fault, and unordered nodes that a missing edge could concern."""
        others = [i for i in self._topology.unordered[node] if not self._done[i]]
        names = ", ".join(f"{i} ({self._name(i)})" for i in others[:5])
        return f"; graph node {node}" + (f", not ordered with nodes {names}" if names else "")

    def _name(self, node: int) -> str:
        work = self._works[node]
        return f"kernel {work.name}" if isinstance(work, Launch) else type(work).__name__.lower()
