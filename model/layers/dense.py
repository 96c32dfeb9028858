"""Feed-forward networks of a layer as operations; mixtures are in `moe`."""

from __future__ import annotations

from urdir.model.families.feed_forward import Dense
from urdir.model.families.stored import Linear
from urdir.model.graph.altup import Sparsify
from urdir.model.graph.ops import Activate, Gate
from urdir.model.graph.tensor import BRANCH, Tensor
from urdir.model.layers.builder import LayerOps
from urdir.ptxgen.kernels.activation import Activation


def dense(
    at: LayerOps, network: Dense, x: Tensor, scale: float, suffix: str = "", name: str = BRANCH
) -> Tensor:
    """scale * down(f(gate x) * up x); ``suffix`` ends the labels. The result is
    called ``name``."""
    label = f"ffn_{'up' if network.gate is None else 'gate_up'}{suffix}"
    inner = Tensor("activated", x.rows, network.width)
    activation = at.name(f"{label}.activation")
    if network.gate is not None:
        gate = at.product(label, x, network.gate, "gate")
        up = at.product(label, x, network.up, "up")
        if network.deviations is not None:
            y = Tensor("sparse gate", gate.rows, gate.width)
            gate = at.graph.add(Sparsify(at.name("ffn_gate.sparse"), y, gate, network.deviations))
        at.graph.add(Gate(activation, inner, gate, up, network.activation))
    else:
        up = at.product(label, x, network.up, "activated")
        at.graph.add(Activate(activation, inner, up, network.activation, network.divisors))
    inner = at.norm(f"ffn_sub_norm{suffix}", inner, network.norm, "normed inner")
    return at.finish(f"ffn_down{suffix}", inner, network.down, scale, name)


def linear(at: LayerOps, network: Linear, x: Tensor, scale: float) -> Tensor:
    """A matrix as a network (Deci)."""
    return at.finish("linear", x, network, scale)


def activation(at: LayerOps, f: Activation, x: Tensor, scale: float) -> Tensor:
    """An activation as a network (Refact and ERNIE, as llama.cpp runs them)."""
    y = Tensor(BRANCH, x.rows, x.width)
    made = at.graph.add(Activate(at.name("ffn_activation"), y, x, f))
    return at.scale("sum", made, scale)
