"""A rule for mixtures whose shared expert stands beside those that a row chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from urdir.model.graph.experts import Experts, Route
from urdir.model.graph.op import Op
from urdir.model.graph.ops import Add, Gate, Product
from urdir.model.lower.experts.layer import MixtureLayer, RouterLayer, SharedLayer
from urdir.model.lower.experts.per_row import PerRow
from urdir.model.lower.experts.products import MixtureCall
from urdir.model.lower.lowering import Lowering
from urdir.model.lower.norms import before_norm
from urdir.model.lower.requests import alike
from urdir.model.lower.router import append_router, is_one_launch, products_choose
from urdir.model.lower.rule import Rule
from urdir.model.memory.weights import Matrix
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.experts.selection import MAX_USED


def lower_shared_expert(at: Lowering, ops: Sequence[Op]) -> bool:
    """y = residual + sigmoid(g x) shared(x) + the sum of the chosen experts, of one row that
    chooses by logits: the shared expert is one slot more of the experts' products, and g one row
    more of the router."""
    route, *_, residual, experts, total = ops
    assert isinstance(route, Route)
    assert isinstance(residual, Add)
    assert isinstance(experts, Experts)
    assert isinstance(total, Add)
    _, gate_of, *_ = ops
    assert isinstance(gate_of, Product)
    if route.x.rows > 1 or route.y in at.parted or not _are_connected(at, ops):
        return False
    mixture = _with_shared(at, ops)
    norm = at.unmade.get(route.x)
    x, layer = before_norm(at, route.x, norm)
    router, gate = RouterLayer.of(at, route), at.matrix(gate_of.of)
    if mixture is None or gate.format.name != "F32" or gate.bias is not None:
        return False
    if not products_choose(at, route) or not is_one_launch(at, route, router, layer):
        return False
    append_router(at, route, norm, False, gate)
    before, y, position = at.place(residual.a), at.place(total.y), at.rows.position
    call = MixtureCall(experts.label, mixture, x, layer, before, y, position)
    PerRow(at, 1).append(replace(call, selection=router.selection))
    return True


def _are_connected(at: Lowering, ops: Sequence[Op]) -> bool:
    """Whether a gated shared expert is added to the stream before the experts are, and nothing else
    reads what no launch would make."""
    route, gate_of, first, second, pair, down, gain, residual, experts, total = ops
    products = (gate_of, first, second, down)
    assert isinstance(route, Route)
    assert isinstance(pair, Gate)
    assert isinstance(gain, Gate)
    assert isinstance(residual, Add)
    assert isinstance(experts, Experts)
    assert isinstance(total, Add)
    x, made = route.x, [op.y for op in ops[:-1]]
    reads = [op.x for op in products if isinstance(op, Product) and op.low is None]
    return (
        reads == [x, x, x, pair.y]
        and experts.x is x
        and (pair.gate, pair.x) == (first.y, second.y)
        and (gain.gate, gain.x, residual.b) == (gate_of.y, down.y, gain.y)
        and (gate_of.y.width, gain.f) == (1, Activation("sigmoid"))
        and (experts.routing, total.a, total.b) == (route.y, residual.y, experts.y)
        and all(len(at.readers(tensor)) == 1 for tensor in made)
    )


def _with_shared(at: Lowering, ops: Sequence[Op]) -> MixtureLayer | None:
    """The experts with the shared one, None if products cannot take these together."""
    _, _, first, second, pair, down, _, _, experts, _ = ops
    assert isinstance(first, Product)
    assert isinstance(second, Product)
    assert isinstance(pair, Gate)
    assert isinstance(down, Product)
    assert isinstance(experts, Experts)
    mixture = MixtureLayer.of(at, experts)
    cached = at.parts.weights.expert_caches.get(experts.up.matrix) is not None
    if cached or mixture.gate is None or not alike(mixture.gate, mixture.up):
        return None
    if pair.f != mixture.activation or mixture.selection.used >= MAX_USED:
        return None
    shared = SharedLayer(at.matrix(first.of), at.matrix(second.of), at.matrix(down.of))
    own = ((shared.gate, mixture.gate), (shared.up, mixture.up), (shared.down, mixture.down))
    if not all(_is_one_of(*matrices, mixture.held) for matrices in own):
        return None
    return replace(mixture, shared=shared)


def _is_one_of(matrix: Matrix, experts: Matrix, count: int) -> bool:
    """Whether a matrix is as one of the ``count`` experts'."""
    shape = (experts.format, experts.rows // count, experts.cols)
    whole = not matrix.is_partial and not experts.is_partial
    no_bias = matrix.bias is None and experts.bias is None
    return (matrix.format, matrix.rows, matrix.cols) == shape and whole and no_bias


RULES: Sequence[Rule] = (
    Rule(
        "route product product beside gate product gate add experts add",
        lower_shared_expert,
    ),
)
