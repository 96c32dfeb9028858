"""Where the tensors of a graph are: registers, until `lower.sheet` places them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from urdir.model.graph.graph import Graph
from urdir.model.graph.tensor import STREAM, Tensor

if TYPE_CHECKING:
    from urdir.driver.memory import Slice
    from urdir.model.lower.registers import Registers


class Places:
    """A slice for every tensor, when it is asked for: ``fixed`` ones, a register of its own for
    each tensor of the stream, and the register of its name for others."""

    def __init__(self, graph: Graph, registers: Registers, fixed: Mapping[Tensor, Slice]) -> None:
        self._registers = registers
        self._places: dict[Tensor, Slice] = dict(fixed)
        self.readers: dict[Tensor, list[int]] = {}
        for index, reads in enumerate(graph.reads):
            for tensor in reads:
                self.readers.setdefault(tensor, []).append(index)

    def of(self, tensor: Tensor) -> Slice:
        """The place of a tensor."""
        if (found := self._places.get(tensor)) is not None:
            return found
        if tensor.name == STREAM:
            found = self._registers.new(STREAM).part()
        elif tensor.name.startswith("banked "):
            number = int(tensor.name.removeprefix("banked "))
            found = self._registers["banked"].slice(number * tensor.nbytes, tensor.nbytes)
        else:
            found = self._registers[tensor.name]
        self._places[tensor] = found
        return found

    def share(self, tensor: Tensor, of: Tensor) -> None:
        """A tensor without a place lies where another one does."""
        self._places.setdefault(tensor, self.of(of))

    def alias(self, tensor: Tensor, place: Slice) -> None:
        """A tensor lies where another one does."""
        self._places[tensor] = place
