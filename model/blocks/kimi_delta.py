"""Kimi Delta Attention as a network: the delta rule with a gate for each key of a head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from urdir.model.blocks.activations import Activations
from urdir.model.blocks.parts import Destination, LayerStep
from urdir.model.blocks.recurrent import SILU, gated_heads
from urdir.model.blocks.states import convolution, launch_heads, recurrent_state
from urdir.model.families.recurrent import KimiDelta
from urdir.model.memory.norms import NormLayer
from urdir.ptxgen.kernels.activation import Activation

if TYPE_CHECKING:
    from urdir.driver.memory import Slice


def append_kimi_delta(
    at: LayerStep, mixer: KimiDelta, x: Activations, norm: NormLayer | None, to: Destination
) -> Activations:
    """o (norm(recurrence) * sigmoid(gate x')), x' being the norm of x; see `KimiDelta`."""
    y = at.work["heads"]
    _append_products(at, mixer, x, norm)
    state = recurrent_state(at)
    for name, part in mixer.parts.items():
        mixed, convolved = at.work[f"mixed {name}"], at.work[f"convolved {name}"]
        label, tail = f"ssm_conv1d_{name}", state[f"tail {name}"]
        convolution(at, label, part.conv, SILU, tail, convolved).append(at, mixed)
    _append_rule(at, mixer, y)
    weight = mixer.norm.weight
    assert weight is not None
    eps, f = mixer.norm.norm.eps, Activation("sigmoid")
    made = gated_heads(at, y, mixer.heads * mixer.dim, weight, eps, f)
    return at.finish("ssm_out", at.matrix(mixer.o), made, to)


def _append_products(
    at: LayerStep, mixer: KimiDelta, x: Activations, norm: NormLayer | None
) -> None:
    """All that is made of x; decays and gates of few values after these."""
    work = at.work
    products = [(part.linear, work[f"mixed {name}"]) for name, part in mixer.parts.items()]
    products.append((mixer.beta, work["beta"]))
    low = []
    for label, of, few, name, to in (
        ("ssm_f_b", mixer.decay, mixer.decay_low, "low", "alpha"),
        ("ssm_g_b", mixer.gate, mixer.gate_low, "gate low", "recurrent gate"),
    ):
        if few is None:
            products.append((of, work[to]))
        else:
            products.append((few, work[name]))
            low.append((label, of, work[name], work[to]))
    at.append_products("ssm_in", products, x, norm)
    for label, of, source, result in low:
        at.linear.append(at.name(label), [(at.matrix(of), result)], Activations(source))


def _append_rule(at: LayerStep, mixer: KimiDelta, y: Slice) -> None:
    launch_heads(
        at,
        "ssm_scan",
        mixer,
        alpha=at.work["alpha"],
        beta=at.work["beta"],
        a=at.vector(mixer.a),
        dt_bias=at.vector(mixer.dt_bias),
        y=y,
        **{f"{name}_heads": at.work[f"convolved {name}"] for name in mixer.parts},
    )
