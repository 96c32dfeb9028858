"""A rule for mixtures whose shared expert stands beside those that a row chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from urdir.model.graph.experts import Experts, Route
from urdir.model.graph.op import Op
from urdir.model.graph.ops import Add, Gate, Product, Scale
from urdir.model.lower.chain import Chain
from urdir.model.lower.experts.layer import MixtureLayer, RouterLayer, SharedLayer
from urdir.model.lower.experts.per_row import PerRow
from urdir.model.lower.experts.products import MixtureCall
from urdir.model.lower.linear import lower_chain
from urdir.model.lower.lowering import Lowering
from urdir.model.lower.moe import append_router, before_norm, is_one_launch, products_choose
from urdir.model.lower.requests import alike
from urdir.model.lower.rule import Rule
from urdir.model.memory.weights import Matrix
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.linear.epilogue.activation import Scaled


@dataclass(frozen=True, slots=True)
class _Beside:
    """A mixture and its shared expert as operations. ``gate`` is that of the shared expert, whose
    sigmoid ``gain`` multiplies its result; ``scale`` is a number in its place."""

    route: Route
    first: Product
    second: Product
    pair: Gate
    down: Product
    residual: Add
    experts: Experts
    total: Add
    gate: Product | None = None
    gain: Gate | None = None
    scale: Scale | None = None

    @classmethod
    def of(cls, ops: Sequence[Op]) -> _Beside:
        """As the rules below match them."""
        route, *shared, residual, experts, total = ops
        gate, gain, scale = None, None, None
        if shared[1].label != shared[0].label:
            gate, gain = shared.pop(0), shared.pop()
        if isinstance(shared[-1], Scale):
            scale = shared.pop()
        own = (route, *shared, residual, experts, total, gate, gain, scale)
        return cls(**dict(zip(cls.__slots__, own, strict=True)))  # type: ignore[arg-type]

    def is_connected(self, at: Lowering) -> bool:
        """Whether the shared expert is added to the stream before the experts are, and nothing
        else reads what no launch would make."""
        x = self.route.x
        products = [op for op in (self.gate, self.first, self.second) if op is not None]
        made: list[Op] = [*products, self.route, self.pair, self.down, self.residual, self.experts]
        made += [op for op in (self.gain, self.scale) if op is not None]
        return (
            all(op.x is x and op.low is None for op in products)
            and self.down.low is None
            and self.experts.x is x
            and self.experts.room is None
            and (self.pair.gate, self.pair.x) == (self.first.y, self.second.y)
            and self.down.x is self.pair.y
            and self._is_weighed(at)
            and (self.experts.routing, self.total.a) == (self.route.y, self.residual.y)
            and self.total.b is self.experts.y
            and all(len(at.readers(op.y)) == 1 for op in made)
        )

    def _is_weighed(self, at: Lowering) -> bool:
        """Whether the result is weighted as a slot may be, before it is added."""
        made, of = self.residual.b, self.down.y
        if self.scale is not None:
            return self.gate is None and made is self.scale.y and self.scale.x is of
        if self.gate is None or self.gain is None:
            return made is of
        gated = (self.gain.gate, self.gain.x) == (self.gate.y, of) and made is self.gain.y
        return gated and self.gate.y.width == 1 and self.gain.f == Activation("sigmoid")

    @property
    def factor(self) -> float:
        """The number that the result is multiplied with."""
        return 1.0 if self.scale is None else self.scale.factor


def lower_shared_expert(at: Lowering, ops: Sequence[Op]) -> bool:
    """y = residual + w shared(x) + the sum of the chosen experts, of one row: the shared expert is
    further slots of the experts' products. w is a number, or the sigmoid of g x: then products
    choose by logits, and g is one row more of the router.

    A shared expert whose last matrix is of another type than theirs has a launch for that.
    """
    of = _Beside.of(ops)
    if of.route.x.rows > 1 or of.route.y in at.parted or not of.is_connected(at):
        return False
    route, chooses = of.route, products_choose(at, of.route)
    norm = at.unmade.get(route.x)
    x, layer = before_norm(at, route.x, norm)
    router, mixture = RouterLayer.of(at, route), _with_shared(at, of)
    alone = is_one_launch(at, route, router, layer)
    gate = None if of.gate is None else at.matrix(of.gate.of)
    if gate is not None and not (chooses and alone and _is_row(gate)):
        return False
    if mixture is None or mixture.shared is None:
        return False
    label, before, y = of.experts.label, at.place(of.residual.a), at.place(of.total.y)
    call = MixtureCall(label, mixture, x, layer, before, y, at.rows.position)
    chosen = replace(call, router=router.unselected) if chooses and alone else call
    if not PerRow(at, 1).takes(chosen):
        return False
    append_router(at, route, norm, not chooses, gate)
    call = replace(call, router=at.unselected.get(route.y))
    products = PerRow(at, 1)
    products.append_first(call)
    if mixture.shared.down is None:
        _append_down(at, of, mixture)
        call = replace(call, residual=at.place(of.residual.y))
    products.append_last(call)
    return True


def _append_down(at: Lowering, of: _Beside, mixture: MixtureLayer) -> None:
    """The last product of a shared expert, from what the first products have left for it."""
    offset, down = 4 * mixture.selection.used * mixture.width, of.down
    at.move(of.pair.y, at.work["expert gate"].slice(offset, of.pair.y.nbytes))
    ends, y = Scaled.by(of.factor), of.residual.y
    chain = Chain(of.pair.y, products=[down], ends=ends, residual=of.residual, results=[y])
    assert lower_chain(at, chain)


def _is_row(gate: Matrix) -> bool:
    """Whether a router's launch takes a gate."""
    return gate.format.name == "F32" and gate.bias is None


def _with_shared(at: Lowering, of: _Beside) -> MixtureLayer | None:
    """The experts with the shared one, None if products cannot take these together."""
    mixture = MixtureLayer.of(at, of.experts)
    cached = at.parts.weights.expert_caches.get(of.experts.up.matrix) is not None
    if cached or mixture.gate is None or not alike(mixture.gate, mixture.up):
        return None
    if of.pair.f != mixture.activation:
        return None
    weighs = of.gate is not None or of.factor != 1.0
    if weighs and mixture.weigh_input:
        return None
    first, second, down = (at.matrix(product.of) for product in (of.first, of.second, of.down))
    slots, count, width = first.rows // mixture.width, mixture.held, mixture.width
    own = ((first, mixture.gate), (second, mixture.up))
    sizes = (slots * width, mixture.up.cols)
    if not slots or not all(_goes_with(*matrices, count, sizes) for matrices in own):
        return None
    last = _goes_with(down, mixture.down, count, (mixture.hidden, slots * width))
    if not last and of.gate is not None:
        return None
    gated = of.gate is not None
    shared = SharedLayer(first, second, down if last else None, slots, of.factor, gated)
    return replace(mixture, shared=shared)


def _goes_with(matrix: Matrix, experts: Matrix, count: int, sizes: tuple[int, int]) -> bool:
    """Whether a matrix has these sizes and the type of the ``count`` experts'."""
    whole = not matrix.is_partial and not experts.is_partial
    no_bias = matrix.bias is None and experts.bias is None
    same = matrix.format == experts.format and (matrix.rows, matrix.cols) == sizes
    return same and whole and no_bias


_SHARED = "product beside gate product"
RULES: Sequence[Rule] = (
    Rule(f"route product {_SHARED} gate add experts add", lower_shared_expert),
    Rule(f"route {_SHARED} scale add experts add", lower_shared_expert),
    Rule(f"route {_SHARED} add experts add", lower_shared_expert),
)
