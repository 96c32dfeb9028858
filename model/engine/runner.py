"""The recorded steps of a session: a graph for every shape of step, recorded at first use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

from urdir.driver import execute
from urdir.driver.context import close_all
from urdir.driver.gate import Gate
from urdir.driver.graph import RecordedGraph
from urdir.driver.group import launch_together
from urdir.driver.parallel import Job, Work, completed, elsewhere
from urdir.model.engine.batch import StepShape
from urdir.model.engine.kept_graphs import EARLY_ROWS, KeptGraphs
from urdir.model.engine.step import building
from urdir.model.errors import SettingsError
from urdir.model.lower.parts import StepParts
from urdir.model.owner import Owner
from urdir.model.progress import Progress

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.driver.execute import BoundPlan, Recorded
    from urdir.driver.kernel import Kernel
    from urdir.driver.plan import Plan
    from urdir.driver.stream import Stream

#: Kernels that are compiled concurrently while a graph is prepared: a new request may wait for
#: these.
_TOGETHER = 32
#: Graphs that a thread has to plan or instantiate, at most, before others begin.
_PLANNED = 2
#: Graphs whose kernels other processes compile at the same time.
_WAITING = 96
#: Graphs that have begun to be made. Which are expected changes with the requests: of more, those
#: that were not gone on with for longest are given up.
MOST_BEGUN = 128
#: Makes the plan of a shape, in pieces.
Build = Callable[[StepParts, StepShape], Work["Plan"]]


class Observer(Protocol):
    """Runs a step launch by launch and looks at what each has done."""

    def run(self, bound: BoundPlan, stream: Stream) -> None:
        """Queue (or finish) all operations of the plan on ``stream``."""


class Steps(Owner):
    """Plans of steps by shape, and the graphs recorded from them.

    With an ``observer`` the plans are handed to it instead of being replayed: the same launches on
    the same memory. Graphs are kept up to ``graph_bytes`` of device memory. ``followers`` are the
    steps of other ranks, each with the stream that they run on: graphs of all are made before any
    is launched. ``build`` makes the plan of a shape.
    """

    def __init__(
        self,
        parts: StepParts,
        graph_bytes: int,
        observer: Observer | None = None,
        followers: Sequence[tuple[Steps, Stream]] = (),
        build: Build = building,
    ) -> None:
        if observer is not None and followers:
            raise SettingsError("steps are looked at launch by launch on one GPU only")
        self.parts = parts
        self.observer = observer
        #: Called with each new graph of this rank (those of followers may come after): its objects
        #: live long.
        self.on_graph: Callable[[], None] = _nothing
        #: Called with each new plan of this rank, whose objects its graph keeps.
        self.on_plan: Callable[[], None] = _nothing
        self._followers = tuple(followers)
        self._build = build
        self._bound: dict[StepShape, BoundPlan] = {}
        self._graphs = KeptGraphs[StepShape](graph_bytes)
        self._begun: dict[StepShape, Work[Recorded]] = {}
        self._waits: dict[StepShape, Job[Any]] = {}  # of those that have begun
        self._asked: set[StepShape] = set()
        #: Closed while a thread that has no time for it would wait for the work of `prepare` in
        #: others: for the interpreter, or the driver.
        self.gate = Gate()
        for steps, _ in self._followers:
            steps.gate = self.gate
        self._is_closing = False
        self._helper = ThreadPoolExecutor(1, "recording")
        self._waiting = ThreadPoolExecutor(_WAITING, "loading")  # for other processes

    def launch(self, shape: StepShape, stream: Stream) -> None:
        """Queue a shape's steps on ``stream``. Raises DriverError; nothing was queued then."""
        if self.observer is not None:
            self.observer.run(self.bound(shape), stream)
        else:
            others = [(steps.graph(shape), queue) for steps, queue in self._followers]
            launch_together([(self.graph(shape), stream), *others])

    def settled(self, stream: Stream) -> list[StepParts]:
        """Wait for what is queued on ``stream`` and on those of other ranks; what each has, this
        one's first. Raises DriverError."""
        ranks = [(self, stream), *self._followers]
        for _, queue in ranks:
            queue.synchronize()
        return [steps.parts for steps, _ in ranks]

    def make_ready(self, shape: StepShape) -> None:
        """Record what a launch of the shape replays, unless it is recorded. Raises DriverError."""
        if self.observer is None:
            for steps in (self, *(steps for steps, _ in self._followers)):
                steps.graph(shape)

    def bound(self, shape: StepShape) -> BoundPlan:
        """The plan of a shape with its kernels loaded."""
        return completed(self._binding(shape))

    def graph(self, shape: StepShape) -> Recorded:
        """The recorded graph of a shape; what `prepare` has begun is finished."""
        if (graph := self._graphs.use(shape)) is not None:
            return graph
        self._waits.pop(shape, None)
        if (work := self._begun.pop(shape, None)) is not None:
            self.gate.open()  # a thread may work for it
        return self._keep(shape, completed(work or self._recording(shape)))

    def _keep(self, shape: StepShape, graph: Recorded) -> Recorded:
        """Keep a new graph beside the device's kernels; plans of those that are forgotten go."""
        self._asked.discard(shape)
        forgotten = self._graphs.keep(shape, graph, self.parts.device.kernel_nbytes)
        for oldest in forgotten:
            self._bound.pop(oldest, None)
        self.on_graph()
        close_all(forgotten.values())
        return graph

    def forget(self, shape: StepShape) -> None:
        """Free the graph of a shape, if there is one; one that still runs, when it is complete."""
        self._bound.pop(shape, None)
        self._graphs.forget(shape)
        for steps, _ in self._followers:
            steps.forget(shape)

    def record(self, shapes: Iterable[StepShape]) -> None:
        """Make the graphs of several shapes; kernels that are not compiled are, side by side.

        With an observer there are none, but the plans and their kernels. Raises DriverError.
        """
        shapes = [*shapes]
        for steps, _ in self._followers:
            steps.record(shapes)
        shapes = [shape for shape in dict.fromkeys(shapes) if shape not in self._bound]
        plans = [completed(self._build(self.parts, shape)) for shape in shapes]
        _load(self.parts.device, [kernel for plan in plans for kernel in plan.kernels()])
        for shape, plan in zip(shapes, plans, strict=True):
            self._bound[shape] = execute.bind(plan, self.parts.device)
            if self.observer is None:
                self.graph(shape)

    def is_recorded(self, shape: StepShape) -> bool:
        """True where a launch of the shape takes no preparation."""
        ranks = (self, *(steps for steps, _ in self._followers))
        return all(shape in steps._graphs for steps in ranks)

    @property
    def graphs(self) -> tuple[RecordedGraph, ...]:
        """The graphs, this rank's first; of each rank the last one used last."""
        made = self._graphs.values()
        parts = ((of,) if isinstance(of, RecordedGraph) else of.graphs for of in made)
        others = (steps.graphs for steps, _ in self._followers)
        return tuple(chain.from_iterable((*parts, *others)))

    @property
    def graph_bytes(self) -> int:
        """Bytes of device memory that graphs take (`RecordedGraph.nbytes`), and the device's
        kernels."""
        return self._graphs.nbytes + self.parts.device.kernel_nbytes

    @property
    def free_share(self) -> float:
        """How much of the memory for graphs is left."""
        return 1 - self.graph_bytes / self._graphs.most_bytes

    def prepare(self, shape: StepShape) -> bool:
        """Do a small piece of recording a graph that will be needed, well below a millisecond;
        False once there is nothing left to do.

        For a caller with idle time while the device is busy. Threads plan, compile and load kernels
        and have the driver make the graph; calls return at once until that is done (`is_waiting`).
        They wait while the ``gate`` is closed. Raises DriverError.
        """
        if self.observer is not None:
            return False
        return self._prepare(shape) or any(s.prepare(shape) for s, _ in self._followers)

    def _prepare(self, shape: StepShape) -> bool:
        """`prepare` of this rank."""
        if shape in self._graphs:
            return False
        if (job := self._waits.get(shape)) is not None and not job.is_done:
            return True
        self._waits.pop(shape, None)
        work = self._begun.pop(shape, None) or self._recording(shape)
        try:
            job = next(work)
        except StopIteration as end:
            self._keep(shape, end.value)
            return False
        self._begun[shape] = work
        if job is not None:
            self._waits[shape] = job
            (self._waiting if job.waits else self._helper).submit(self.gate.work, job.run)
        self._give_up()
        return True

    def _give_up(self) -> None:
        """Give up graphs that have begun, unless a thread works for them."""
        for shape in [*self._begun][: max(0, len(self._begun) - MOST_BEGUN)]:
            if (job := self._waits.get(shape)) is None or job.is_done:
                self._waits.pop(shape, None)
                self._begun.pop(shape).close()
                self._asked.discard(shape)
                self._bound.pop(shape, None)

    @property
    def is_waiting(self) -> bool:
        """True while a thread works for `prepare`."""
        own = any(not job.is_done for job in self._waits.values())
        return own or any(steps.is_waiting for steps, _ in self._followers)

    def waits(self, shape: StepShape) -> bool:
        """True while a thread works for `prepare` of a shape."""
        own = (job := self._waits.get(shape)) is not None and not job.is_done
        return own or any(steps.waits(shape) for steps, _ in self._followers)

    @property
    def plans_enough(self) -> bool:
        """Whether the thread has enough to do: it works for all graphs in turns, so that with more
        of them none is planned for long."""
        own = (not job.waits and not job.is_done for job in [*self._waits.values()])
        return sum(own) >= _PLANNED

    def has_begun(self, shape: StepShape) -> bool:
        """Whether a graph has begun to be made."""
        return shape in self._begun

    def has_asked(self, shape: StepShape) -> bool:
        """Whether the kernels of a shape have been asked for, by `prepare` or because its graph was
        made; those of a graph that is given up have not."""
        return shape in self._asked or shape in self._graphs

    def finish(self) -> bool:
        """Finish what `prepare` has begun, of all ranks; whether there was anything. Raises
        DriverError."""
        had_some = bool(self._begun)
        for shape in [*self._begun]:
            self.graph(shape)
        for steps, _ in self._followers:
            had_some |= steps.finish()
        return had_some

    def end_compilers(self) -> None:
        """End the processes that compile, if there are any; a thread waits for their end."""
        self._waiting.submit(self.parts.device.end_compilers)

    def wait_for_helper(self) -> None:
        """Wait until the threads' work is done, or do it here."""
        self.gate.open()
        for job in self._waits.values():
            job.run()
        for steps, _ in self._followers:
            steps.wait_for_helper()

    def _recording(self, shape: StepShape) -> Work[Recorded]:
        """Make the graph of a shape, in pieces."""
        bound = yield from self._binding(shape)
        early = not shape.prompt or shape.rows <= EARLY_ROWS
        return (yield from execute.recording(bound, self.parts.device, programmatic=early))

    def _binding(self, shape: StepShape) -> Work[BoundPlan]:
        """Make the bound plan of a shape, in pieces.

        Kernels whose loading was yielded, but not done, are loaded together by the caller.
        """
        if shape not in self._bound:
            device = self.parts.device
            plan = yield from elsewhere(self._build(self.parts, shape), self.gate.wait)
            unknown: list[Kernel] = []
            left: list[Kernel] = []
            for kernel in plan.kernels():
                yield None
                if not device.is_loaded(kernel):
                    unknown.append(kernel)
            self._asked.add(shape)
            self.on_plan()
            for at in range(0, len(unknown), _TOGETHER):
                some = unknown[at : at + _TOGETHER]
                yield (job := Job(partial(self._load_beside, some), device.has_compilers))
                if job.is_done:
                    job.result()
                else:
                    left += some
            if left:
                _load(device, left)
            self._bound[shape] = yield from execute.binding(plan, device)
        return self._bound[shape]

    def _load_beside(self, kernels: Sequence[Kernel]) -> None:
        """Load kernels in a thread of its own, while the device is used."""
        device = self.parts.device
        device.compile_beside(kernels)
        # what is compiled takes a call of the driver each, for which launches wait
        for some in [[of] for of in kernels] if device.has_compilers else [kernels]:
            with self.gate.turn():
                if not self._is_closing:
                    device.load_all(some)

    def close(self) -> None:
        """Free the graphs. Idempotent."""
        self._is_closing = True
        self.gate.open()
        self.parts.device.end_compilers()  # nothing waits for them any more
        for threads in (self._helper, self._waiting):
            threads.shutdown(cancel_futures=True)
        for each in (self._begun, self._waits, self._bound):
            each.clear()
        self._graphs.close()


def _load(device: Device, kernels: Sequence[Kernel]) -> None:
    """Load kernels; those that must be compiled are, side by side."""
    with Progress("compiling") as progress:
        device.load_all(kernels, progress.reach)


def _nothing() -> None:
    """A graph or a plan is new, and that is all."""
