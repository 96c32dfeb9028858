"""Mixers with a state as networks: their products, the convolution, the recurrence, the gate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from urdir.model.blocks.linear import Activations
from urdir.model.blocks.parts import Destination, LayerStep
from urdir.model.blocks.rows import Rows
from urdir.model.families.recurrent import Convolution, Recurrence, Recurrent, ShortConv
from urdir.model.families.rules import rule_of
from urdir.model.memory.chunk_workspace import chunk_buffer
from urdir.model.memory.norms import NormLayer
from urdir.ptxgen.kernels.activate import Activate
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.recurrent.causal_conv import CausalConv
from urdir.ptxgen.kernels.recurrent.choice import recurrences
from urdir.ptxgen.kernels.recurrent.gated_norm import GatedNorm
from urdir.ptxgen.kernels.recurrent.rows import RecurrentRows

if TYPE_CHECKING:
    from urdir.driver.memory import Slice

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
    _append_conv(at, "shortconv.conv", mixer.conv, None, y, **gates)
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
    at.append_products("ssm_in", products, x, norm)
    _append_conv(at, "ssm_conv1d", mixer.conv, SILU, work["convolved"])
    _append_scan(at, mixer, y)
    _append_gate(at, mixer, y)
    return at.finish("ssm_out", at.matrix(mixer.o), Activations(y), to)


def _append_conv(
    at: LayerStep,
    label: str,
    conv: Convolution,
    activation: Activation | None,
    y: Slice,
    **gates: Slice,
) -> None:
    """The convolution of ``work["mixed"]``, between gates where they are given."""
    mixed, tail = at.work["mixed"], recurrent_state(at)["tail"]
    append_convolution(at, label, conv, activation, mixed, tail, y, **gates)


def append_convolution(
    at: LayerStep,
    label: str,
    conv: Convolution,
    activation: Activation | None,
    x: Slice,
    tail: Slice,
    y: Slice,
    **gates: Slice,
) -> None:
    """y = the convolution of x, whose last values are in ``tail``; between gates where they are
    given."""
    kernel = partial(
        CausalConv,
        channels=conv.channels,
        taps=conv.taps,
        bias=conv.bias is not None,
        activation=activation,
        gated=bool(gates),
    )
    bias = {} if conv.bias is None else {"bias": at.vector(conv.bias)}
    launch_recurrent(
        at,
        label,
        kernel,
        x=x,
        weight=at.vector(conv.weight),
        tail=tail,
        y=y,
        **bias,
        **gates,
    )


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


def _append_gate(at: LayerStep, mixer: Recurrence, y: Slice) -> None:
    """norm(y) * silu(gate), or norm(y * silu(gate)), in place."""
    if mixer.norm is None:
        append_silu(at, mixer.width, y)
        return
    weight, eps = mixer.norm.weight, mixer.norm.norm.eps
    assert weight is not None
    cols = weight.shape[-1]
    rows = at.rows.count * mixer.width // cols
    kernel = GatedNorm(rows, cols, eps, weight.size // cols, mixer.gates_first)
    gate = at.work["recurrent gate"]
    at.plan.launch(kernel, at.name("ssm_norm"), x=y, gate=gate, weight=at.vector(weight), y=y)


def append_silu(at: LayerStep, width: int, y: Slice) -> None:
    """y * silu(gate) in place."""
    kernel = Activate(at.rows.count * width, SILU, gated=True)
    at.plan.launch(kernel, at.name("ssm_gate"), gate=at.work["recurrent gate"], up=y, y=y)


def launch_recurrent(
    at: LayerStep, label: str, kernel: Callable[..., RecurrentRows], **arguments: Slice
) -> None:
    """A kernel over the states, to which all but the rows is given. Rows of prompts and others are
    launches of their own."""
    for start, rows in at.rows.parts:
        _launch_on(at, label, kernel(**_shape(at, rows)), start, rows, arguments)


def launch_heads(at: LayerStep, label: str, mixer: Recurrent, **arguments: Slice) -> None:
    """The mixer's recurrence of heads, whose state follows from the layer."""
    rule = rule_of(mixer)
    assert rule is not None
    target, exact = at.parts.device.native_target, at.parts.exact
    arguments["state"] = recurrent_state(at)["state"]
    for start, rows in at.rows.parts:
        kernels = recurrences(target, exact=exact, **_shape(at, rows), **rule)
        for kernel in kernels:
            own = label if kernel is kernels[-1] else f"{label}.{kernel.name}"
            _launch_on(at, own, kernel, start, rows, arguments)


def _shape(at: LayerStep, rows: Rows) -> dict[str, int]:
    """Fields of `RecurrentRows`."""
    shape = at.parts.cache.shape
    return {
        "rows": rows.count,
        "sequences": shape.sequences,
        "max_len": shape.max_len,
        "segments": rows.segments,
    }


def _launch_on(
    at: LayerStep,
    label: str,
    kernel: RecurrentRows,
    start: int,
    rows: Rows,
    arguments: Mapping[str, Slice],
) -> None:
    """A kernel on ``rows``, the first of which is row ``start`` of the step."""
    given = {**rows.recurrent_arguments, **arguments}
    for param in kernel.params:
        name = param.name
        if param.shape[0] == "rows" and name in arguments:
            nbytes = kernel.nbytes(param)
            given[name] = arguments[name].slice(start * nbytes // rows.count, nbytes)
        elif param.shape[0] == "slots":
            given[name] = at.work[chunk_buffer(name)]
    taken = {param.name: given[param.name] for param in kernel.params}
    at.plan.launch(kernel, at.name(label) + (".prompts" if start else ""), **taken)


def recurrent_state(at: LayerStep) -> dict[str, Slice]:
    """The layer's states, by name."""
    assert at.parts.recurrent is not None
    return at.parts.recurrent.arguments(at.index)
