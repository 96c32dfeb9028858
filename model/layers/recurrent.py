"""Mixers with a state as operations: their products, the convolution, the recurrence, the gate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from urdir.model.families.recurrent import (
    Convolution,
    Decaying,
    KimiDelta,
    Lightning,
    Recurrence,
    Recurrent,
    Selective,
    ShortConv,
)
from urdir.model.families.stored import Linear, Normalization
from urdir.model.graph.ops import Activate, Gate, Norm
from urdir.model.graph.recurrent import Convolve, GatedNorm, Recur, Scan
from urdir.model.graph.tensor import Tensor
from urdir.model.layers.builder import LayerOps
from urdir.ptxgen.kernels.activation import Activation

SILU, SIGMOID = Activation("silu"), Activation("sigmoid")
#: What the gate of a result is called.
GATE = "recurrent gate"


def short_conv(
    at: LayerOps, mixer: ShortConv, x: Tensor, norm: Normalization | None, scale: float
) -> Tensor:
    """scale * o (output_gate x * conv(input_gate x * values x))."""
    x = at.norm("attn_norm", x, norm)
    label = "shortconv.in_proj"
    values = at.product(label, x, mixer.values, "mixed")
    before = at.product(label, x, mixer.input_gate, "input gate")
    after = at.product(label, x, mixer.output_gate, GATE)
    y = Tensor("heads", x.rows, values.width)
    label, conv = at.name("shortconv.conv"), mixer.conv
    op = Convolve(label, y, values, conv, None, at.index, "tail", before, after)
    return at.finish("shortconv.out_proj", at.graph.add(op), mixer.o, scale)


def recurrence(
    at: LayerOps, mixer: Recurrence, x: Tensor, norm: Normalization | None, scale: float
) -> Tensor:
    """scale * o (f(recurrence(silu(conv(mixed x)), alpha x, beta x), gate x))."""
    x = at.norm("attn_norm", x, norm)
    wanted = [("mixed", mixer.mixed), (GATE, mixer.gate), ("alpha", mixer.alpha)]
    wanted += [] if mixer.beta is None else [("beta", mixer.beta)]
    made = {name: at.product("ssm_in", x, of, name) for name, of in wanted}
    convolved = convolve(at, "ssm_conv1d", made["mixed"], mixer.conv, "convolved")
    inputs = {"mixed": convolved, "alpha": made["alpha"]}
    inputs |= {"beta": made["beta"]} if mixer.beta is not None else {}
    # the convolution has read it by then, and attention of the same layer has the heads
    y = recur(at, "ssm_scan", mixer, inputs, Tensor("mixed", x.rows, mixer.width))
    return at.finish("ssm_out", _gated(at, mixer, y, made[GATE]), mixer.o, scale)


def kimi_delta(
    at: LayerOps, mixer: KimiDelta, x: Tensor, norm: Normalization | None, scale: float
) -> Tensor:
    """scale * o (norm(recurrence) * sigmoid(gate x))."""
    x = at.norm("attn_norm", x, norm)
    wanted = [(f"mixed {name}", part.linear) for name, part in mixer.parts.items()]
    wanted.append(("beta", mixer.beta))
    low = []
    for label, of, few, name, to in (
        ("ssm_f_b", mixer.decay, mixer.decay_low, "low", "alpha"),
        ("ssm_g_b", mixer.gate, mixer.gate_low, "gate low", GATE),
    ):
        if few is None:
            wanted.append((to, of))
        else:
            wanted.append((name, few))
            low.append((label, of, name, to))
    made = {name: at.product("ssm_in", x, of, name) for name, of in wanted}
    for label, of, name, to in low:
        made[to] = at.product(label, made[name], of, to)
    inputs = {
        f"{name}_heads": convolve(
            at,
            f"ssm_conv1d_{name}",
            made[f"mixed {name}"],
            part.conv,
            f"convolved {name}",
            f"tail {name}",
        )
        for name, part in mixer.parts.items()
    }
    inputs |= {name: made[name] for name in ("alpha", "beta")}
    width = mixer.heads * mixer.dim
    y = recur(at, "ssm_scan", mixer, inputs, Tensor("heads", x.rows, width))
    y = gated_norm(at, "ssm_norm", y, made[GATE], mixer.norm, SIGMOID)
    return at.finish("ssm_out", y, mixer.o, scale)


def lightning(
    at: LayerOps, mixer: Lightning, x: Tensor, norm: Normalization | None, scale: float
) -> Tensor:
    """scale * o (norm(recurrence) * sigmoid(gate x')), x' being the norm of x."""
    normed = at.norm("attn_norm", x, norm)
    made = {
        name: activated(at, "attn_qkv", normed, of, f"mixed {name}")
        for name, of in mixer.parts.items()
    }
    gate = at.product("attn_gate", at.norm("attn_norm", x, norm), mixer.gate, GATE)
    inputs = {f"{name}_heads": y for name, y in made.items()}
    width = mixer.heads * mixer.dim
    y = recur(at, "attention", mixer, inputs, Tensor("heads", x.rows, width))
    y = gated_norm(at, "attn_norm_2", y, gate, mixer.norm, SIGMOID)
    return at.finish("attn_output", y, mixer.o, scale)


def selective(
    at: LayerOps, mixer: Selective, x: Tensor, norm: Normalization | None, scale: float
) -> Tensor:
    """scale * o (scan(...) * silu(gate x)); see `Selective`."""
    x = at.norm("attn_norm", x, norm)
    mixed = at.product("ssm_in", x, mixer.mixed, "mixed")
    gate = at.product("ssm_in", x, mixer.gate, GATE)
    u = convolve(at, "ssm_conv1d", mixed, mixer.conv, "convolved")
    parts = [
        ("low", mixer.low, mixer.low_norm),
        ("scan b", mixer.b, mixer.b_norm),
        ("scan c", mixer.c, mixer.c_norm),
    ]
    made = {name: at.product("ssm_x", u, of, name) for name, of, _ in parts}
    for name, of, norm in parts:
        if of.matrix.columns is not None:
            made[name] = at.add_ranks(f"ssm_{name}", made[name], name)
        if norm is not None:
            y = Tensor(name, x.rows, of.rows)
            made[name] = at.graph.add(Norm(at.name(f"ssm_{name}_norm"), y, made[name], norm))
    heads = Tensor("heads", x.rows, mixer.conv.channels)
    b, c = made["scan b"], made["scan c"]
    if not mixer.heads:
        step = at.product("ssm_dt", made["low"], mixer.step, "alpha")
        label = at.name("ssm_scan")
        y = at.graph.add(Scan(label, heads, step, u, gate, b, c, mixer, at.index))
        return at.finish("ssm_out", y, mixer.o, scale)
    # the kernel adds the bias
    step = at.product("ssm_dt", made["low"], replace(mixer.step, bias=None), "alpha")
    inputs = {"q_heads": c, "k_heads": b, "v_heads": u, "alpha": step}
    y = gated_by_silu(at, recur(at, "ssm_scan", mixer, inputs, heads), gate)
    return at.finish("ssm_out", y, mixer.o, scale)


# ---- parts of mixers ----


def activated(at: LayerOps, label: str, x: Tensor, of: Linear, name: str) -> Tensor:
    """silu(W x)."""
    product = at.product(label, x, of, name)
    y = Tensor(name, x.rows, product.width)
    return at.graph.add(Activate(at.name(label), y, product, SILU))


def convolve(
    at: LayerOps, label: str, x: Tensor, conv: Convolution, name: str, tail: str = "tail"
) -> Tensor:
    """silu(conv(x))."""
    y = Tensor(name, x.rows, x.width)
    return at.graph.add(Convolve(at.name(label), y, x, conv, SILU, at.index, tail))


def recur(
    at: LayerOps, label: str, mixer: Decaying, inputs: Mapping[str, Tensor], y: Tensor
) -> Tensor:
    """The results of heads whose states decay; ``inputs`` by their roles."""
    roles, tensors = tuple(inputs), tuple(inputs.values())
    return at.graph.add(Recur(at.name(label), y, tensors, roles, mixer, at.index))


def gated_norm(
    at: LayerOps,
    label: str,
    x: Tensor,
    gate: Tensor,
    of: Normalization,
    f: Activation,
    *,
    gates_first: bool = False,
) -> Tensor:
    """norm(x) * f(gate), of every run of values as long as a vector of the norm's weights."""
    assert of.weight is not None
    y, cols = Tensor(x.name, x.rows, x.width), of.weight.shape[-1]
    given = x, gate, of.weight, cols, of.norm.eps, f, gates_first
    return at.graph.add(GatedNorm(at.name(label), y, *given))


def gated_by_silu(at: LayerOps, x: Tensor, gate: Tensor) -> Tensor:
    """x * silu(gate)."""
    y = Tensor(x.name, x.rows, x.width)
    return at.graph.add(Gate(at.name("ssm_gate"), y, gate, x, SILU))


def _gated(at: LayerOps, mixer: Recurrence, y: Tensor, gate: Tensor) -> Tensor:
    """norm(y) * f(gate), or norm(y * f(gate))."""
    if mixer.norm is None:
        return gated_by_silu(at, y, gate)
    f = Activation(mixer.gating)
    return gated_norm(at, "ssm_norm", y, gate, mixer.norm, f, gates_first=mixer.gates_first)


#: The operations of each mixer: scale * the mixer of the norm of x.
MIXERS: Mapping[type[Recurrent], Callable[..., Tensor]] = {
    ShortConv: short_conv,
    Recurrence: recurrence,
    KimiDelta: kimi_delta,
    Selective: selective,
    Lightning: lightning,
}
