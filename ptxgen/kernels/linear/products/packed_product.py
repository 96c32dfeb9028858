"""What products of many packed activation vectors on tensor cores have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.kernels.linear.epilogue.bias import Bias
from urdir.ptxgen.kernels.linear.packed_parts import Mixture, PackedPart
from urdir.ptxgen.kernels.linear.products.packed_tiling import PackedTiling
from urdir.ptxgen.kernels.linear.steps import Reference
from urdir.ptxgen.kernels.pairs import grouped, random_choice
from urdir.ptxgen.spec import Access, Array, Param, Tolerance, ceil_div
from urdir.ptxgen.weights.formats import random_blocks
from urdir.ptxgen.weights.halves import Halves
from urdir.ptxgen.weights.packed import GROUP, pack, packed_shape, unpack


@dataclass(frozen=True)
class PackedProduct(PackedTiling):
    """y[b] = W x[b] (+ bias) for packed f16 activations (`packed`), W (rows, cols) repacked.

    Weights are rounded to f16, P times (`Layout.powers`), in registers; products and sums are f32.
    ``gated``: y = f(W x + bias) (U x + up_bias), U (``up``) like W, f by default silu. Then y is
    multiplied with ``scale``, ``residual`` is added, ``softcap`` and ``clamp`` bound it, as in
    `LinearSpec`. ``packs``: y is packed for the next product. ``others``: (format, rows) of more
    matrices for the same x, each with its own y.

    ``heads``: each y is that of heads in a cache, f16 (`HeadPlaces`). ``x`` has room for as many
    vectors as the cache; their number is the argument ``length``, not a constant of the text.

    ``mixture``: W (experts, rows, cols) and biases (experts, rows) are those of experts, ``batch``
    counts rows, and a tile of vectors is one of ``tile_of``; x has the vectors in the order of the
    list. So has y if it is packed, and zeros between those of two experts; after the last tile it
    stays as it was. Else y (pairs, rows) is in the order of rows and slots. The list must be
    complete when the launch before this one begins to write: see `Pack`, which waits for it.

    y[b] has the same bits whatever the other vectors are. Sums are taken in an order that ``cols``
    and the ``cut`` decide. Raises PtxgenError for F32 weights, a cut that does not fit, and an odd
    number of row groups of a gated product.
    """

    @property
    def params(self) -> tuple[Param, ...]:
        mixture, y_shape = self.mixture, packed_shape(self.vectors, self.rows)
        params = [Param("x", "f16", packed_shape(self.vectors, self.cols), Access.IN)]
        if self.heads:
            params.insert(0, Param("length", "u32"))
        if mixture is not None:
            params.append(Param("tile_of", "u32", ("tiles", 4), Access.IN))
            if not self.packs:
                params.append(Param("pair", "u32", ("vectors",), Access.IN))
            if mixture.weighted:
                params.append(Param("weight", "f32", ("products",), Access.IN))
        if self.residual:
            params.append(Param("residual", "f32", ("batch", "rows"), Access.IN))
        for part in self.parts:
            n = part.suffix
            params.append(Param(f"weights{n}", "u8", (part.layout.nbytes,), Access.IN))
            if self.gated:
                params.append(Param("up", "u8", (part.layout.nbytes,), Access.IN))
            if self.biases[part.number]:
                shape = (part.rows,) if mixture is None else (mixture.experts, part.rows)
                params.append(Param(f"bias{n}", "f32", shape, Access.IN))
                if self.gated:
                    params.append(Param("up_bias", "f32", shape, Access.IN))
            if self.packs:
                access = Access.OUT if mixture is None else Access.INOUT
                params.append(Param("y", "f16", y_shape, access))
            elif self.heads:
                of = self.heads[part.number]
                cache = (part.rows // of.dims, of.room, of.width)
                params.append(Param(f"y{n}", "f16", cache, Access.INOUT))
            else:
                params.append(Param(f"y{n}", "f32", ("products", part.rows), Access.OUT))
        return tuple(params)

    @property
    def tolerance(self) -> Tolerance:
        """Each rounding to f16 changes a number by up to 2^-11 of itself, and a weight may outweigh
        all others: it is rounded, and so are its scale and its minimum, if they are products; with
        a minimum, both are larger than the weight. A y of f16 is rounded once more, the error of a
        gate and of its other factor add up."""
        roundings = max(Halves(fmt).roundings for fmt in self.formats)
        ends = self.packs or bool(self.heads)
        return Tolerance(rtol=2.0**-11 * (self.pair * roundings + ends) + 1e-5)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        if self.mixture is not None:
            return {"y": self._of_experts(self.mixture, **inputs)}
        x = unpack(inputs["x"], self.vectors, self.cols)[: self.batch]
        outputs: dict[str, Array] = {}
        for part in self.parts:
            n = part.suffix
            names = (f"weights{n}", "up")[: self.pair]
            products = [x @ part.layout.unpack(inputs[m]).astype(np.float64).T for m in names]
            y = self._ended(products, part, inputs)
            if self.heads:
                outputs[f"y{n}"] = self._in_heads(part.number, y, inputs[f"y{n}"])
            else:
                outputs[f"y{n}"] = pack(y) if self.packs else y.astype(np.float32)
        return outputs

    def _in_heads(self, number: int, y: Array, before: Array) -> Array:
        """The cache with the product (batch, rows) of a matrix, and what is there beside it."""
        of = self.heads[number]
        heads = y.reshape(self.batch, -1, of.dims).transpose(1, 0, 2).astype(np.float16)
        made: Array = before.copy()
        made[:, : self.batch, of.start : of.start + of.dims] = heads
        return made

    def _ended(self, products: list[Array], part: PackedPart, inputs: dict[str, Any]) -> Array:
        """What becomes of the product of a matrix, or of a pair; biases of experts are added
        before."""
        y = np.stack(products) if self.gated else products[0]
        for step in self.epilogue_of(part):
            if self.mixture is None or not isinstance(step, Bias):
                y = step.apply(y, Reference(self, part, inputs, {}))
        return y

    def _of_experts(self, mixture: Mixture, **inputs: Any) -> Array:
        x = unpack(inputs["x"], self.vectors, self.cols)

        def product(name: str, expert: int, vectors: slice) -> Array:
            matrices = self.layout.unpack(inputs[name]).reshape(mixture.experts, self.rows, -1)
            made: Array = x[vectors] @ matrices[expert].astype(np.float64).T
            bias = "bias" if name == "weights" else "up_bias"
            return made + inputs[bias][expert] if self.biases[0] else made

        y = np.zeros((self.products, self.rows))
        if self.packs:
            y = unpack(inputs["y"], self.vectors, self.rows)
        for expert, first, count, _ in inputs["tile_of"].tolist():
            vectors = slice(first, first + count)
            names = ("weights", "up")[: self.pair]
            products = [product(name, expert, vectors) for name in names]
            made = self._ended(products, self.parts[0], inputs)
            if self.packs:
                y[vectors] = made
                y[first + count : ceil_div(first + count, GROUP) * GROUP] = 0
                continue
            pair = inputs["pair"][vectors]
            y[pair] = made * inputs["weight"][pair, None] if mixture.weighted else made
        return pack(y) if self.packs else y.astype(np.float32)

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        layouts = {f"weights{part.suffix}": part.layout for part in self.parts}
        layouts["up"] = self.layout
        inputs: dict[str, Any] = {}
        # What is bounded is as large as its bound, and its errors as large as the sums.
        scale = {"scale": 0.5 / self.cols**0.5} if self.f is not None and self.f.limit else {}
        if self.mixture is not None:
            m = self.mixture
            choice = random_choice(rng, self.batch, m.experts, m.used)
            lists = grouped(choice, m.experts, m.height, GROUP)
            inputs = {p.name: lists[p.name] for p in self.params if p.name in lists}
        for p in self.params:
            if p.name in inputs:
                continue
            if not p.is_pointer:
                inputs[p.name] = np.uint32(self.batch)
            elif p.name in layouts:
                layout = layouts[p.name]
                count = layout.rows * layout.cols // layout.format.block
                inputs[p.name] = layout.pack(random_blocks(layout.format, count, rng, **scale))
            elif p.name == "x":
                inputs["x"] = pack(rng.standard_normal((self.vectors, self.cols)))
            elif p.access is Access.INOUT and self.heads:
                inputs[p.name] = rng.standard_normal(self.shape_of(p)).astype(np.float16)
            elif p.access is Access.INOUT:
                inputs["y"] = pack(rng.standard_normal((self.vectors, self.rows)))
            elif p.access is Access.IN:
                inputs[p.name] = rng.standard_normal(self.shape_of(p)).astype(np.float32)
        return inputs

    def flops(self) -> int:
        rows = sum(part.rows for part in self.parts)
        return 2 * self.products * rows * self.cols * self.pair
