"""Time mixing and channel mixing of RWKV in numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests.model.mixers.mixer import Floats, sigmoid
from urdir.model.families.rwkv import ChannelMix, LowRank, TimeMix
from urdir.model.families.stored import Linear

if TYPE_CHECKING:
    from tests.model.reference import Reference


def low_rank(model: Reference, of: LowRank | Linear | None, x: Floats) -> Floats:
    if not isinstance(of, LowRank):
        return np.ones_like(x) if of is None else model.linear(of, x)
    low = model.linear(of.down, x)
    return model.linear(of.up, low if of.activation is None else of.activation(low))


def time_mix(model: Reference, of: TimeMix, x: Floats) -> Floats:
    shift = np.vstack([np.zeros(x.shape[1]), x[:-1]]) - x
    mixes = [model.vector(mix) for mix in of.shift]
    if of.dynamic is not None:
        first = x + shift * model.vector(of.dynamic.first)
        lows = [np.tanh(model.linear(down, first)) for down in of.dynamic.down]
        more = [model.linear(up, low) for up, low in zip(of.dynamic.up, lows, strict=True)]
        mixes = [mix + own for mix, own in zip(mixes, more, strict=True)]
    by = {name: x + shift * mix for name, mix in zip(of.order, mixes, strict=True)}
    shape, group = (len(x), of.heads, of.dim), of.heads // of.key_heads
    r = model.linear(of.r, by["r"]).reshape(shape)
    k, v = (
        np.repeat(model.linear(m, by[at]).reshape(len(x), -1, of.dim), group, axis=1)
        for m, at in ((of.k, "k"), (of.v, "v"))
    )
    w = low_rank(model, of.decay, by["w"]).reshape(shape)
    gate = low_rank(model, of.gate, by.get("g", x))
    bonus = 0.0 if of.bonus is None else model.vector(of.bonus).reshape(of.heads, of.dim)
    if of.variant == "rwkv7":
        w = np.exp(-0.606531 * sigmoid(w))
        a = sigmoid(low_rank(model, of.rate, by["a"]).reshape(shape))
        if of.names_values:
            model.values = v
        else:
            mixed = sigmoid(low_rank(model, of.residual, by["v"]).reshape(shape))
            v = v + (model.values - v) * mixed
        assert of.key_scale is not None
        assert of.key_rate is not None
        u = k * model.vector(of.key_scale).reshape(shape[1:])
        u = u / np.maximum(np.sqrt((u * u).sum(2, keepdims=True)), 1e-12)
        scaled = k * model.vector(of.key_rate).reshape(shape[1:])
        k = k + (a * scaled - scaled)
    else:
        w = np.exp(-np.exp(w))
        k = k * (1.0 - w) if of.variant == "gated" else k
        gate = gate * sigmoid(gate) if of.variant == "rwkv6" else sigmoid(gate)
    state = np.zeros((of.heads, of.dim, of.dim))  # values, keys
    y = np.zeros(shape)
    for t in range(len(x)):
        added = np.einsum("hv,hk->hvk", v[t], k[t])
        if of.variant == "rwkv6":
            y[t] = np.einsum("hvk,hk->hv", state + added * bonus[:, None], r[t])
        old, state = state, state * w[t][:, None] + added
        if of.variant == "rwkv7":
            seen = np.einsum("hvk,hk->hv", old, -u[t])
            state = state + np.einsum("hv,hk->hvk", seen, u[t] * a[t])
        if of.variant != "rwkv6":
            y[t] = np.einsum("hvk,hk->hv", state, r[t])
    if of.variant == "gated":
        y = y / np.sqrt(of.dim)
    if of.norm is not None:
        assert of.norm.weight is not None
        assert of.norm.bias is not None
        y = of.norm.norm(y) * model.vector(of.norm.weight).reshape(shape[1:])
        y = y + model.vector(of.norm.bias).reshape(shape[1:])
    if of.variant == "rwkv7":
        y = y + (k * r * bonus).sum(2, keepdims=True) * v
    return model.linear(of.o, y.reshape(len(x), -1) * gate)


def channel_mix(model: Reference, of: ChannelMix, x: Floats) -> Floats:
    shift = np.vstack([np.zeros(x.shape[1]), x[:-1]]) - x
    mixed = [x + shift * model.vector(mix) for mix in of.shift]
    y = model.linear(of.o, np.maximum(model.linear(of.key, mixed[0]), 0.0) ** 2)
    return y if of.receptance is None else y * sigmoid(model.linear(of.receptance, mixed[1]))


MIXERS = {TimeMix: time_mix, ChannelMix: channel_mix}
