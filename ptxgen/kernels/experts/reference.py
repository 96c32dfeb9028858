"""What the references of products with experts have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from urdir.ptxgen.kernels.experts.spec import ExpertsProduct
from urdir.ptxgen.kernels.linear.steps import Epilogue, Reference
from urdir.ptxgen.spec import Array


def with_choice(spec: ExpertsProduct, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs with ``expert``, and ``weight`` where the experts are chosen here."""
    if spec.selection is None:
        return {**inputs}
    parts = spec.logit_parts
    expert, weight = spec.selection(inputs["logits"] if parts is None else parts.logits(inputs))
    return {**inputs, "expert": expert, "weight": weight}


def matrices_of(spec: ExpertsProduct, inputs: dict[str, Any]) -> list[Array]:
    """The weights (experts, rows, cols) f64 of each repacked matrix."""
    shape = (spec.experts, spec.rows, spec.cols)
    return [spec.layout.unpack(inputs[m]).reshape(shape).astype(float) for m in spec.matrices]


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
