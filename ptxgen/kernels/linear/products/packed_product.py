"""What products of many packed activation vectors on tensor cores have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.kernels.linear.packed_parts import Mixture, PackedPart
from urdir.ptxgen.kernels.linear.products.packed_tiling import PackedTiling
from urdir.ptxgen.kernels.linear.steps import Reference
from urdir.ptxgen.spec import Access, Array, Param, Tolerance, ceil_div
from urdir.ptxgen.weights.formats import random_blocks
from urdir.ptxgen.weights.halves import Halves
from urdir.ptxgen.weights.packed import GROUP, pack, packed_shape, unpack


@dataclass(frozen=True)
class PackedProduct(PackedTiling):
    """y[b] = W x[b] for packed f16 activations (`packed`), W (rows, cols) repacked, then the
    ``epilogue``.

    Weights are rounded to f16, P times (`Layout.powers`), in registers; products and sums are f32.
    ``others``: (format, rows) of more matrices for the same x, each with its own y.

    ``mixture``: W (experts, rows, cols) and biases (experts, rows) are those of experts, ``batch``
    counts rows, and a tile of vectors is one of ``tile_of``; x has the vectors in the order of the
    list. So has y if it is packed, and zeros between those of two experts; after the last tile it
    stays as it was. Else y (pairs, rows) is in the order of rows and slots. The list must be
    complete when the launch before this one begins to write: see `Pack`, which waits for it.

    y[b] has the same bits whatever the other vectors are. Sums are taken in an order that ``cols``
    and the ``cut`` decide. Raises PtxgenError for F32 weights, a cut that does not fit, and an odd
    number of row groups of a gated product.
    """

    def x_params(self) -> list[Param]:
        params = [Param("length", "u32")] if self.takes_length else []
        params.append(Param("x", "f16", packed_shape(self.vectors, self.cols), Access.IN))
        if self.mixture is not None:
            params.append(Param("tile_of", "u32", ("tiles", 4), Access.IN))
            if not self.packs:
                params.append(Param("pair", "u32", ("vectors",), Access.IN))
        return params

    def weight_params(self, part: PackedPart) -> list[Param]:
        names = (f"weights{part.suffix}", *self.matrices[1:])
        return [Param(name, "u8", (part.layout.nbytes,), Access.IN) for name in names]

    @property
    def tolerance(self) -> Tolerance:
        """Each rounding to f16 changes a number by up to 2^-11 of itself, and a weight may outweigh
        all others: it is rounded, and so are its scale and its minimum, if they are products; with
        a minimum, both are larger than the weight. A y of f16 is rounded once more, the error of a
        gate and of its other factor add up."""
        roundings = max(Halves(fmt).roundings for fmt in self.formats)
        ends = self.packs or self.heads is not None
        return Tolerance(rtol=2.0**-11 * (self.pair * roundings + ends) + 1e-5)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        x = unpack(inputs["x"], self.vectors, self.cols)
        if self.mixture is not None:
            return {"y": self._of_experts(self.mixture, x, inputs)}
        outputs: dict[str, Array] = {}
        x = self.multiplied({**inputs, "x": x}, outputs)
        for part in self.parts:
            names = (f"weights{part.suffix}", *self.matrices[1:])
            weights = [part.layout.unpack(inputs[n]).astype(np.float64) for n in names]
            products = [x[: self.batch] @ matrix.T for matrix in weights]
            self.finish(products, Reference(self, part, inputs, outputs))
        return outputs

    def _of_experts(self, mixture: Mixture, x: Array, inputs: dict[str, Any]) -> Array:
        """The vectors of each tile times their expert's matrix, in the order of the list; if they
        are not packed, in that of rows and slots."""
        experts = (mixture.experts, self.rows, -1)
        matrices = [
            self.layout.unpack(inputs[name]).astype(np.float64).reshape(experts)
            for name in self.matrices
        ]
        y = np.zeros((self.products, self.rows))
        if self.packs:
            y = unpack(inputs["y"], self.vectors, self.rows)
        for expert, first, count, _ in inputs["tile_of"].tolist():
            vectors = np.arange(first, first + count)
            pairs = vectors if self.packs else inputs["pair"][vectors]
            products = [x[vectors] @ matrix[expert].T for matrix in matrices]
            made = np.stack(products) if self.gated else products[0]
            of = Reference(self, self.parts[0], inputs, {}, np.full(count, expert), pairs)
            for step in self.epilogue:
                made = step.apply(made, of)
            y[pairs] = made
            if self.packs:
                y[first + count : ceil_div(first + count, GROUP) * GROUP] = 0
        return pack(y) if self.packs else y.astype(np.float32)

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        layouts = {f"weights{part.suffix}": part.layout for part in self.parts}
        layouts["up"] = self.layout
        # What is bounded is as large as its bound, and its errors as large as the sums.
        scale = {"scale": 0.5 / self.cols**0.5} if self.f is not None and self.f.limit else {}
        inputs: dict[str, Any] = {"length": np.uint32(self.batch)} if self.takes_length else {}
        if self.mixture is not None:
            inputs |= self.mixture.lists(self.batch, rng)
        inputs["x"] = pack(rng.standard_normal((self.vectors, self.cols)))
        for p in self.params:
            if p.name in layouts:
                layout = layouts[p.name]
                count = layout.rows * layout.cols // layout.format.block
                inputs[p.name] = layout.pack(random_blocks(layout.format, count, rng, **scale))
        return self.completed(inputs, rng)
