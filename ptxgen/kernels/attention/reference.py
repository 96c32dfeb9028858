"""Attention in numpy, by the definition: what every attention kernel is compared with."""

from __future__ import annotations

import numpy as np

from urdir.ptxgen.kernels.attention.scores import LOG2E
from urdir.ptxgen.kernels.attention.spec import AttentionSpec
from urdir.ptxgen.spec import Array


def attend(spec: AttentionSpec, inputs: dict[str, Array]) -> Array:
    """The output (rows, heads, value_dim) f32 of all rows; zeros for idle ones."""
    out = np.zeros((spec.rows, spec.heads, spec.value_dim), np.float32)
    for row, position in enumerate(inputs["position"].tolist()):
        if position < spec.layout.max_len:
            first = spec.scores.first_key(position)
            if spec.scores.texts:
                first = int(inputs["begin"][row])
            top, total, values = softmax(spec, inputs, row, first, position)
            if spec.scores.sinks:
                total, values = with_sinks(inputs["sinks"], top, total, values)
            out[row] = values / total[:, None]
    return out


def softmax(
    spec: AttentionSpec, inputs: dict[str, Array], row: int, first: int, last: int
) -> tuple[Array, Array, Array]:
    """Row ``row`` over keys first ... last in float64, by the definition: the maximum of the
    exponents (of 2) and the sum of weights, (heads,); weighted V (heads, value_dim)."""
    top, weights, out = weighted(spec, inputs, row, first, last)
    return top, weights.sum(axis=1), out


def weighted(
    spec: AttentionSpec, inputs: dict[str, Array], row: int, first: int, last: int
) -> tuple[Array, Array, Array]:
    """The same with the weights, (heads, keys), in place of their sum."""
    layout, seen = spec.layout, np.arange(first, last + 1)
    stored = [
        cache.read(
            inputs[name], int(inputs["sequence"][row]), seen, inputs.get("block_table")
        ).astype(np.float64)
        for name, cache in layout.caches.items()
    ]
    keys, values = stored[0], stored[-1][..., layout.value_start :]
    q = inputs["q"][row].astype(np.float64).reshape(layout.kv_heads, spec.group, spec.head_dim)
    position = row if spec.scores.texts else int(inputs["position"][row])
    products = np.einsum("hgd,hkd->hgk", q, keys)
    exponents = spec.scores(products, seen, position, spec.head_dim)
    if most := spec.scores.relative:
        bias = inputs["relative"][:, np.clip(seen - position, -most, most) + most]
        exponents = exponents + bias.reshape(exponents.shape).astype(np.float64)
    exponents = exponents * LOG2E
    top = exponents.max(axis=2)
    weights = np.exp2(exponents - top[:, :, None])
    out = np.einsum("hgk,hkd->hgd", weights, values)
    weights = weights.reshape(spec.heads, -1)
    return top.ravel(), weights, out.reshape(spec.heads, spec.value_dim)


def with_sinks(sinks: Array, top: Array, total: Array, values: Array) -> tuple[Array, Array]:
    """Sums of weights (..., heads) and weighted values (..., heads, value_dim), both relative to
    maxima ``top`` (..., heads) of 2's exponent, after each head's sink has taken part."""
    logits = sinks.astype(np.float64) * LOG2E
    most = np.maximum(top, logits)
    rescale = np.exp2(top - most)
    return total * rescale + np.exp2(logits - most), values * rescale[..., None]
