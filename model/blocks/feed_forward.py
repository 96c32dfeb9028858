"""Feed-forward networks of a layer but for mixtures, as launches appended to a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from urdir.model.blocks.activations import Activations
from urdir.model.blocks.parts import Destination, LayerStep
from urdir.model.families.feed_forward import Dense
from urdir.model.families.stored import Linear
from urdir.model.memory.norms import NormLayer
from urdir.ptxgen.kernels.activate import Activate
from urdir.ptxgen.kernels.activation import Activation

if TYPE_CHECKING:
    from urdir.driver.memory import Slice


def append_dense(
    at: LayerStep,
    network: Dense,
    x: Activations,
    norm: NormLayer | None,
    to: Destination,
    suffix: str = "",
) -> Activations:
    """down(f(gate x') * up x'), x' being the norm of x; ``suffix`` ends the labels."""
    up, down, y = at.matrix(network.up), at.matrix(network.down), at.work["activated"]
    gate, f = None if network.gate is None else at.matrix(network.gate), network.activation
    label = at.name(f"ffn_{'up' if gate is None else 'gate_up'}{suffix}")
    if network.divisors is None:
        inner = at.linear.append_inner(label, gate, up, x, norm, y, f, down)
    else:
        at.linear.append(label, [(up, y)], x, norm)
        kernel = Activate(at.rows.count * up.rows, f, width=up.rows)
        by = at.vector(network.divisors)
        at.plan.launch(kernel, f"{label}.activation", x=y, by=by, y=y)
        inner = Activations(y)
    return at.finish(f"ffn_down{suffix}", down, inner, to)


def append_linear(
    at: LayerStep, network: Linear, x: Activations, norm: NormLayer | None, to: Destination
) -> Activations:
    """A matrix in the place of a network (Deci)."""
    product = to.y if to.residual is None else at.work["branch"]
    label, matrix = at.name("linear"), at.matrix(network)
    at.linear.append(label, [(matrix, product)], x, norm, scale=to.scale)
    return _sum(at, product, to, 1.0)


def append_activation(
    at: LayerStep, f: Activation, x: Activations, norm: NormLayer | None, to: Destination
) -> Activations:
    """An activation in the place of a network (Refact and ERNIE, as llama.cpp runs them)."""
    hidden, source = at.parts.config.hidden, x.x
    if norm is not None:
        made = at.linear.append_norm(at.name("ffn_norm"), hidden, x, norm, at.work["normed"])
        source = made.normed or source
    product = to.y if to.residual is None else at.work["branch"]
    kernel = Activate(at.rows.count * hidden, f)
    at.plan.launch(kernel, at.name("ffn_activation"), x=source, y=product)
    return _sum(at, product, to, to.scale)


def _sum(at: LayerStep, product: Slice, to: Destination, scale: float) -> Activations:
    """The residual plus scale * a product, where there is a residual."""
    if to.residual is None:
        return Activations(product)
    hidden = at.parts.config.hidden
    return at.linear.append_sum(at.name("sum"), hidden, to.residual, product, to.y, scale)
