"""References and random inputs of products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from urdir.ptxgen.kernels.linear.steps import Part, Product, Reference
from urdir.ptxgen.spec import Access, Array


def unpacked(product: Product, part: Part, inputs: dict[str, Any]) -> list[Array]:
    """The matrices of a part, f64."""
    names = product.weights_of(part)
    return [part.layout.unpack(inputs[name]).astype(np.float64) for name in names]


def multiplied(x: Array, of: Reference) -> Array:
    """The vectors that the weights of a part multiply, f64: x (batch, cols) after the prologue."""
    for step in of.product.prologue:
        x = step.apply(x, of)
    return x.astype(np.float64)


def multiply(
    product: Product,
    inputs: dict[str, Any],
    x: Array | None = None,
    matrices: Callable[[Any, Part, dict[str, Any]], list[Array]] = unpacked,
) -> dict[str, Array]:
    """What a launch writes: of each part its ``matrices`` times the vectors, through the steps.
    ``x`` (batch, cols) is that of the ``inputs`` if it is not given."""
    outputs: dict[str, Array] = {}
    for part in product.parts:
        of = Reference(product, part, inputs, outputs)
        vectors = multiplied(inputs["x"] if x is None else x, of)
        products = [vectors @ matrix.T for matrix in matrices(product, part, inputs)]
        y = ended(products, of)
        outputs.setdefault(f"y{part.suffix}", y.astype(np.float32))
    return outputs


def ended(products: Sequence[Array], of: Reference) -> Array:
    """What the steps make of the ``products`` with a matrix or a pair."""
    y = np.stack(products) if of.product.steps.gated else products[0]
    for step in of.product.epilogue_of(of.part):
        y = step.apply(y, of)
    return y


def completed(product: Product, inputs: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """The inputs of a launch, of which ``inputs`` are given: what steps make, and random floats."""
    for p in product.params:
        if p.name not in inputs and p.access is Access.IN:
            inputs[p.name] = rng.standard_normal(product.shape_of(p)).astype(np.float32)
    for step in product.steps:
        inputs |= step.make_inputs(product, rng)
    return {p.name: inputs[p.name] for p in product.params if p.access is not Access.OUT}
