"""What the ways of multiplying rows with their experts have in common: which products there are,
and what comes after them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

from urdir.model.lower.arguments import without_none
from urdir.model.lower.experts.layer import MixtureLayer
from urdir.model.lower.lowering import Begun, Lowering, Parted
from urdir.model.lower.requests import alike, biases
from urdir.model.memory.norms import NormLayer
from urdir.model.memory.weights import Matrix
from urdir.ptxgen.kernels.activate import Activate
from urdir.ptxgen.kernels.experts.combine import CombineExperts
from urdir.ptxgen.kernels.experts.parts import LogitParts
from urdir.ptxgen.kernels.experts.selection import Selection
from urdir.ptxgen.kernels.linear.epilogue.activation import Activated, Gated
from urdir.ptxgen.kernels.linear.epilogue.weighted import Weighted
from urdir.ptxgen.kernels.linear.steps import Epilogue
from urdir.ptxgen.kernels.normalise import Normalise
from urdir.ptxgen.weights.packed_few import Order

if TYPE_CHECKING:
    from urdir.driver.memory import Slice
    from urdir.driver.pinned import PinnedBuffer
    from urdir.model.lower.registers import Registers

# One object for equal kernels, with its cached properties.
_activate = lru_cache(maxsize=64)(Activate)
_combine = lru_cache(maxsize=64)(CombineExperts)
_normalise = lru_cache(maxsize=64)(Normalise)


@dataclass(frozen=True, slots=True)
class MixtureCall:
    """A mixture to compute: y = residual + the weighted sum of the chosen experts for x after the
    ``norm``, all (rows, hidden) f32; y is another buffer. Labels of launches begin with ``label``.
    ``selection``: by which the products choose the experts, None if they are chosen; ``parted``: by
    the parts of logits. ``position`` (rows,) u32: padding rows have no experts. ``begins``: the
    norm of y that is begun, for products that take packed vectors, few ones in that ``order``.
    ``factored``: the factors of the ``norm`` are in the register "router factor".
    """

    label: str
    mixture: MixtureLayer
    x: Slice
    norm: NormLayer | None
    residual: Slice | None
    y: Slice
    position: Slice
    adapters: CallAdapters | None = None
    selection: Selection | None = None
    parted: Parted | None = None
    begins: Begun | None = None
    order: Order | None = None
    factored: bool = False

    @property
    def logit_parts(self) -> LogitParts | None:
        """In which parts the logits are; None: in none."""
        return None if self.parted is None else self.parted.parts

    def after_norm(self, at: Lowering, rows: int) -> MixtureCall:
        """The same after a launch of its own for the norm, if there is one."""
        if self.norm is None:
            return self
        norm, normed, cols = self.norm, at.work["normed"], self.mixture.up.cols
        kernel, label = _normalise(rows, cols, norm.norm), f"{self.label}.norm"
        at.launch(kernel, label, x=self.x, y=normed, weight=norm.weight, bias=norm.bias)
        at.completed = None
        return replace(self, x=normed, norm=None)


@dataclass(frozen=True, slots=True)
class Product:
    """What a launch multiplies: a matrix of all experts, perhaps with the ``up`` matrix of a gated
    pair, and the nonlinearity that follows. ``weighted``: the weight of the expert multiplies it,
    the product of the ``down`` matrix with its bias, that of others without. ``shared`` has the
    matrices of an expert that all rows have.
    """

    name: str
    matrix: Matrix
    up: Matrix | None = None
    nonlinearity: Gated | Activated | None = None
    weighted: bool = False
    shared: tuple[Matrix, ...] = ()

    @property
    def is_down(self) -> bool:
        """Whether it is the last product of the experts."""
        return self.name == "down"

    @property
    def epilogue(self) -> tuple[Epilogue, ...]:
        """What follows the product in its launch."""
        bias, weighted = biases([self.matrix]), (Weighted(),) if self.weighted else ()
        if self.is_down:
            return (*bias, *weighted)
        return (*weighted, *bias, *([self.nonlinearity] if self.nonlinearity else []))

    @property
    def arguments(self) -> dict[str, Slice | PinnedBuffer]:
        """The matrices and their biases, by parameter name."""
        found: dict[str, Slice | PinnedBuffer] = {}
        for name, bias, of in (("weights", "bias", self.matrix), ("up", "up_bias", self.up)):
            if of is not None:
                given = {name: of.data, f"{name}_source": of.source}
                found |= without_none(**given, **{bias: of.bias, f"{bias}_held": of.held_bias})
        for name, matrix in zip(("shared_weights", "shared_up"), self.shared, strict=False):
            found[name] = matrix.data
        return found


class CallAdapters(Protocol):
    """The adapters of a mixture's matrices."""

    def add_first(self, x: Slice, gate: Slice, up: Slice) -> None:
        """Add what they make of x to the first products; without a gate ``gate`` has that of up."""


