"""Recording operations as one graph, replayed as often as the cache has room."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from urdir.driver import execute
from urdir.model.engine.realizar.cached import CachedAttention, Operation, with_advance
from urdir.model.errors import ModelError
from urdir.model.owner import Owner

if TYPE_CHECKING:
    from urdir.driver.graph import RecordedGraph

Cached = TypeVar("Cached", bound=CachedAttention)


class Recording(Generic[Cached]):
    """Collects operations instead of running them as a `CachedAttention` does."""

    def __init__(self, attention: Cached) -> None:
        self.attention = attention
        self.operations: list[Operation] = []

    def submit(self, operation: Operation) -> list[int]:
        """Collect an operation; the lengths that its sequences will have after the first launch.

        Raises ModelError when the layer's rows cannot be those of an operation before it.
        """
        for former in self.operations:
            if former.is_prompt and operation.is_prompt:
                same = (former.sequences, former.tokens) == (operation.sequences, operation.tokens)
                if not same or former.layer == operation.layer:
                    raise ModelError("prompts of one step: the same tokens, each layer once")
            elif former.layer == operation.layer and (
                operation.tokens or former.sequences != operation.sequences or former.is_prompt
            ):
                raise ModelError(
                    f"layer {operation.layer} is in the step already: a step appends to a layer "
                    "once, first, and attends in the same sequences"
                )
        self.operations.append(operation)
        lengths = self.attention.lengths[operation.layer]
        gained = sum(op.tokens for op in self.operations if op.layer == operation.layer)
        return [lengths[s] + gained for s in operation.sequences]


class RecordedStep(Owner):
    """A graph with one node a launch, and what it does to the cache's lengths."""

    def __init__(self, attention: CachedAttention, operations: list[Operation]) -> None:
        self.attention = attention
        self.operations = tuple(operations)
        self.plan = with_advance(operations, attention)
        self.graph: RecordedGraph = execute.record(self.plan, attention.device)

    @property
    def node_count(self) -> int:
        """How many nodes the driver says there are: as many as the plan has launches."""
        return self.graph.node_count

    def launch(self) -> list[int]:
        """Queue one run; the lengths after it of the last operation's sequences.

        Raises ContextFullError and CudaError; lengths and what is stored are then as they were.
        """
        stream = self.attention.stream
        self.attention.perform(self.operations, lambda: self.graph.launch(stream))
        return self.attention.lengths_after(self.operations[-1])

    def close(self) -> None:
        """Free the graph, and release the buffers that it holds."""
        self.graph.close()


def record(attention: Cached, operations: Callable[[Recording[Cached]], object]) -> RecordedStep:
    """The operations that ``operations`` hands to a `Recording`, as one graph.

    Nothing runs before ``launch``. Raises what the operations raise, and LaunchError for buffers of
    another device.
    """
    recording = Recording(attention)
    operations(recording)
    if not recording.operations:
        raise ModelError("a recording without operations")
    return RecordedStep(attention, recording.operations)
