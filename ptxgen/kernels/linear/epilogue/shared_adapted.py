"""Low-rank adapters of a product of packed activations, whose CTAs share the work of A x."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.epilogue.own_adapted import OwnAdapted
from urdir.ptxgen.kernels.linear.prologue.norm import BegunNorm
from urdir.ptxgen.kernels.linear.steps import Part, Product, Reference
from urdir.ptxgen.spec import Array, ceil_div
from urdir.ptxgen.weights.packed import unpack

#: The most vectors: a lane looks at the adapter of each. The most ranks, as `Adapted` holds them,
#: and adapters, whose requests for the L2 cache are unrolled.
MOST_VECTORS, MOST_RANKS, MOST_SLOTS = 32, 32, 32
#: CTAs that count launches, the most CTAs that share the columns of a tile of ranks, and its ranks.
COUNTS, MOST_PARTS, TILE_RANKS = 1024, 8, 16
#: Bytes of a warp's sums of a tile, which the other warp adds to its own.
SUMS_NBYTES = 512


@dataclass(frozen=True, slots=True)
class SharedAdapted(OwnAdapted):
    """`OwnAdapted` of up to 32 vectors by `GemmWgmma`: the two warps of a CTA that copy nothing
    take item i, i + CTAs, ... of the first ``sms`` CTAs: 16 ranks of a matrix, a slot and some of
    the columns, for all vectors with the slot, on tensor cores. They leave the values of each of
    the ``parts`` of the columns in ``lora_words`` (8, 32, width, 2), then await those of all CTAs,
    and put the sums, rounded to f16, into shared memory.

    CTAs count launches in ``lora_counts`` (`COUNTS`,), as if there were that many of them.
    """

    sms: int = 132

    def table_nbytes(self, vectors: int) -> int:
        """Bytes of a barrier, the launch's number, slots, a of all (vectors, width) f16, and the
        sums of a warp."""
        return 16 + 4 * MOST_VECTORS + 2 * vectors * self.width + SUMS_NBYTES

    def scratch_at(self, product: Any) -> int:
        """Where the sums of a warp lie."""
        return int(product.memory.adapted_at) + self.table_nbytes(product.cut.vectors) - SUMS_NBYTES

    @property
    def rank_tiles(self) -> int:
        """Tiles of ranks of a matrix."""
        return ceil_div(self.rank, TILE_RANKS)

    def parts(self, product: Product) -> int:
        """CTAs that share the columns of a tile."""
        ctas = min(self.ctas(product), self.sms)
        return max(1, min(MOST_PARTS, ctas // self._tiles(product), product.cols // 256))

    def items(self, product: Product) -> int:
        """Tiles of ranks of all slots, times the parts of the columns."""
        return self._tiles(product) * self.parts(product)

    def _tiles(self, product: Product) -> int:
        return len(self.firsts(product)) * self.rank_tiles * self.slots

    def span(self, product: Product) -> int:
        """Ranks that a CTA takes: of the matrices of its part, and what lies between them."""
        firsts = [[first for first, _ in self.matrices(product, p)] for p in product.parts]
        return max(max(of) - min(of) + self.rank for of in firsts if of)

    def lowest(self, product: Product, part: Part) -> int:
        """The first of them."""
        of = [first for first, _ in self.matrices(product, part)]
        return min(min(of, default=0), self.width - self.span(product))

    def check(self, product: Product) -> None:
        super(SharedAdapted, self).check(product)
        fits = self.rank <= MOST_RANKS and product.batch <= MOST_VECTORS and self.element == "f16"
        if (
            not fits
            or self.slots > MOST_SLOTS
            or product.cols % 128
            or product.pair_shape
            or not product.packs_many
        ):
            raise PtxgenError(
                f"{product.name}: A x of {self.rank} ranks, {product.batch} vectors and "
                f"{product.cols} columns: up to {MOST_RANKS} and {MOST_VECTORS}, multiples of 128"
            )
        if self.ctas(product) > COUNTS:
            raise PtxgenError(f"{product.name}: A x of {self.ctas(product)} CTAs: up to {COUNTS}")

    def counts(self, product: Product) -> int:
        return COUNTS

    def suits(self, product: Product, sms: int) -> bool:
        return True  # the first ``sms`` CTAs are there at once, which `GemmWgmma` sees to

    def words(self) -> tuple[int, ...]:
        return MOST_PARTS, MOST_VECTORS, self.width, 2

    def apply(self, y: Array, of: Reference) -> Array:
        product, inputs = of.product, of.inputs
        x = unpack(inputs["x"], product.vectors, product.cols)[: product.batch]
        norm, factor = product.steps.find(BegunNorm), np.ones((product.batch, 1))
        factor = factor if norm is None else norm.apply(factor, of)
        slots = inputs["adapter"][inputs["sequence"]]
        scales = inputs["adapter_scale"][inputs["sequence"]].astype(np.float64)
        if "lora_words" not in of.outputs:
            counts = inputs["lora_counts"] + np.uint32(1)
            words = inputs["lora_words"].copy()
            parts_of = self.parts(product)
            parts = np.arange(product.cols) // 256 % parts_of
            for first, name in self.firsts(product):
                for row in np.flatnonzero(slots):
                    a = inputs[name][slots[row] - 1].astype(np.float64)
                    for number in range(parts_of):
                        some = (parts == number) * x[row]
                        words[number, row, first : first + self.rank, 0] = scales[row] * (a @ some)
            words[:, np.flatnonzero(slots), :, 1] = counts[:1].view(np.float32)
            of.outputs.update(lora_words=words, lora_counts=counts)
        made = np.array(y, np.float64)
        for _, name in self.matrices(product, of.part):
            target = (made if product.steps.gated else made[None])[int(name == "lora_b_up")]
            for row in np.flatnonzero(slots):
                a = inputs[name.replace("lora_b", "lora_a")][slots[row] - 1].astype(np.float64)
                low = scales[row] * factor[row] * (a @ x[row])
                target[row] += inputs[name][slots[row] - 1].astype(np.float64) @ low
        return made
