"""Low-rank adapters of products: y = W x + B (A x), an A and a B for each row's adapter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from urdir.model.families.adapters import AdapterRoom
from urdir.model.families.stored import Linear
from urdir.model.graph.evaluation import Evaluation, Floats
from urdir.model.graph.experts import Experts, Route
from urdir.model.graph.graph import Graph
from urdir.model.graph.op import Elementwise, Op
from urdir.model.graph.ops import Product
from urdir.model.graph.tensor import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Adapt(Op):
    """y (rows, rank of each matrix of ``of``) = scale * A x of each row's adapter."""

    word = "adapt"
    x: Tensor
    of: tuple[Linear, ...]
    room: AdapterRoom

    def __post_init__(self) -> None:
        self._check(self.y.width == len(self.of) * self.room.rank, "the ranks differ")
        self._check(all(of.cols == self.x.width for of in self.of), "the columns differ")

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        return at.shrunk(self.of, x[0], self.room.rank)


def with_adapters(graph: Graph, room: AdapterRoom | None) -> Graph:
    """The graph with the adapters of its products: those side by side that read the same tensor
    share one operation."""
    if room is None:
        return graph
    made, starts = Graph(), set(graph.starts)
    for tensor in graph.inputs:
        made.input(tensor)
    adapted: dict[Op, Op] = {}
    for number, op in enumerate(graph.ops):
        if number in starts:
            made.begin_layer()
        if isinstance(op, Product) and op not in adapted:
            group = [*_group(graph.ops[number:], op)]
            adapted |= dict(zip(group, group, strict=True))
            if some := [of for of in group if room.has(of.of)]:
                adapt = _adapt(made, some[0].label, op.x, [of.of for of in some], room)
                for place, of in enumerate(some):
                    adapted[of] = replace(of, low=adapt.y, place=place, room=room)
        elif isinstance(op, Route) and room.has(op.router.linear):
            adapt = _adapt(made, op.label, op.x, [op.router.linear], room)
            adapted[op] = replace(op, low=adapt.y, room=room)
        elif isinstance(op, Experts) and any(of and room.has(of) for of in op.matrices):
            adapted[op] = replace(op, room=room)
        made.add(adapted.get(op, op))
    return made


def _group(ops: Sequence[Op], first: Product) -> Iterator[Product]:
    """The products from the first one on that read the same tensor under the same label."""
    for op in ops:
        if isinstance(op, Product) and op.x is first.x and op.label == first.label:
            yield op
        elif not isinstance(op, Elementwise):
            return


def _adapt(graph: Graph, label: str, x: Tensor, of: Sequence[Linear], room: AdapterRoom) -> Adapt:
    y = Tensor("lora", x.rows, len(of) * room.rank)
    made = Adapt(f"{label}.lora", y, x, tuple(of), room)
    graph.add(made)
    return made
