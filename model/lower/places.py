"""Where the tensors of a graph lie in the workspace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from urdir.model.errors import ModelError
from urdir.model.graph.graph import Graph
from urdir.model.graph.ops import Norm
from urdir.model.graph.tensor import STREAM, Tensor
from urdir.model.memory.workspace import STREAMS

if TYPE_CHECKING:
    from urdir.driver.memory import Arena, Slice


class Places:
    """A slice for every tensor, when it is asked for: ``fixed`` ones, those of the stream in
    turns, and others by their names in ``work``.

    A slot of the stream is free once nothing reads it any more. That of a layer's input is not
    used again in that layer: the launch that overwrites it would have to wait for its readers.
    """

    def __init__(self, graph: Graph, work: Arena, fixed: Mapping[Tensor, Slice]) -> None:
        self._work = work
        # what is made outside is free once it is read; what is read outside never is
        self._kept = [place for of, place in fixed.items() if of not in graph.inputs]
        self._places: dict[Tensor, Slice] = dict(fixed)
        self.starts = graph.starts
        self.readers: dict[Tensor, list[int]] = {}
        for index, reads in enumerate(graph.reads):
            for tensor in reads:
                self.readers.setdefault(tensor, []).append(index)
        # a launch that reads a norm may compute it, of what it is the norm of
        self._norms: dict[Tensor, list[Tensor]] = {}
        for op in graph.ops:
            if isinstance(op, Norm):
                self._norms.setdefault(op.x, []).append(op.y)
        self._streams = [of for of in fixed if of in graph.inputs]
        self._inputs = self._layer_inputs(graph)

    def of(self, tensor: Tensor, position: int) -> Slice:
        """The place of a tensor that operation ``position``, or one taken with it, reads or
        makes."""
        if (found := self._places.get(tensor)) is not None:
            return found
        if tensor.name == STREAM:
            found = self._free(position)
            self._streams.append(tensor)
        elif tensor.name.startswith("banked "):
            number = int(tensor.name.removeprefix("banked "))
            found = self._work["banked"].slice(number * tensor.nbytes, tensor.nbytes)
        else:
            found = self._work[tensor.name]
        self._places[tensor] = found
        return found

    def alias(self, tensor: Tensor, place: Slice) -> None:
        """A tensor lies where another one does."""
        self._places[tensor] = place
        if tensor.name == STREAM:
            self._streams.append(tensor)

    def _free(self, position: int) -> Slice:
        live = [of for of in self._streams if self._last(of) >= position]
        self._streams = live
        start = self._input_at(position)
        taken = {self._key(self._places[of]) for of in (*live, *start)}
        taken |= {self._key(place) for place in self._kept}
        slots = (self._work[name] for name in STREAMS)
        free = next((slot for slot in slots if self._key(slot) not in taken), None)
        if free is None:
            raise ModelError(f"{len(live)} tensors of the stream at once: no slot is free")
        return free

    def _last(self, tensor: Tensor) -> int:
        read = (tensor, *self._norms.get(tensor, ()))
        return max((index for of in read for index in self.readers.get(of, ())), default=-1)

    def _input_at(self, position: int) -> tuple[Tensor, ...]:
        """The input of the layer of an operation."""
        begun = [of for start, of in self._inputs if start <= position]
        return tuple(of for of in begun[-1:] if of in self._places)

    def _layer_inputs(self, graph: Graph) -> list[tuple[int, Tensor]]:
        """The first operation of each layer, and the stream that it reads."""
        found = []
        for start in graph.starts:
            streams = [of for of in graph.reads[start] if of.name == STREAM]
            found += [(start, of) for of in streams[:1]]
        return found

    @staticmethod
    def _key(place: Slice) -> tuple[int, int]:
        return id(place.buffer), place.offset
