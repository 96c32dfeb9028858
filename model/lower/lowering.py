"""What rules launch by: places of tensors, weights, and what earlier launches have left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from urdir.model.families.stored import Linear, Normalization, StoredVector
from urdir.model.graph.adapters import Adapt
from urdir.model.graph.graph import Graph
from urdir.model.graph.op import Op
from urdir.model.graph.ops import Norm
from urdir.model.graph.tensor import Tensor
from urdir.model.lower.arguments import without_none
from urdir.model.lower.parts import LayerParts, device_limits
from urdir.model.lower.places import Places
from urdir.model.lower.rows import OutputRows, Rows
from urdir.model.memory.norms import NormLayer
from urdir.model.memory.weights import Matrix
from urdir.ptxgen.kernels.experts.parts import LogitParts
from urdir.ptxgen.kernels.experts.selection import Selection
from urdir.ptxgen.kernels.linear.choice import takes_gemm

if TYPE_CHECKING:
    from urdir.driver.kernel import Kernel
    from urdir.driver.launch import Argument
    from urdir.driver.memory import Slice
    from urdir.model.lower.registers import Registers
    from urdir.model.lower.sheet import Sheet


@dataclass(frozen=True, slots=True)
class Begun:
    """A norm that the launch which made a tensor has begun: the tensor times the norm's weights is
    ``scaled``, perhaps ``packed``, with a ``summary`` of both (`GemmSmall`)."""

    norm: NormLayer
    scaled: Slice
    summary: Slice
    packed: bool

    @property
    def arguments(self) -> dict[str, Slice]:
        """What the launch that begins it takes for that."""
        norm, summary = self.norm.weight, self.summary
        return without_none(next_norm=norm, scaled=self.scaled, y_summary=summary)


@dataclass(frozen=True, slots=True)
class Parted:
    """Logits that the launch which made their input has left in ``parts``, and the arguments of the
    launches that add them up."""

    parts: LogitParts
    arguments: Mapping[str, Slice]


class Lowering:
    """The launches of a graph, appended to a sheet (``plan``): ``position`` operations are lowered,
    those up to ``end`` are being lowered.

    What rules leave for those after them is kept here: tensors whose values lie ``packed`` for the
    product that reads them, or are ``halves``, heads in f16; norms that are ``begun``, or that each
    reader computes (``unmade``); parts of sums that are ``sent`` to the other ranks; A x of
    adapters that the product itself may compute (``pending``); routers that have made logits alone
    (``unselected``), and those whose logits are there in parts (``parted``); and the last norm that
    is ``completed``, in ``work["normed"]``.
    """

    def __init__(
        self,
        plan: Sheet,
        parts: LayerParts,
        rows: Rows,
        graph: Graph,
        outputs: OutputRows | None = None,
        fixed: Mapping[Tensor, Slice] | None = None,
    ) -> None:
        self.plan, self.parts, self.rows, self.outputs = plan, parts, rows, outputs
        self.limits, self.exact = device_limits(parts.device), parts.exact
        self.ops, self.reads = graph.ops, graph.reads
        self.position = self.end = 0
        self.starts = graph.starts
        self._places = Places(graph, plan.registers, fixed or {})
        #: The number of the operation that makes a tensor.
        self.numbers = {y: number for number, op in enumerate(self.ops) for y in op.makes}
        self.packed: dict[Tensor, Slice] = {}
        self.halves: set[Tensor] = set()
        self.begun: dict[Tensor, Begun] = {}
        self.sent: set[Tensor] = set()
        self.pending: dict[Tensor, Adapt] = {}
        self.unmade: dict[Tensor, Norm] = {}
        self.unselected: dict[Tensor, Selection] = {}
        self.parted: dict[Tensor, Parted] = {}
        self.completed: tuple[Tensor, Normalization] | None = None

    def restore(
        self,
        maker: int,
        place: Slice,
        packed: Slice | None,
        sent: bool,
        begun: tuple[Slice, Slice, bool] | None,
    ) -> None:
        """The result of an operation is made, as it was in a layer that is like this one."""
        y = self.ops[maker].y
        self._places.alias(y, place)
        if packed is not None:
            self.packed[y] = packed
        if sent:
            self.sent.add(y)
        norm = self.ops[self.position]
        if begun is not None and isinstance(norm, Norm):
            self.begun = {y: Begun(self.norm(norm.of), *begun)}

    def begin_norm(self, y: Tensor, norm: NormLayer, packed: bool) -> Begun:
        """The launch that makes y begins its norm. There are buffers for one such norm."""
        begun = Begun(norm, self.work["scaled"], self.work["summary"], packed)
        self.begun = {y: begun}
        return begun

    # ---- what rules ask ----

    @property
    def work(self) -> Registers:
        """What lives between launches, by name."""
        return self.plan.registers

    def following(self, more: int = 0) -> Op | None:
        """The operation after those that are matched."""
        index = self.end + more
        return self.ops[index] if index < len(self.ops) else None

    def maker(self, tensor: Tensor) -> Op | None:
        """The operation that makes a tensor; None for an input."""
        number = self.numbers.get(tensor)
        return None if number is None else self.ops[number]

    def readers(self, tensor: Tensor) -> list[Op]:
        """The operations that read it."""
        return [self.ops[index] for index in self._places.readers.get(tensor, ())]

    def is_read_once(self, tensor: Tensor) -> bool:
        """Whether one operation reads it, in one place: a launch that goes on with it need not make
        it."""
        return len(self._places.readers.get(tensor, ())) == 1

    def is_read_later(self, tensor: Tensor) -> bool:
        """Whether an operation after those that are matched reads it: they must not overwrite
        it."""
        readers = self._places.readers.get(tensor)
        return readers is not None and readers[-1] >= self.end

    def begins_block(self, norm: Norm) -> bool:
        """Whether products read a norm: not one after a network, which is added to the stream."""
        readers = self.readers(norm.y)
        return bool(readers) and not any(op.word in ("add", "scale", "reorder") for op in readers)

    def takes_gemm(self, rows: int) -> bool:
        """Whether these are many rows: see ``choice.takes_gemm``."""
        return takes_gemm(rows, self.exact)

    def place(self, tensor: Tensor) -> Slice:
        """Where a tensor lies, or is to lie."""
        return self._places.of(tensor)

    def share(self, tensor: Tensor, of: Tensor) -> None:
        """A tensor lies where another one does, which nothing reads any more, unless it has a
        fixed place."""
        self._places.share(tensor, of)

    def move(self, tensor: Tensor, place: Slice) -> None:
        """A tensor is made elsewhere than it would be."""
        self._places.alias(tensor, place)

    def matrix(self, of: Linear) -> Matrix:
        """A matrix of the description, on the device."""
        return self.parts.weights.matrix(of)

    def vector(self, of: StoredVector) -> Slice:
        """A vector of the description, on the device."""
        return self.parts.weights.vector(of)

    def norm(self, of: Normalization) -> NormLayer:
        """A norm of the description, on the device."""
        return self.parts.weights.norm(of)

    def launch(self, kernel: Kernel, label: str, /, **arguments: Argument | None) -> None:
        """Append a launch with those arguments that are not None."""
        present: dict[str, Argument] = without_none(**arguments)
        self.plan.launch(kernel, label, **present)
