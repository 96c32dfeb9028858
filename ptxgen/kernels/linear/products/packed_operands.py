"""The numbers that products of many packed activation vectors multiply: f16, signed bytes, E4M3.

Each kind owns what x and weights are in memory, their parameters, random values and numpy
reference, and how far it is from the product of the floats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.packed_parts import takes_packed
from urdir.ptxgen.kernels.linear.reference import unpacked
from urdir.ptxgen.kernels.linear.steps import Part, Product
from urdir.ptxgen.spec import Access, Array, Param, ceil_div
from urdir.ptxgen.weights import eights
from urdir.ptxgen.weights.e4m3 import e4m3
from urdir.ptxgen.weights.halves import Halves
from urdir.ptxgen.weights.layout import TILE_ROWS, random_weights
from urdir.ptxgen.weights.packed import GROUP, pack, packed_shape, unpack


class Operands(Protocol):
    """A kind of numbers that x and weights are when they are multiplied."""

    def check(self, product: Product) -> None:
        """Raise PtxgenError for weights that do not become such numbers."""

    def x_params(self, product: Product) -> list[Param]:
        """What a launch reads of x."""

    def weight_params(self, product: Product, part: Part) -> list[Param]:
        """What it reads of the matrices of a part."""

    def make_inputs(self, product: Product, rng: np.random.Generator) -> dict[str, Any]:
        """Random values of all these parameters."""

    def vectors(self, product: Product, inputs: dict[str, Any]) -> Array:
        """x (batch, cols), of such numbers."""

    def matrices(self, product: Product, part: Part, inputs: dict[str, Any]) -> list[Array]:
        """The matrices (rows, cols) of a part, f64, of such numbers."""

    def error(self, product: Product) -> float:
        """How far sums may be from those of the numbers, relative to the largest."""


class HalfOperands:
    """f16: x is packed (`weights.packed`), weights are rounded."""

    def check(self, product: Product) -> None:
        if not takes_packed(product.formats):
            raise PtxgenError(f"{product.name}: not for F32 weights")

    def x_params(self, product: Product) -> list[Param]:
        return [Param("x", "f16", packed_shape(product.vectors, product.cols), Access.IN)]

    def weight_params(self, product: Product, part: Part) -> list[Param]:
        return _stored(product, part)

    def make_inputs(self, product: Product, rng: np.random.Generator) -> dict[str, Any]:
        # What is bounded is as large as its bound, and its errors as large as the sums.
        f = product.steps.f
        scale = 0.5 / product.cols**0.5 if f is not None and f.limit else 1.0
        inputs: dict[str, Any] = {"x": pack(rng.standard_normal((product.vectors, product.cols)))}
        for part in product.parts:
            for name in product.weights_of(part):
                inputs[name] = random_weights(part.layout, rng, scale)
        return inputs

    def vectors(self, product: Product, inputs: dict[str, Any]) -> Array:
        return unpack(inputs["x"], product.vectors, product.cols)[: product.batch]

    def matrices(self, product: Product, part: Part, inputs: dict[str, Any]) -> list[Array]:
        return unpacked(product, part, inputs)

    def error(self, product: Product) -> float:
        """Each rounding to f16 changes a number by up to 2^-11 of itself, and a weight may outweigh
        all others: it is rounded, and so are its scale and its minimum, if they are products; with
        a minimum, both are larger than the weight. The errors of a gate and of its other factor add
        up."""
        roundings = max(Halves(fmt).roundings for fmt in product.formats)
        return 2.0**-11 * product.steps.pair * roundings + 1e-5


class ByteOperands:
    """Signed bytes (`weights.eights`): x with a scale a vector, weights, which become bytes in
    registers, with a scale a row. Sums are s32."""

    #: Whether the numbers are floats.
    are_floats = False

    def check(self, product: Product) -> None:
        if not all(map(eights.can_be_bytes, product.formats)):
            raise PtxgenError(f"{product.name}: for quantised weights")
        if product.cols > eights.MOST_COLS:
            raise PtxgenError(f"{product.name}: {product.cols} columns: up to {eights.MOST_COLS}")

    def x_params(self, product: Product) -> list[Param]:
        return _scaled_x(product, "s8")

    def weight_params(self, product: Product, part: Part) -> list[Param]:
        of_rows = (2, TILE_ROWS * part.layout.bands)
        scales = [Param(name, "f32", of_rows, Access.IN) for name in _scales_of(product, part)]
        both = zip(_stored(product, part), scales, strict=True)
        return [param for pair in both for param in pair]

    def make_inputs(self, product: Product, rng: np.random.Generator) -> dict[str, Any]:
        inputs = _random_x(product, eights.pack_bytes, rng)
        for part in product.parts:
            names = zip(product.weights_of(part), _scales_of(product, part), strict=True)
            for name, of_rows in names:
                inputs[name] = random_weights(part.layout, rng)
                inputs[of_rows] = eights.row_scales(part.layout, inputs[name])
        return inputs

    def vectors(self, product: Product, inputs: dict[str, Any]) -> Array:
        return _scaled(_placed(product, inputs), inputs)

    def matrices(self, product: Product, part: Part, inputs: dict[str, Any]) -> list[Array]:
        made, names = [], zip(product.weights_of(part), _scales_of(product, part), strict=True)
        for weights, scales in ((inputs[name], inputs[of_rows]) for name, of_rows in names):
            matrix = eights.weight_bytes(part.layout, weights, scales).astype(np.float64)
            made.append(matrix * scales[0, : part.rows, None])
        return made

    def error(self, product: Product) -> float:
        """Bytes are the same as the reference's, and sums exact; f32 rounds the rest."""
        return 2e-5


