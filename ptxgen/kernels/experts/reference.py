"""What the references of products with experts have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from urdir.ptxgen.kernels.experts.shared import shared_weights
from urdir.ptxgen.kernels.experts.spec import ExpertsProduct
from urdir.ptxgen.kernels.linear.steps import Epilogue, Reference
from urdir.ptxgen.spec import Array


def matrices_of(spec: ExpertsProduct, inputs: dict[str, Any]) -> list[Array]:
    """The weights (experts, or slots of held ones, rows, cols) f64 of each repacked matrix; last
    those of an expert that all rows have."""
    shape = (-1, spec.rows, spec.cols)
    layout = spec.layout if spec.held is None else spec.held.layout(spec)
    found = [layout.unpack(inputs[m]).reshape(shape).astype(float) for m in spec.matrices]
    if not spec.has_shared:
        return found
    more = shared_weights(spec, inputs)
    return [np.append(m, [own], axis=0) for m, own in zip(found, more, strict=True)]


def found(
    spec: ExpertsProduct, inputs: dict[str, Any], experts: Array
) -> tuple[Array, list[Array], dict[str, Array]]:
    """Which matrices ``experts`` (batch, used) have, these, and those of a cache as outputs."""
    if spec.held is None:
        return experts, matrices_of(spec, inputs), {}
    places, held = spec.held.find(spec, inputs, experts)
    return places, matrices_of(spec, inputs | held), held


def ended(
    spec: ExpertsProduct,
    y: Array,
    experts: Array,
    pairs: Array,
    inputs: dict[str, Any],
    epilogue: Sequence[Epilogue],
) -> Array:
    """What the epilogue makes of products (pairs, rows), of a gated pair (2, pairs, rows), with
    the matrices of ``experts`` (pairs,)."""
    of = Reference(spec, spec.parts[0], inputs, {}, experts, pairs)
    for step in epilogue:
        y = step.apply(y, of)
    return y
