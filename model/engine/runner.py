"""The recorded steps of a session: one graph for every shape of step, made when first needed."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Protocol

from urdir.driver import execute
from urdir.model.blocks.layer import StepParts
from urdir.model.blocks.rows import Ending, StepShape
from urdir.model.engine.step import build_plan, building
from urdir.model.owner import Owner

if TYPE_CHECKING:
    from urdir.driver.execute import BoundPlan
    from urdir.driver.graph import RecordedGraph
    from urdir.driver.stream import Stream


class Observer(Protocol):
    """Runs a step launch by launch, to look at it on the way."""

    def run(self, bound: BoundPlan, stream: Stream) -> None:
        """Queue (or finish) all operations of the plan on ``stream``."""


class Steps(Owner):
    """Plans of steps by shape, and the graphs recorded from them.

    With an ``observer`` the plans are handed to it instead of being replayed: the same launches on
    the same memory.
    """

    def __init__(self, parts: StepParts, observer: Observer | None = None) -> None:
        self.parts = parts
        self.observer = observer
        self._bound: dict[StepShape, BoundPlan] = {}
        self._graphs: dict[StepShape, RecordedGraph] = {}
        self._begun: dict[StepShape, Generator[None, None, RecordedGraph]] = {}

    def launch(self, shape: StepShape, stream: Stream) -> None:
        """Queue a shape's steps on ``stream``. Raises DriverError; nothing was queued then."""
        if self.observer is not None:
            self.observer.run(self.bound(shape), stream)
        else:
            self.graph(shape).launch(stream)

    def bound(self, shape: StepShape) -> BoundPlan:
        """The plan of a shape with its kernels loaded."""
        if shape not in self._bound:
            plan = build_plan(self.parts, shape)
            self._bound[shape] = execute.bind(plan, self.parts.weights.device)
        return self._bound[shape]

    def graph(self, shape: StepShape) -> RecordedGraph:
        """The recorded graph of a shape."""
        found = self._graphs.get(shape)
        if found is None:
            work = self._begun.pop(shape, None)
            if work is None:
                self.bound(shape)  # all kernels at once
                work = self._recording(shape)
            found = self._graphs[shape] = execute.completed(work)
        return found

    def is_recorded(self, shape: StepShape) -> bool:
        """True where a launch of the shape takes no preparation."""
        return shape in self._graphs

    def prepare(self, shape: StepShape) -> bool:
        """Do a small piece of recording a graph that will be needed, well below a millisecond but
        where a kernel is new; False once there is nothing left to do.

        For whoever has a moment to spare while the device is busy. Raises DriverError.
        """
        if self.observer is not None or shape in self._graphs:
            return False
        work = self._begun.pop(shape, None) or self._recording(shape)
        try:
            next(work)
        except StopIteration as done:
            self._graphs[shape] = done.value
            return False
        self._begun[shape] = work
        return True

    def _recording(self, shape: StepShape) -> Generator[None, None, RecordedGraph]:
        device = self.parts.weights.device
        if shape not in self._bound:
            plan = yield from building(self.parts, shape)
            for kernel in plan.kernels():
                device.load(kernel)
                yield
            self._bound[shape] = execute.bind(plan, device)
            yield
        # Launches of a prompt are long, and fill the device: early ones would only be in their way.
        # Measured on an H200, 512 tokens of an 8B Q4_K_M model: 11,119 tokens/s with programmatic
        # edges, 12,280 without.
        programmatic = shape.ending is not Ending.PROMPT
        graph = yield from execute.recording(self._bound[shape], device, programmatic=programmatic)
        return graph

    def close(self) -> None:
        """Free the graphs; closing twice does nothing."""
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()
        self._begun.clear()
        self._bound.clear()
