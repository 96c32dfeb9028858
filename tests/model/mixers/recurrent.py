"""Mixers with a state in numpy: all tokens of a sequence at once."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from tests.model.mixers.mixer import Example, Floats, sigmoid, silu
from urdir.model.families.recurrent import (
    Convolution,
    KimiDelta,
    Lightning,
    Recurrence,
    Selective,
    ShortConv,
)

if TYPE_CHECKING:
    from tests.model.reference import Reference
    from urdir.model.families.layers import Branch


def convolved(model: Reference, of: Convolution, x: Floats) -> Floats:
    weight = model.tensor(of.weight.name).reshape(of.channels, of.taps)
    padded = np.concatenate([np.zeros((of.taps - 1, of.channels)), x])
    y = sum(padded[tap : tap + len(x)] * weight[:, tap] for tap in range(of.taps))
    return y if of.bias is None else y + model.vector(of.bias)


def short_conv(model: Reference, of: ShortConv, x: Floats) -> Floats:
    gated = model.linear(of.input_gate, x) * model.linear(of.values, x)
    return model.linear(of.o, model.linear(of.output_gate, x) * convolved(model, of.conv, gated))


def selective(model: Reference, of: Selective, x: Floats) -> Floats:
    u = silu(convolved(model, of.conv, model.linear(of.mixed, x)))
    low, b, c = (
        model.norm(norm, model.linear(part, u))
        for part, norm in ((of.low, of.low_norm), (of.b, of.b_norm), (of.c, of.c_norm))
    )
    dt = np.logaddexp(0.0, model.linear(of.step, low))
    rates, skip = model.vector(of.a), model.vector(of.skip)
    if of.heads:
        group = of.conv.channels // of.heads
        dt, rates, skip = (np.repeat(a, group, axis=-1) for a in (dt, rates, skip))
        rates = np.repeat(rates, of.size)
    rates = rates.reshape(of.conv.channels, of.size)
    state = np.zeros_like(rates)
    y = np.zeros_like(u)
    for row in range(len(x)):
        state = state * np.exp(dt[row][:, None] * rates) + np.outer(dt[row] * u[row], b[row])
        y[row] = state @ c[row]
    y = y + u * skip
    return model.linear(of.o, y * silu(model.linear(of.gate, x)))


def recurrence(model: Reference, of: Recurrence, x: Floats) -> Floats:
    rows = len(x)
    mixed = silu(convolved(model, of.conv, model.linear(of.mixed, x)))
    keys = of.key_heads * of.key_dim
    widths = {"q": keys, "k": keys, "v": of.width}
    ends = np.cumsum([widths[name] for name in of.order])
    parts = dict(zip(of.order, np.split(mixed, ends[:-1], axis=1), strict=True))
    v = parts["v"].reshape(rows, of.heads, of.value_dim)
    q, k = (parts[name].reshape(rows, of.key_heads, of.key_dim) for name in "qk")
    group = of.heads // of.key_heads
    if of.tiled:
        q, k = (np.tile(a, (1, group, 1)) for a in (q, k))
    else:
        q, k = (np.repeat(a, group, axis=1) for a in (q, k))
    dt = np.logaddexp(0.0, model.linear(of.alpha, x) + model.vector(of.dt_bias))
    decay = np.exp(dt * model.vector(of.a))
    if of.beta is not None:
        q, k = (a / np.sqrt((a * a).sum(axis=2, keepdims=True) + of.eps) for a in (q, k))
        q = q / np.sqrt(of.key_dim)
        rate = sigmoid(model.linear(of.beta, x))
    else:
        rate = dt
    state = np.zeros((of.heads, of.value_dim, of.key_dim))
    y = np.zeros((rows, of.heads, of.value_dim))
    for row in range(rows):
        state = state * decay[row][:, None, None]
        target = v[row]
        if of.beta is not None:
            target = target - np.einsum("hvk,hk->hv", state, k[row])
        state = state + np.einsum("h,hv,hk->hvk", rate[row], target, k[row])
        y[row] = np.einsum("hvk,hk->hv", state, q[row])
    if of.skip is not None:
        y = y + v * model.vector(of.skip)[:, None]
    gate = model.linear(of.gate, x)
    gate = sigmoid(gate) if of.gating == "sigmoid" else silu(gate)
    if of.gates_first:
        y = (y.reshape(rows, -1) * gate).reshape(y.shape)
    if of.norm is not None and of.norm.weight is not None:
        y = model.norm(of.norm, y.reshape(rows, -1, of.norm.weight.shape[-1]))
    y = y.reshape(rows, -1)
    return model.linear(of.o, y if of.gates_first else y * gate)


def lightning(model: Reference, of: Lightning, x: Floats) -> Floats:
    shape = (len(x), of.heads, of.dim)
    q, k, v = (silu(model.linear(part, x)).reshape(shape) for part in (of.q, of.k, of.v))
    behind = np.arange(len(x))[:, None] - np.arange(len(x))
    rates = of.slopes.rates().astype(np.float64)[:, None, None]
    kept = np.where(behind >= 0, np.exp(rates * np.maximum(behind, 0)), 0.0)
    y = np.einsum("qhd,khd,hqk,khv->qhv", q, k, kept, v, optimize=True)
    gate = sigmoid(model.linear(of.gate, x))
    return model.linear(of.o, model.norm(of.norm, y.reshape(len(x), -1)) * gate)


def kimi_delta(model: Reference, of: KimiDelta, x: Floats) -> Floats:
    rows, shape = len(x), (len(x), of.heads, of.dim)
    q, k, v = (
        silu(convolved(model, part.conv, model.linear(part.linear, x))).reshape(shape)
        for part in (of.q, of.k, of.v)
    )
    q, k = (a / np.sqrt((a * a).sum(axis=2, keepdims=True) + of.eps) for a in (q, k))
    low = x if of.decay_low is None else model.linear(of.decay_low, x)
    steps = (model.linear(of.decay, low) + model.vector(of.dt_bias)).reshape(shape)
    rates = model.vector(of.a)[:, None] * (-1.0 if of.negated else 1.0)
    logs = of.floor * sigmoid(rates * steps) if of.floor else rates * np.logaddexp(0.0, steps)
    beta = sigmoid(model.linear(of.beta, x))
    state = np.zeros((of.heads, of.dim, of.dim))  # values, keys
    y = np.zeros(shape)
    for row in range(rows):
        state = state * np.exp(logs[row])[:, None, :]
        error = v[row] - np.einsum("hvk,hk->hv", state, k[row])
        state = state + np.einsum("h,hv,hk->hvk", beta[row], error, k[row])
        y[row] = np.einsum("hvk,hk->hv", state, q[row]) / np.sqrt(of.dim)
    gate = model.linear(of.gate, x if of.gate_low is None else model.linear(of.gate_low, x))
    y = model.norm(of.norm, y).reshape(rows, -1) * sigmoid(gate)
    return model.linear(of.o, y)


MIXERS = {
    ShortConv: short_conv,
    Recurrence: recurrence,
    Selective: selective,
    KimiDelta: kimi_delta,
    Lightning: lightning,
}


def _with_bias(branch: Branch) -> ShortConv:
    """The short convolution with a bias: the weights of the norm before it."""
    of, norm = branch.network, branch.norm
    assert isinstance(of, ShortConv)
    assert norm is not None
    return replace(of, conv=replace(of.conv, bias=norm.weight))


EXAMPLES = {"a short convolution with a bias": Example("lfm2-dense", _with_bias)}
