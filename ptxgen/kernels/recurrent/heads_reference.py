"""Recurrences with heads in numpy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from urdir.ptxgen.kernels.recurrent.heads import HeadsRule
from urdir.ptxgen.kernels.recurrent.rows import RecurrentRows
from urdir.ptxgen.spec import Array


def recurrence(rule: HeadsRule, spec: RecurrentRows, inputs: Mapping[str, Any]) -> dict[str, Array]:
    """``state`` and ``y`` of the spec's rows, token by token in float64."""
    states = inputs["state"].astype(np.float64)
    y = np.zeros((spec.rows, rule.heads, rule.value_dim))
    q, k, v = (heads_of(rule, inputs, name) for name in "qkv")
    gate, dt = log_decays(rule, inputs)
    decay = np.exp(gate)[:, :, None]
    if rule.delta:
        q, k = of_length_one(q, rule.eps), of_length_one(k, rule.eps)
        beta = 1.0 / (1.0 + np.exp(-inputs["beta"].astype(np.float64)))[:, :, None]
    for row, sequence, is_first in spec.tokens(inputs):
        state = states[sequence] * (decay[row] * (not is_first))
        if rule.delta:
            added = beta[row] * (v[row] - np.einsum("hvk,hk->hv", state, k[row]))
        else:
            added = dt[row] * v[row]
        state = state + added[:, :, None] * k[row][:, None, :]
        y[row] = rule.scale * np.einsum("hvk,hk->hv", state, q[row])
        if rule.skip_params:
            y[row] += inputs["skip"][:, None] * v[row]
        states[sequence] = state
    return {"state": states.astype(np.float32), "y": y.astype(np.float32)}


def recurrence_of_one(
    rule: HeadsRule,
    inputs: Mapping[str, Any],
    tokens: Mapping[str, Any],
    state: Array,
    first: int,
) -> dict[str, Array]:
    """The recurrence of ``tokens`` of one sequence, from position ``first`` on."""
    count = len(next(iter(tokens.values())))
    rows = {
        "sequence": np.zeros(count, np.uint32),
        "position": first + np.arange(count, dtype=np.uint32),
        "segment": np.array([[0, count]], np.uint32),
    }
    alone = RecurrentRows(count, 1, first + count, 1)
    return recurrence(rule, alone, {**inputs, **tokens, **rows, "state": state})


def heads_of(rule: HeadsRule, inputs: Mapping[str, Any], name: str) -> Array:
    """ "q", "k" or "v" of each value head: (rows, heads, dim) f64."""
    values, first = inputs[rule.qkv.arrays[name]], rule.qkv.offsets[name]
    count, dim = (rule.heads, rule.value_dim) if name == "v" else (rule.key_heads, rule.key_dim)
    part: Array = values.reshape(len(values), -1)[:, first : first + count * dim]
    part = part.astype(np.float64).reshape(-1, count, dim)
    return part if name == "v" else part[:, [rule.key_head(i) for i in range(rule.heads)]]


def log_decays(rule: HeadsRule, inputs: Mapping[str, Any]) -> tuple[Array, Array]:
    """log g (rows, heads, keys or 1), and dt (rows, heads, keys or 1), f64."""
    rates = (-inputs["a"] if rule.negated else inputs["a"]).astype(np.float64)[:, None]
    if rule.steady:
        steady = np.ones((len(inputs[rule.qkv.arrays["k"]]), rule.heads, 1))
        return steady * rates, steady
    before = inputs["alpha"].astype(np.float64) + inputs["dt_bias"]
    before = before.reshape(len(before), rule.heads, -1)
    dt = np.logaddexp(0.0, before)
    return (rule.floor / (1.0 + np.exp(-before * rates)) if rule.floor else dt * rates), dt


def of_length_one(x: Array, eps: float) -> Array:
    """Keys or queries of the delta rule, divided by their lengths."""
    lengths: Array = np.sqrt(np.sum(x * x, -1, keepdims=True) + eps)
    return x / lengths
