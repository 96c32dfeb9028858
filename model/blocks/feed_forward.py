"""Feed-forward networks of a layer, dense and mixtures, as launches appended to a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from urdir.model.blocks.linear import Activations
from urdir.model.blocks.parts import Destination, LayerStep
from urdir.model.families.description import Dense, Mixture
from urdir.model.memory.norms import NormLayer
from urdir.ptxgen.kernels.activate import Activate

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
    up, activated = at.matrix(network.up), at.work["activated"]
    if network.gate is not None:
        gate, label = at.matrix(network.gate), at.name(f"ffn_gate_up{suffix}")
        at.linear.append_gated(label, gate, up, x, norm, activated, network.activation)
    else:
        label, f = at.name(f"ffn_up{suffix}"), network.activation
        by = network.divisors
        at.linear.append(label, [(up, activated)], x, norm, f if by is None else None)
        if by is not None:
            kernel = Activate(at.rows.count * up.rows, f, width=up.rows)
            label = f"{label}.activation"
            at.plan.launch(kernel, label, x=activated, by=at.vector(by), y=activated)
    return at.finish(f"ffn_down{suffix}", at.matrix(network.down), activated, to)


def append_mixture(
    at: LayerStep,
    network: Mixture,
    x: Activations,
    norm: NormLayer | None,
    start: Slice,
    to: Destination,
) -> Activations:
    """The weighted sum of the chosen experts, and the shared network's result."""
    raise NotImplementedError
