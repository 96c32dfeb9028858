"""The norm of x before a product: all of it, or the rest of a norm that the last launch began."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.prologue.packed import PackedInput
from urdir.ptxgen.kernels.linear.steps import Product, Prologue, Reference
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.kernels.summary import PACKED_SUMMARY, SUMMARY, packed_squares, summary
from urdir.ptxgen.spec import Access, Array, Param
from urdir.ptxgen.weights.layout import TILE_COLS
from urdir.ptxgen.weights.packed import pack


@dataclass(frozen=True, slots=True)
class Normed(Prologue):
    """x is normalised; weights ``norm`` and ``norm_bias`` (cols,) f32, if the norm has them."""

    norm: Norm

    stem = "norm"
    leads = True
    normalises = True

    @property
    def norm_of_x(self) -> Norm | None:
        return self.norm

    @property
    def vectors(self) -> int:
        return self.norm.weight + self.norm.bias

    @property
    def held_vectors(self) -> int:
        return 0 if self.norm.is_factor else self.vectors

    @property
    def warp_sums(self) -> int:
        return 0 if self.norm.is_factor else 1

    @property
    def text(self) -> str:
        return norm_text(self.norm)

    def params(self, product: Product) -> tuple[Param, ...]:
        return norm_params(self.norm, "norm")

    def apply(self, x: Array, of: Reference) -> Array:
        return self.norm(x, of.inputs.get("norm"), of.inputs.get("norm_bias"))


@dataclass(frozen=True, slots=True)
class BegunNorm(Prologue):
    """x is v times the weights of an RMSNorm, the output of a launch with `BeginNorm`. Its
    ``x_summary`` (2, batch, cols / 16) f32 has the squares of v, from which a factor follows.

    The summary of a packed x has the squares only, (1, batch, cols / 16); of many packed vectors
    (1, batch, cols / 32), in the packed order.
    """

    eps: float

    stem = "begun_norm"
    leads = True
    normalises = True

    @property
    def text(self) -> str:
        return "x / sqrt(mean(v^2) + eps): x is v * norm, and the squares of v are in x_summary"

    def check(self, product: Product) -> None:
        if product.packs_many and (product.cols % TILE_COLS or product.pair_shape):
            raise PtxgenError(
                f"{product.name}: begun_norm of {product.cols} columns: multiples of {TILE_COLS}, "
                "without experts"
            )

    def params(self, product: Product) -> tuple[Param, ...]:
        if product.packs_many:
            shape = (1, "batch", product.cols // PACKED_SUMMARY)
        else:
            shape = (1 if product.steps.has(PackedInput) else 2, "batch", product.cols // SUMMARY)
        return (Param("x_summary", "f32", shape, Access.IN),)

    def make_inputs(self, product: Product, rng: np.random.Generator) -> dict[str, Any]:
        norm = rng.standard_normal(product.cols).astype(np.float32)
        vectors = rng.standard_normal((product.batch, product.cols)).astype(np.float32)
        if product.packs_many:
            return {"x": pack(vectors * norm), "x_summary": packed_squares(vectors)}
        planes = summary(vectors * norm, vectors)
        if (packed := product.steps.find(PackedInput)) is not None:
            return {"x": packed.pack(vectors * norm, product), "x_summary": planes[1:]}
        return {"x": vectors * norm, "x_summary": planes}

    def apply(self, x: Array, of: Reference) -> Array:
        squares = of.inputs["x_summary"][-1].astype(np.float64).sum(axis=1, keepdims=True)
        normed: Array = x / np.sqrt(squares / of.product.cols + self.eps)
        return normed


def norm_params(norm: Norm, name: str) -> tuple[Param, ...]:
    """The parameters of a norm, if it has them: weights called ``name``, and a bias."""
    given = ((name, norm.weight), (f"{name}_bias", norm.bias))
    return tuple(Param(of, "f32", ("cols",), Access.IN) for of, has in given if has)


def norm_text(norm: Norm | None, weights: str = "norm") -> str:
    """A norm as a formula for a template's contract; ``weights`` names its parameter."""
    if norm is None:
        return "x"
    centred = "x" if norm.kind == "rms" else "(x - mean(x))"
    measure = "mean(x^2)" if norm.kind == "rms" else "var(x)"
    weight = f" * {weights}, {weights} (cols) f32" if norm.weight else ""
    bias = f" + {weights}_bias" if norm.bias else ""
    return f"{centred} / sqrt({measure} + eps){weight}{bias}"


def begun(norm: Norm) -> BegunNorm:
    """The rest of a norm that was begun; raises PtxgenError for a norm that cannot be begun."""
    if not norm.is_factor or not norm.weight:
        raise PtxgenError(f"begun_norm: {norm} must be a launch of its own")
    return BegunNorm(norm.eps)
