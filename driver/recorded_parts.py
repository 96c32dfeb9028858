"""A plan with work of the host, recorded in parts: graphs, and what the host does between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from urdir.driver.context import Closing, OpenDevice, close_all
from urdir.driver.interrupts import deferred_interrupts
from urdir.driver.operation import Launch

if TYPE_CHECKING:
    from urdir.driver.graph import RecordedGraph
    from urdir.driver.stream import Stream


class RecordedParts(Closing):
    """A plan of which parts are recorded, and others are `HostWork`: launched as a recorded graph
    is, in a call that returns once the host's work is done."""

    def __init__(self, device: OpenDevice, name: str, parts: Sequence[RecordedGraph | Launch]):
        self.device, self.name = device, name
        self._parts = tuple(parts)

    @property
    def graphs(self) -> tuple[RecordedGraph, ...]:
        """The recorded parts."""
        return tuple(part for part in self._parts if not isinstance(part, Launch))

    @property
    def handle(self) -> tuple[Any, ...]:
        """The driver's handles; LifetimeError if it is closed."""
        return tuple(graph.handle for graph in self.graphs)

    @property
    def nbytes(self) -> int:
        """Approximate device memory of the graphs in bytes."""
        return sum(graph.nbytes for graph in self.graphs)

    def launch(self, stream: Stream) -> None:
        """Queue one run on ``stream``, and do the host's part of it. Raises DriverError.

        Ctrl-C waits until all is queued: later runs take what the host has left half done as done.
        """
        _ = self.handle
        with deferred_interrupts():
            for part in self._parts:
                if isinstance(part, Launch):
                    part.perform(stream)
                else:
                    part.launch(stream)

    def close(self) -> None:
        """Free the graphs. Idempotent."""
        close_all(self.graphs)
