"""What layers are emitted with: a step's graph, and names for operations and tensors."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from urdir.model.families.config import Config
from urdir.model.families.stored import (
    Linear,
    LowRankTerm,
    Normalization,
    StoredMatrix,
    StoredVector,
)
from urdir.model.graph.graph import Graph
from urdir.model.graph.ops import Add, AllReduce, Gather, Norm, Product, Reorder, Scale, ScaleBy
from urdir.model.graph.tensor import BRANCH, PART, STREAM, Tensor


@dataclass(slots=True)
class StepOps:
    """The graph of a step of ``rows`` rows, and what layers keep for later ones: streams under
    names (``saved``), ``banked`` streams, the layers' own ``embeddings``, which tokens the last
    indexer ``selected``, and the ``streams`` beside the first one."""

    config: Config
    rows: int
    graph: Graph = field(default_factory=Graph)
    saved: dict[str, Tensor] = field(default_factory=dict)
    banked: list[Tensor] = field(default_factory=list)
    embeddings: Tensor | None = None
    selected: Tensor | None = None
    streams: list[Tensor] = field(default_factory=list)

    def tensor(self, name: str, width: int, rows: int | None = None) -> Tensor:
        """A new tensor of the step's rows."""
        return Tensor(name, rows or self.rows, width)

    def stream(self, rows: int | None = None, name: str = STREAM) -> Tensor:
        """A new tensor of the stream."""
        return Tensor(name, rows or self.rows, self.config.hidden)


@dataclass(slots=True)
class LayerOps:
    """One layer of a step: number ``index`` of the description.

    ``residual`` is what the next network's result is added to; None where it is the first part of a
    sum, ``sibling`` what the branch before made. With ``outputs`` this many rows alone go on after
    attention.
    """

    step: StepOps
    index: int
    outputs: int | None = None
    residual: Tensor | None = None
    sibling: Tensor | None = None
    reorders: dict[tuple[Tensor, StoredVector], Tensor] = field(default_factory=dict)
    lows: dict[tuple[Tensor, StoredMatrix], Tensor] = field(default_factory=dict)

    @property
    def graph(self) -> Graph:
        """Where operations go."""
        return self.step.graph

    @property
    def config(self) -> Config:
        """The model."""
        return self.step.config

    def name(self, of: str) -> str:
        """The label of an operation: with the number of the layer in the model."""
        stage = self.config.stage
        return f"blk.{self.index + (stage.first if stage else 0)}.{of}"

    def norm(self, label: str, x: Tensor, of: Normalization | None, name: str = "normed") -> Tensor:
        """The norm of x; x itself without a norm."""
        if of is None:
            return x
        y = Tensor(name, x.rows, x.width)
        return self.graph.add(Norm(self.name(label), y, x, of))

    def product(self, label: str, x: Tensor, of: Linear, name: str) -> Tensor:
        """W x (+ bias), times the matrix's factor if it has one, plus what is of low rank."""
        if of.low is not None:
            return self._with_low(label, x, of, of.low, name)
        y = Tensor(name, x.rows, of.rows)
        if of.order is not None:
            x, of = self.reordered(label, x, of.order), replace(of, order=None)
        if (factor := of.factor) is None:
            return self.graph.add(Product(self.name(label), y, x, of))
        product = Product(
            self.name(label), Tensor(name, y.rows, y.width), x, replace(of, factor=None)
        )
        label = self.name(f"{label}.factor")
        return self.graph.add(ScaleBy(label, y, self.graph.add(product), factor))

    def _with_low(self, label: str, x: Tensor, of: Linear, low: LowRankTerm, name: str) -> Tensor:
        """The product, and that of a matrix of low rank, whose first half is made once."""
        if (down := self.lows.get((x, low.a))) is None:
            down = self.product(f"{label}.low_a", x, Linear(low.a), f"{label} low")
            self.lows[x, low.a] = down
        up = self.product(f"{label}.low_b", down, Linear(low.b), f"{name} low")
        made = self.product(label, x, replace(of, low=None), f"{name} alone")
        y = Tensor(name, x.rows, of.rows)
        return self.graph.add(Add(self.name(f"{label}.low"), y, made, up))

    def reordered(self, label: str, x: Tensor, order: StoredVector) -> Tensor:
        """x with its columns in an order, made once for all matrices that share it."""
        if (made := self.reorders.get((x, order))) is None:
            y = Tensor(f"{label} reordered", x.rows, x.width)
            made = self.graph.add(Reorder(self.name(f"{label}.reorder"), y, x, order))
            self.reorders[x, order] = made
        return made

    def scale(self, label: str, x: Tensor, factor: float) -> Tensor:
        """factor * x; x itself for a factor of 1."""
        if factor == 1.0:
            return x
        y = Tensor(x.name, x.rows, x.width)
        return self.graph.add(Scale(self.name(label), y, x, factor))

    def add(self, label: str, a: Tensor, b: Tensor) -> Tensor:
        """a + b, of the stream."""
        y = Tensor(STREAM, a.rows, a.width)
        return self.graph.add(Add(self.name(label), y, a, b))

    def only_outputs(self, label: str, x: Tensor, name: str = "") -> Tensor:
        """The rows of x that go on after attention."""
        if self.outputs is None:
            return x
        name = name or (x.name if x.is_stream else f"output {x.name}")
        y = Tensor(name, self.outputs, x.width)
        return self.graph.add(Gather(self.name(label), y, x))

    def finish(
        self, label: str, x: Tensor, of: Linear, scale: float = 1.0, name: str = BRANCH
    ) -> Tensor:
        """The last product of a network, of all ranks' parts of it, called ``name``."""
        partial = of.matrix.columns is not None
        product = self.product(label, x, of, PART if partial else name)
        made = self.scale(label, product, scale)
        return self.add_ranks(label, made, name) if partial else made

    def add_ranks(self, label: str, x: Tensor, name: str = BRANCH) -> Tensor:
        """The sum of all ranks' x."""
        y = Tensor(name, x.rows, x.width)
        return self.graph.add(AllReduce(self.name(f"{label}.sum_of_ranks"), y, x))
