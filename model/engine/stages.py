"""Steps of a model whose layers are on several ranks, one run after the other (`families.stages`).

    rank 0           embedding, layers | ... next step | output, choice | ...
    rank 1                             | layers        |
    the last rank                                      | layers

A rank takes the rows of its predecessor into its own memory when it begins; that one may go on with
the next step then. So the chunks of a prompt, which need no output, follow each other through the
ranks. A token is chosen by rank 0, whose rows, with the positions that it has moved on, go with the
stream from rank to rank.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from urdir.driver.context import close_all
from urdir.driver.plan import Plan
from urdir.model.engine.batch import Output, StepShape
from urdir.model.engine.runner import Observer, Steps
from urdir.model.engine.step import append_heads, append_output, rows_of
from urdir.model.layers.builder import StepOps
from urdir.model.layers.ends import embedding, head
from urdir.model.layers.model import layers
from urdir.model.lower.parts import StepParts
from urdir.model.lower.rows import Rows
from urdir.model.lower.sheet import Sheet, sheet_of
from urdir.model.lower.step import lower, lowering
from urdir.model.memory.workspace import PASSED, RECEIVED

if TYPE_CHECKING:
    from urdir.driver.memory import Slice
    from urdir.driver.stream import Stream


def building_layers(parts: StepParts, shape: StepShape) -> Generator[None, None, Plan]:
    """The plan of one rank's layers for one step, in small pieces."""
    stage = parts.config.stage
    assert stage is not None
    plan = Plan(f"layers from {stage.first} on, {shape.rows} rows, {shape.keys} keys")
    yield from stage_launches(plan, parts, shape)
    plan.add_transfers()
    return plan


def stage_launches(
    plan: Plan | Sheet, parts: StepParts, shape: StepShape
) -> Generator[None, None, None]:
    """Append one rank's layers to a plan, or to a sheet, in pieces: of rank 0 the embedding, too.
    The stream before them is `RECEIVED`, after them `PASSED`."""
    config, work = parts.config, parts.work
    assert config.stage is not None
    first, last = config.stage.rank == 0, config.stage.rank == config.stage.ranks - 1
    parts = replace(parts, config=replace(config, output_norm=None))  # no norm follows here
    rows, outputs = rows_of(parts, shape)
    outputs = outputs if last and not shape.scored else None
    wanted = has_head(shape)
    step = StepOps(parts.config, rows.count)
    x = embedding(step) if first else step.graph.input(step.stream())
    fixed = {} if first else {x: work[RECEIVED]}
    count = None if outputs is None else outputs.rows.count
    y = layers(step, x, count, wanted=wanted)
    fixed |= {} if y is None else {y: work[PASSED]}
    yield from lowering(plan, parts, rows, step.graph, outputs, fixed)


def building_output(parts: StepParts, shape: StepShape) -> Generator[None, None, Plan]:
    """The plan of what rank 0 makes of the last rank's rows."""
    plan = Plan(f"{shape.output.value} of {_outputs(shape)} rows")
    if has_head(shape):
        rows = append_head(plan, parts, shape)
        if shape.output is not Output.NONE:
            append_output(plan, parts, rows, shape.output)
    yield
    return plan


def has_head(shape: StepShape) -> bool:
    """Whether anything is made of the rows after the layers."""
    return shape.output is not Output.NONE or shape.scored > 0


def append_head(plan: Plan | Sheet, parts: StepParts, shape: StepShape) -> Rows:
    """Append the logits of the last rank's rows; returns these. Of a step with scored rows it
    passes all rows."""
    if shape.scored:
        with sheet_of(plan, parts) as sheet:
            return append_heads(sheet, parts, shape, parts.work[RECEIVED])
    rows = Rows.of(parts.state, _outputs(shape), shape.keys)
    step = StepOps(parts.config, rows.count)
    x = step.graph.input(step.stream())
    head(step, x)
    lower(plan, parts, rows, step.graph, fixed={x: parts.work[RECEIVED]})
    return rows


@dataclass(frozen=True, slots=True)
class Place:
    """Where a part of a step runs: what it reads and writes, and the stream it is queued on."""

    parts: StepParts
    stream: Stream

    def passed(self, rows: int) -> Slice:
        """The stream after its layers."""
        return self.parts.work[PASSED].slice(0, self._nbytes(rows))

    def received(self, rows: int) -> Slice:
        """The stream before them."""
        return self.parts.work[RECEIVED].slice(0, self._nbytes(rows))

    def positions(self) -> Slice:
        """The rows of a decode step: sequences and positions."""
        first, last = self.parts.state["sequence"], self.parts.state["position"]
        return first.buffer.slice(first.offset, last.offset + last.nbytes - first.offset)

    def _nbytes(self, rows: int) -> int:
        return 4 * rows * self.parts.config.hidden


class ChainedSteps(Steps):
    """Steps of rank 0, and of the ``followers`` after it in the order of their layers. ``places``
    are those of all ranks."""

    def __init__(
        self,
        places: Sequence[Place],
        graph_bytes: int,
        observer: Observer | None,
        followers: Sequence[tuple[Steps, Stream]],
    ) -> None:
        first = places[0]
        each = graph_bytes // 2  # of the layers here, and of the output
        self._output = Steps(first.parts, each, build=building_output)
        chain = [*followers, (self._output, first.stream)]
        super().__init__(first.parts, each, observer, chain, building_layers)
        self._places = [*places, first]
        # Of each part: it is complete, and its result is taken.
        self._done = [place.parts.device.create_event() for place in places]
        self._taken = [place.parts.device.create_event() for place in self._places[1:]]

    def launch(self, shape: StepShape, stream: Stream) -> None:
        """Queue a shape's steps. Raises DriverError; nothing was queued if a graph is
        missing."""
        parts = (self, *(steps for steps, _ in self._followers))
        if not has_head(shape):
            parts = parts[:-1]
        graphs = [steps.graph(shape) for steps in parts]
        for _ in range(shape.steps):
            for number, graph in enumerate(graphs):
                if number:
                    self._pass_on(number - 1, shape)
                graph.launch(self._places[number].stream)

    def is_recorded(self, shape: StepShape) -> bool:
        """See `Steps`; several steps are no graph."""
        return shape.steps == 1 and super().is_recorded(shape)

    def prepare(self, shape: StepShape) -> bool:
        """See `Steps`."""
        return shape.steps == 1 and super().prepare(shape)

    def _pass_on(self, number: int, shape: StepShape) -> None:
        """Copy the rows of a part of the step to the next one."""
        source, target = self._places[number : number + 2]
        is_output = number + 2 == len(self._places)
        rows = _outputs(shape) if is_output else shape.rows
        done, taken = self._done[number], self._taken[number]
        source.stream.record(done)
        target.stream.wait(done)
        target.received(rows).copy_from(source.passed(rows), target.stream)
        if not is_output:
            target.positions().copy_from(source.positions(), target.stream)
        target.stream.record(taken)
        source.stream.wait(taken)  # before its next step overwrites what is passed

    def close(self) -> None:
        """Free graphs and events. Idempotent."""
        super().close()
        close_all([self._output, *self._done, *self._taken])


def _outputs(shape: StepShape) -> int:
    """Rows that go to what makes the output."""
    if shape.scored:
        return shape.rows
    return shape.outputs if shape.prompt else shape.rows