#: Appends a product with this label, whose result goes there.
Multiply = Callable[[str, Product, "Slice"], None]


@dataclass(frozen=True, slots=True)
class ExpertProducts:
    """Launches of products of ``rows`` vectors."""

    at: Lowering
    rows: int

    @property
    def work(self) -> Registers:
        """The intermediates."""
        return self.at.work

    def choice(self, call: MixtureCall) -> dict[str, Slice]:
        """The experts of each row, or what they are chosen by."""
        if call.selection is None:
            return {"expert": self.work[call.mixture.number]}
        if call.parted is not None:
            return dict(call.parted.arguments)
        return {"logits": self.work["router logits"]}

    def positions(self, call: MixtureCall) -> dict[str, Slice]:
        """Those of the rows, by which several know padding."""
        return {"position": call.position} if self.rows > 1 else {}

    def append_activated(self, call: MixtureCall, multiply: Multiply) -> None:
        """``work["expert gate"]`` = f(gate x) * up x, without a gate f(up x), for each pair of a
        row and its experts."""
        gate, up = self.work["expert gate"], self.work["expert up"]
        mixture = call.mixture
        first, *second = mixture_products(mixture, apart=call.adapters is not None)[:-1]
        multiply(f"{call.label}_{first.name}", first, gate)
        if second:
            multiply(f"{call.label}_{second[0].name}", second[0], up)
        if call.adapters is not None:
            call.adapters.add_first(call.x, gate, up)
        if second or call.adapters is not None:
            values = self.rows * mixture.selection.used * mixture.width
            kernel = _activate(values, mixture.activation, gated=bool(second))
            label, of = f"{call.label}.activation", {"gate": gate, "up": up}
            self.at.plan.launch(kernel, label, y=gate, **(of if second else {"x": gate}))

    def append_combined(self, call: MixtureCall, slots: int) -> None:
        """y = residual + the sum of the slots of ``work["expert out"]``."""
        residual, begins = call.residual, call.begins
        adds, begun = residual is not None, begins is not None
        kernel = _combine(self.rows, slots, call.mixture.hidden, adds, begun, call.order)
        label, x = f"{call.label}.combine", self.work["expert out"]
        given = {} if residual is None else {"residual": residual}
        given |= {} if begins is None else begins.arguments
        self.at.plan.launch(kernel, label, x=x, y=call.y, position=call.position, **given)


def mixture_products(mixture: MixtureLayer, apart: bool = False) -> list[Product]:
    """What is multiplied, the down matrices last: a gate and up in one launch if it can, unless
    they are to be ``apart``, without a nonlinearity."""
    gate, up, f, shared = mixture.gate, mixture.up, mixture.activation, mixture.shared
    last = () if shared is None else (shared.down,)
    down = Product("down", mixture.down, weighted=not mixture.weigh_input, shared=last)
    weighted = mixture.weigh_input
    if gate is None:
        return [Product("up", up, None, None if apart else Activated(f), weighted), down]
    if alike(gate, up) and not apart:
        first = () if shared is None else (shared.gate, shared.up)
        return [Product("gate_up", gate, up, Gated(f), weighted, first), down]
    return [Product("gate", gate, weighted=weighted), Product("up", up, weighted=weighted), down]
