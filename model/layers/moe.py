"""Mixtures of experts with router and shared network, as operations."""

from __future__ import annotations

from urdir.model.families.feed_forward import Dense, Mixture
from urdir.model.families.stored import Normalization
from urdir.model.graph.experts import Experts, Route
from urdir.model.graph.ops import Add, Gate, Norm
from urdir.model.graph.tensor import BRANCH, PART, STREAM, Tensor
from urdir.model.layers.builder import LayerOps
from urdir.model.layers.dense import dense
from urdir.ptxgen.kernels.activation import Activation


def mixture(
    at: LayerOps,
    network: Mixture,
    stream: Tensor,
    norm: Normalization | None,
    start: Tensor,
    scale: float,
) -> Tensor:
    """scale * the weighted sum of the chosen experts of the norm of ``stream``.

    The shared network's result is added to the residual before. ``start`` is the layer's input,
    which some routers read.
    """
    route, latent = network.router, network.latent
    # a weight inside the network does not multiply its result
    assert not (network.weigh_input and scale != 1.0)
    weighted = 1.0 if network.weigh_input or latent else scale

    def choose(source: Tensor) -> Route:
        y = Tensor("routing", source.rows, route.experts)
        return Route(at.name("ffn_gate_inp"), y, source, route, weighted)

    chosen: Route | None = None
    match route.reads:
        case "layer":
            at.graph.add(chosen := choose(start))
        case "norm":
            at.graph.add(chosen := choose(at.norm("ffn_gate_inp.norm", stream, route.norm)))
    x = at.norm("ffn_norm", stream, norm)
    if chosen is None:
        at.graph.add(chosen := choose(x))
    if network.shared is not None:
        at.residual = _shared(at, network, network.shared, x, scale)
    label = "ffn_experts"
    if network.chunks is not None:
        assert scale == 1.0
        return _with_chunks(at, network, network.chunks, x, chosen)
    if latent is None:
        return _experts(at, label, network, x, chosen)
    source = at.product("ffn_routed_down", x, latent.down, "expert input")
    total = _experts(at, label, network, source, chosen, "expert sum")
    if latent.norm is not None:
        y = Tensor(total.name, total.rows, total.width)
        total = at.graph.add(Norm(at.name("ffn_routed_norm"), y, total, latent.norm))
    return at.finish("ffn_routed_up", total, latent.up, scale)


def _with_chunks(
    at: LayerOps, network: Mixture, chunks: Mixture, x: Tensor, chosen: Route
) -> Tensor:
    """y + scale * chunks(y), y being the sum of the experts."""
    total = _experts(at, "ffn_experts", network, x, chosen, "expert sum")
    routing = Tensor("routing", x.rows, chunks.router.experts)
    label, scale = "ffn_chunk_experts", network.chunk_scale
    route = Route(at.name("ffn_gate_inp.chunks"), routing, x, chunks.router, scale)
    at.graph.add(route)
    more = _experts(at, label, chunks, total, route, "chunk sum")
    y = Tensor(BRANCH, x.rows, total.width)
    return at.graph.add(Add(at.name(f"{label}.sum"), y, total, more))


def _experts(
    at: LayerOps, label: str, network: Mixture, x: Tensor, chosen: Route, name: str = BRANCH
) -> Tensor:
    """The experts, of all ranks' parts of them."""
    partial = network.down.matrix.columns is not None
    own = PART if partial and name == BRANCH else name
    y = Tensor(own, x.rows, network.result_width)
    made = at.graph.add(
        Experts(
            at.name(label),
            y,
            x,
            chosen.y,
            chosen.of_networks,
            network.up,
            network.down,
            network.gate,
            network.activation,
            network.weigh_input,
        )
    )
    return at.add_ranks(label, made, name) if partial else made


def _shared(at: LayerOps, network: Mixture, shared: Dense, x: Tensor, scale: float) -> Tensor:
    """The residual plus the shared network's result."""
    # the sum of a first part goes on in a place of its own
    name = STREAM if at.residual is None else BRANCH
    if network.shared_gate is None:
        made = dense(at, shared, x, scale, "_shexp", name)
    else:
        label = "ffn_gate_inp_shexp"
        gate = at.product(label, x, network.shared_gate, "shared gate")
        own = dense(at, shared, x, scale, "_shexp")
        y, f = Tensor(name, x.rows, own.width), Activation("sigmoid")
        made = at.graph.add(Gate(at.name(f"{label}.activation"), y, gate, own, f))
    return made if at.residual is None else at.add("ffn_down_shexp.residual", at.residual, made)
