"""Mixtures of experts with router and shared network, as launches appended to a plan."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from urdir.model.blocks.activations import Activations
from urdir.model.blocks.expert_products import MixtureCall
from urdir.model.blocks.experts import append_experts
from urdir.model.blocks.feed_forward import append_dense
from urdir.model.blocks.mixtures import MixtureLayer, RouterLayer
from urdir.model.blocks.parts import Destination, LayerStep
from urdir.model.blocks.router import append_router
from urdir.model.families.feed_forward import Dense, Mixture, Router
from urdir.model.memory.norms import NormLayer
from urdir.ptxgen.kernels.activate import Activate
from urdir.ptxgen.kernels.activation import Activation

if TYPE_CHECKING:
    from urdir.driver.memory import Slice


def append_mixture(
    at: LayerStep,
    network: Mixture,
    x: Activations,
    norm: NormLayer | None,
    start: Slice,
    to: Destination,
) -> Activations:
    """The weighted sum of the chosen experts, and the shared network's result; ``start`` is the
    layer's input, which some routers read."""
    # a weight within the network is no factor of its result
    assert not (network.weigh_input and to.scale != 1.0)
    linear, route, latent = at.linear, network.router, network.latent
    router = _router(at, route, 1.0 if network.weigh_input or latent else to.scale)
    label = at.name("ffn_gate_inp")
    match route.reads:
        case "layer":
            append_router(linear, label, router, Activations(start), None)
        case "norm":
            append_router(linear, label, router, Activations(x.x), at.norm(route.norm))
    if norm is not None and linear.takes_gemm and not x.has_completed(norm):
        normed, cols = at.work["normed"], at.parts.config.hidden
        x = linear.append_norm(at.name("ffn_norm"), cols, x, norm, normed)
    if route.reads == "input":
        append_router(linear, label, router, x, norm)
    residual = to.residual
    if network.shared is not None:
        residual = _append_shared(at, network, network.shared, x, norm, to)
    mixture = MixtureLayer(
        router.selection,
        at.matrix(network.up),
        at.matrix(network.down),
        None if network.gate is None else at.matrix(network.gate),
        network.activation,
        network.weigh_input,
    )
    label = at.name("ffn_experts")
    if latent is None:
        return _append_experts(at, MixtureCall(label, mixture, x, norm, residual, to.y))
    source, total = at.work["expert input"], at.work["expert sum"]
    linear.append(at.name("ffn_routed_down"), [(at.matrix(latent.down), source)], x, norm)
    call = MixtureCall(label, mixture, Activations(source), None, None, total)
    _append_experts(at, call)
    if (after := at.norm(latent.norm)) is not None:
        name, width = at.name("ffn_routed_norm"), network.result_width
        linear.append_norm(name, width, Activations(total), after, total)
    end = replace(to, residual=residual)
    return at.finish("ffn_routed_up", at.matrix(latent.up), Activations(total), end)


def _append_experts(at: LayerStep, call: MixtureCall) -> Activations:
    """The experts, of all ranks' parts of them."""
    if not call.mixture.down.is_partial:
        return append_experts(at.linear, call)
    own = call.y if call.residual is None else at.work["delta"]  # y may be wider than the stream
    append_experts(at.linear, replace(call, residual=None, y=own))
    at.add_ranks(call.label, call.mixture.hidden, own, call.y, call.residual)
    return Activations(call.y)


def _append_shared(
    at: LayerStep,
    network: Mixture,
    shared: Dense,
    x: Activations,
    norm: NormLayer | None,
    to: Destination,
) -> Slice:
    """The residual plus the shared network's result, in a buffer of the stream."""
    used = (x.x, to.y) if to.residual is None else (x.x, to.y, to.residual)
    total = Destination(at.free(*used), to.residual, None, to.scale)
    if network.shared_gate is None:
        return at.linear.complete(append_dense(at, shared, x, norm, total, "_shexp")).x
    gate, own = at.work["shared gate"], at.work["branch"]
    label = at.name("ffn_gate_inp_shexp")
    at.linear.append(label, [(at.matrix(network.shared_gate), gate)], x, norm)
    if at.linear.gains(at.matrix(shared.down)):
        return append_dense(at, shared, x, norm, replace(total, gain=gate), "_shexp").x
    append_dense(at, shared, x, norm, Destination(own, None, None, to.scale), "_shexp")
    hidden = at.parts.config.hidden
    kernel = Activate(
        at.rows.count * hidden,
        Activation("sigmoid"),
        gated=True,
        group=hidden,
        added=to.residual is not None,
    )
    added = {} if to.residual is None else {"added": to.residual}
    at.plan.launch(kernel, f"{label}.activation", gate=gate, up=own, y=total.y, **added)
    return total.y


def _router(at: LayerStep, of: Router, scale: float) -> RouterLayer:
    """A router whose weights are also multiplied with ``scale``."""
    return RouterLayer(
        replace(of.selection, scale=of.scale * scale),
        at.matrix(of.linear),
        None if of.choice_bias is None else at.vector(of.choice_bias),
        None if of.expert_scale is None else at.vector(of.expert_scale),
        of.norm_scale,
    )