class E4m3Operands:
    """E4M3 numbers: x with a scale a vector, weights that are stored as such with a scale a row.
    Sums are f32.

    Hopper's tensor cores align the products of 32 columns with the sum so far and keep 14 bits of
    it (DeepSeek-V3, arXiv 2412.19437, section 3.3.2): each 32 columns may lose 2^-13 of a sum.
    """

    are_floats = True

    def check(self, product: Product) -> None:
        if not all(map(eights.are_e4m3, product.formats)):
            raise PtxgenError(f"{product.name}: for E4M3 weights with a scale a row")

    def x_params(self, product: Product) -> list[Param]:
        return _scaled_x(product, "u8")

    def weight_params(self, product: Product, part: Part) -> list[Param]:
        return _stored(product, part)

    def make_inputs(self, product: Product, rng: np.random.Generator) -> dict[str, Any]:
        inputs = _random_x(product, eights.pack_e4m3, rng)
        for part in product.parts:
            for name in product.weights_of(part):
                inputs[name] = random_weights(part.layout, rng)
        return inputs

    def vectors(self, product: Product, inputs: dict[str, Any]) -> Array:
        return _scaled(e4m3()[_placed(product, inputs).view(np.uint8)], inputs)

    def matrices(self, product: Product, part: Part, inputs: dict[str, Any]) -> list[Array]:
        return unpacked(product, part, inputs)

    def error(self, product: Product) -> float:
        """What tensor cores drop, see above."""
        return 2.0**-13 * ceil_div(product.cols, 32)


def _stored(product: Product, part: Part) -> list[Param]:
    """The matrices of a part, as they are stored."""
    nbytes = (part.layout.nbytes,)
    return [Param(name, "u8", nbytes, Access.IN) for name in product.weights_of(part)]


def _scales_of(product: Product, part: Part) -> tuple[str, ...]:
    """The parameters of the scales of rows of a part's matrices."""
    return (f"row_scales{part.suffix}", "up_row_scales")[: product.steps.pair]


def _scaled_x(product: Product, dtype: str) -> list[Param]:
    """x of numbers of eight bits, and the scale of each vector, in whole groups."""
    scales = (ceil_div(product.batch, GROUP) * GROUP,)
    return [
        Param("x", dtype, eights.bytes_shape(product.batch, product.cols), Access.IN),
        Param("x_scales", "f32", scales, Access.IN),
    ]


def _random_x(
    product: Product, pack_x: Callable[[Array], tuple[Array, Array]], rng: np.random.Generator
) -> dict[str, Any]:
    """Standard normal vectors, packed, and their scales."""
    x, scales = pack_x(rng.standard_normal((product.batch, product.cols)))
    return {"x": x, "x_scales": np.pad(scales, (0, -product.batch % GROUP))}


def _placed(product: Product, inputs: dict[str, Any]) -> Array:
    """The numbers of x (batch, cols) as signed bytes, in the order of columns."""
    return eights.unplace_bytes(inputs["x"].view(np.int8), product.batch, product.cols)


def _scaled(numbers: Array, inputs: dict[str, Any]) -> Array:
    """The vectors of such numbers (batch, cols), f64."""
    scaled: Array = numbers.astype(np.float64) * inputs["x_scales"][: len(numbers), None]
    return scaled
