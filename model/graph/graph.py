"""A graph: operations in the order in which they could be computed one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from urdir.model.errors import ModelError
from urdir.model.graph.evaluation import Evaluation, Floats
from urdir.model.graph.op import Op
from urdir.model.graph.tensor import Tensor


@dataclass(slots=True)
class Graph:
    """Operations, each of which reads ``inputs`` or results of operations before it.

    ``reads`` are the tensors that each reads; ``starts`` are the numbers of the first operations of
    layers.
    """

    inputs: list[Tensor] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    reads: list[tuple[Tensor, ...]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    _made: set[Tensor] = field(default_factory=set)

    def input(self, tensor: Tensor) -> Tensor:
        """Declare a tensor that comes from outside; returns it."""
        self.inputs.append(tensor)
        self._made.add(tensor)
        return tensor

    def add(self, op: Op) -> Tensor:
        """Append an operation; returns its result. Raises ModelError for an input that no operation
        has made, and for a result that exists."""
        reads = op.reads
        for tensor in reads:
            if tensor not in self._made:
                raise ModelError(f"{op.label}: {tensor} is read before it is made")
        for tensor in op.makes:
            if tensor in self._made:
                raise ModelError(f"{op.label}: {tensor} is made twice")
            self._made.add(tensor)
        self.ops.append(op)
        self.reads.append(reads)
        return op.y

    def begin_layer(self) -> None:
        """The operations that follow are those of the next layer."""
        self.starts.append(len(self.ops))

    def evaluate(
        self, at: Evaluation, inputs: Mapping[Tensor, Floats] | None = None
    ) -> dict[Tensor, Floats]:
        """The values of every tensor, with those of its inputs."""
        values = dict(inputs or {})
        for op in self.ops:
            y = op.evaluate(at, *(values[tensor] for tensor in op.reads))
            ends = np.cumsum([tensor.width for tensor in op.makes])
            if y.shape[1] != ends[-1]:
                raise ModelError(f"{op.label}: {y.shape[1]} columns, {op.y} has other ones")
            values |= zip(op.makes, np.split(y, ends[:-1], axis=1), strict=True)
        return values

    def __iter__(self) -> Iterator[Op]:
        return iter(self.ops)

    def __len__(self) -> int:
        return len(self.ops)

    def __str__(self) -> str:
        return "\n".join(map(str, self.ops))
