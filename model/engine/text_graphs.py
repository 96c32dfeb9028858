"""Recorded graphs of steps of whole texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from urdir.driver import execute
from urdir.driver.context import close_all
from urdir.driver.parallel import completed
from urdir.model.engine.kept_graphs import EARLY_ROWS, KeptGraphs
from urdir.model.engine.text_steps import EncodeShape
from urdir.model.owner import Owner

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.driver.execute import Recorded
    from urdir.driver.plan import Plan
    from urdir.driver.stream import Stream
    from urdir.model.engine.runner import Observer


class TextGraphs(Owner):
    """Steps of texts on ``stream``, each a recorded graph of the plan that ``build`` makes of its
    shape.

    Graphs take about ``most_bytes`` of the device at most (`KeptGraphs`). With an ``observer``
    there are none; it looks at a step launch by launch.
    """

    def __init__(
        self,
        device: Device,
        stream: Stream,
        build: Callable[[EncodeShape], Plan],
        most_bytes: int,
        observer: Observer | None = None,
    ) -> None:
        self._device, self._stream, self._build = device, stream, build
        self._observer = observer
        self._graphs = KeptGraphs[EncodeShape](most_bytes)

    def make_ready(self, shape: EncodeShape) -> None:
        """Record the graph of a shape, unless it is recorded. Raises DriverError."""
        if self._observer is None:
            self._graph(shape)

    def launch(self, shape: EncodeShape) -> None:
        """Queue a step whose rows are written. Raises DriverError."""
        if self._observer is None:
            self._graph(shape).launch(self._stream)
        else:
            self._observer.run(execute.bind(self._build(shape), self._device), self._stream)

    def _graph(self, shape: EncodeShape) -> Recorded:
        if (graph := self._graphs.use(shape)) is None:
            plan = self._build(shape)
            self._device.load_all(plan.kernels())
            programmatic = shape.rows <= EARLY_ROWS
            graph = completed(execute.recording(plan, self._device, programmatic=programmatic))
            close_all(self._graphs.keep(shape, graph).values())
        return graph

    def close(self) -> None:
        """Free the graphs. Idempotent."""
        self._graphs.close()
