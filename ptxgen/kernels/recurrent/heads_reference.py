"""Recurrences with heads in numpy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from urdir.ptxgen.kernels.recurrent.heads import RecurrentHeads
from urdir.ptxgen.spec import Array


def recurrence(spec: RecurrentHeads, inputs: Mapping[str, Any]) -> dict[str, Array]:
    """``state`` and ``y`` of rows, token by token in float64."""
    states = inputs["state"].astype(np.float64)
    y = np.zeros((spec.rows, spec.heads, spec.value_dim))
    q, k, v = (heads_of(spec, inputs, name) for name in "qkv")
    gate, dt = log_decays(spec, inputs)
    decay = np.exp(gate)[:, :, None]
    if spec.delta:
        q, k = of_length_one(q, spec.eps), of_length_one(k, spec.eps)
        beta = 1.0 / (1.0 + np.exp(-inputs["beta"].astype(np.float64)))[:, :, None]
    for row, sequence, is_first in spec.tokens(inputs):
        state = states[sequence] * (decay[row] * (not is_first))
        if spec.delta:
            added = beta[row] * (v[row] - np.einsum("hvk,hk->hv", state, k[row]))
        else:
            added = dt[row] * v[row]
        state = state + added[:, :, None] * k[row][:, None, :]
        y[row] = spec.scale * np.einsum("hvk,hk->hv", state, q[row])
        if spec.skip_params:
            y[row] += inputs["skip"][:, None] * v[row]
        states[sequence] = state
    return {"state": states.astype(np.float32), "y": y.astype(np.float32)}


def recurrence_of_one(
    spec: RecurrentHeads,
    inputs: Mapping[str, Any],
    tokens: Mapping[str, Any],
    state: Array,
    first: int,
) -> dict[str, Array]:
    """The recurrence of ``tokens`` of one sequence, from position ``first`` on."""
    count = len(next(iter(tokens.values())))
    given = {field.name: getattr(spec, field.name) for field in fields(RecurrentHeads)}
    rows = {
        "sequence": np.zeros(count, np.uint32),
        "position": first + np.arange(count, dtype=np.uint32),
        "segment": np.array([[0, count]], np.uint32),
    }
    alone = RecurrentHeads(**given | {"rows": count, "sequences": 1, "segments": 1})
    return recurrence(alone, {**inputs, **tokens, **rows, "state": state})


def heads_of(spec: RecurrentHeads, inputs: Mapping[str, Any], name: str) -> Array:
    """ "q", "k" or "v" of each value head: (rows, heads, dim) f64."""
    values, first = inputs[spec.qkv.arrays[name]].reshape(spec.rows, -1), spec.qkv.offsets[name]
    count, dim = (spec.heads, spec.value_dim) if name == "v" else (spec.key_heads, spec.key_dim)
    part: Array = values[:, first : first + count * dim].astype(np.float64)
    part = part.reshape(spec.rows, count, dim)
    return part if name == "v" else part[:, [spec.key_head(i) for i in range(spec.heads)]]


def log_decays(spec: RecurrentHeads, inputs: Mapping[str, Any]) -> tuple[Array, Array]:
    """log g (rows, heads, keys or 1), and dt (rows, heads, keys or 1), f64."""
    rates = (-inputs["a"] if spec.negated else inputs["a"]).astype(np.float64)[:, None]
    if spec.steady:
        steady = np.ones((spec.rows, spec.heads, 1))
        return steady * rates, steady
    before = inputs["alpha"].astype(np.float64) + inputs["dt_bias"]
    before = before.reshape(spec.rows, spec.heads, -1)
    dt = np.logaddexp(0.0, before)
    return (spec.floor / (1.0 + np.exp(-before * rates)) if spec.floor else dt * rates), dt


def of_length_one(x: Array, eps: float) -> Array:
    """Keys or queries of the delta rule, divided by their lengths."""
    lengths: Array = np.sqrt(np.sum(x * x, -1, keepdims=True) + eps)
    return x / lengths
