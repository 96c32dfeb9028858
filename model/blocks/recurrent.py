"""Mixers with a state as networks: their products, the convolution, the recurrence, the gate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from urdir.model.blocks.activations import Activations, DueGate
from urdir.model.blocks.parts import Destination, LayerStep
from urdir.model.blocks.states import convolution, launch_heads, recurrent_state
from urdir.model.families.recurrent import Recurrence, ShortConv
from urdir.model.memory.norms import NormLayer
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.linear.prologue.gate import Gate
from urdir.ptxgen.kernels.recurrent.gated_norm import GatedNorm

if TYPE_CHECKING:
    from urdir.driver.memory import Slice
    from urdir.model.families.stored import StoredVector

SILU = Activation("silu")


def append_short_conv(
    at: LayerStep, mixer: ShortConv, x: Activations, norm: NormLayer | None, to: Destination
) -> Activations:
    """o (output_gate x' * conv(input_gate x' * values x')), x' being the norm of x."""
    work, y = at.work, at.work["heads"]
    products = [
        (at.matrix(mixer.values), work["mixed"]),
        (at.matrix(mixer.input_gate), work["input gate"]),
        (at.matrix(mixer.output_gate), work["recurrent gate"]),
    ]
    at.linear.append(at.name("shortconv.in_proj"), products, x, norm)
    gates = {"input_gate": work["input gate"], "output_gate": work["recurrent gate"]}
    tail = recurrent_state(at)["tail"]
    convolution(at, "shortconv.conv", mixer.conv, None, tail, y, **gates).append(at, work["mixed"])
    return at.finish("shortconv.out_proj", at.matrix(mixer.o), Activations(y), to)


def append_recurrence(
    at: LayerStep, mixer: Recurrence, x: Activations, norm: NormLayer | None, to: Destination
) -> Activations:
    """o (f(recurrence(silu(conv(mixed x')), alpha x', beta x'), gate x'))."""
    # the convolution has read it by then, and attention of the same layer has the heads
    work, y = at.work, at.work["mixed"]
    wanted = [
        *((mixer.mixed, "mixed"), (mixer.gate, "recurrent gate")),
        *((mixer.alpha, "alpha"), (mixer.beta, "beta")),
    ]
    products = [(of, work[name]) for of, name in wanted if of is not None]
    conv = convolution(
        at, "ssm_conv1d", mixer.conv, SILU, recurrent_state(at)["tail"], work["convolved"]
    )
    if not at.append_products("ssm_in", products, x, norm, conv.following(at)):
        conv.append(at, work["mixed"])
    _append_scan(at, mixer, y)
    return at.finish("ssm_out", at.matrix(mixer.o), _gated(at, mixer, y), to)


def _append_scan(at: LayerStep, mixer: Recurrence, y: Slice) -> None:
    given = {"beta": at.work["beta"]} if mixer.beta is not None else {}
    given |= {"skip": at.vector(mixer.skip)} if mixer.skip is not None else {}
    launch_heads(
        at,
        "ssm_scan",
        mixer,
        mixed=at.work["convolved"],
        alpha=at.work["alpha"],
        a=at.vector(mixer.a),
        dt_bias=at.vector(mixer.dt_bias),
        y=y,
        **given,
    )


def _gated(at: LayerStep, mixer: Recurrence, y: Slice) -> Activations:
    """norm(y) * silu(gate), or norm(y * silu(gate)), in place."""
    if mixer.norm is None:
        return gated_by_silu(at, y, mixer.width)
    weight, eps = mixer.norm.weight, mixer.norm.norm.eps
    assert weight is not None
    cols = weight.shape[-1]
    if weight.size == cols and not mixer.gates_first:
        return gated_heads(at, y, mixer.width, weight, eps, SILU)
    rows, gate = at.rows.count * mixer.width // cols, at.work["recurrent gate"]
    kernel = GatedNorm(rows, cols, eps, weight.size // cols, mixer.gates_first)
    at.plan.launch(kernel, at.name("ssm_norm"), x=y, gate=gate, weight=at.vector(weight), y=y)
    return Activations(y)


def gated_heads(
    at: LayerStep, y: Slice, width: int, weight: StoredVector, eps: float, f: Activation
) -> Activations:
    """norm(y) * f(gate), of heads that have the same weights, in place: for the next product to do,
    where it can have such heads."""
    gate, label, of_head = at.work["recurrent gate"], at.name("ssm_norm"), at.vector(weight)
    if Gate.serves(weight.size):
        return Activations(y, gate=DueGate(label, width, Gate(f, weight.size, eps), gate, of_head))
    heads = at.rows.count * width // weight.size
    kernel = GatedNorm(heads, weight.size, eps, activation=f)
    at.plan.launch(kernel, label, x=y, gate=gate, weight=of_head, y=y)
    return Activations(y)


def gated_by_silu(at: LayerStep, y: Slice, width: int) -> Activations:
    """y * silu(gate), in place: for the next product to do."""
    gate = at.work["recurrent gate"]
    return Activations(y, gate=DueGate(at.name("ssm_gate"), width, Gate(SILU), gate))
