"""Low-rank adapters of a product of packed activations, whose CTAs share the work of A x."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.epilogue.self_adapted import SelfAdapted
from urdir.ptxgen.kernels.linear.prologue.norm import BegunNorm
from urdir.ptxgen.kernels.linear.steps import Product, Reference
from urdir.ptxgen.spec import Access, Array, Param
from urdir.ptxgen.weights.packed import unpack

#: The most vectors: a lane looks at the adapter of each. The most ranks, as `Adapted` holds them,
#: and adapters, whose requests for the L2 cache are unrolled.
MOST_VECTORS, MOST_RANKS, MOST_SLOTS = 32, 32, 32
#: CTAs that count launches, and warps of a CTA that share a rank's columns.
COUNTS, PARTS = 1024, 2


@dataclass(frozen=True, slots=True)
class SharedAdapted(SelfAdapted):
    """`SelfAdapted` of up to 32 vectors by `GemmWgmma`: the two warps of a CTA that copy nothing
    take (rank, slot) i, i + CTAs, ... of the first ``sms`` CTAs, half of the columns each, for all
    vectors with the slot. They leave the values of each half in ``lora_words`` (2, 32, width,
    2), then await those of all CTAs, and put the sums, rounded to f16, into shared memory.

    CTAs count launches in ``lora_counts`` (`COUNTS`,), as if there were so many of them.
    """

    sms: int = 132

    stem = "adapted"
    computes = True

    @property
    def shared_nbytes(self) -> int:
        return 0  # of the ring's kernel: see `table_nbytes`

    def table_nbytes(self, vectors: int) -> int:
        """Bytes of a barrier, the launch's number, slots, and a of all (vectors, width) f16."""
        return 16 + 4 * MOST_VECTORS + 2 * vectors * self.width

    def check(self, product: Product) -> None:
        super(SelfAdapted, self).check(product)
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

    def ctas(self, product: Product) -> int:
        """CTAs of the launch."""
        across, down, _ = product.launch_shape.grid
        return across * down

    def params(self, product: Product) -> tuple[Param, ...]:
        words = (PARTS, MOST_VECTORS, self.width, 2)
        return (
            Param("sequence", "u32", ("batch",), Access.IN),
            Param("adapter", "u32", (self.sequences,), Access.IN),
            Param("adapter_scale", "f32", (self.sequences,), Access.IN),
            Param("lora_words", "f32", words, Access.INOUT),
            Param("lora_counts", "u32", (COUNTS,), Access.INOUT),
        )

    def make_inputs(self, product: Product, rng: np.random.Generator) -> dict[str, Any]:
        adapter = rng.permutation(np.arange(self.sequences) % (self.slots + 1))
        return {
            **super(SharedAdapted, self).make_inputs(product, rng),
            "sequence": rng.integers(0, self.sequences, product.batch).astype(np.uint32),
            "adapter": adapter.astype(np.uint32),
            "lora_words": np.zeros((PARTS, MOST_VECTORS, self.width, 2), np.float32),
            "lora_counts": np.full(COUNTS, 7, np.uint32),
        }

    def apply(self, y: Array, of: Reference) -> Array:
        product, inputs = of.product, of.inputs
        x = unpack(inputs["x"], product.vectors, product.cols)[: product.batch]
        norm, factor = product.find(BegunNorm), np.ones((product.batch, 1))
        factor = factor if norm is None else norm.apply(factor, of)
        slots = inputs["adapter"][inputs["sequence"]]
        scales = inputs["adapter_scale"][inputs["sequence"]].astype(np.float64)
        if "lora_words" not in of.outputs:
            counts = inputs["lora_counts"] + np.uint32(1)
            words = inputs["lora_words"].copy()
            halves = (np.arange(product.cols) // 128 * 8 + np.arange(product.cols) % 32 // 4) // 32
            for first, name in self.firsts(product):
                for row in np.flatnonzero(slots):
                    a = inputs[name][slots[row] - 1].astype(np.float64)
                    for half in range(PARTS):
                        part = (halves % PARTS == half) * x[row]
                        words[half, row, first : first + self.rank, 0] = scales[row] * (a @ part)
            words[:, np.flatnonzero(slots), :, 1] = counts[:1].view(np.float32)
            of.outputs.update(lora_words=words, lora_counts=counts)
        made = np.array(y, np.float64)
        for _, name in self.matrices(product, of.part):
            target = (made if product.gated else made[None])[int(name == "lora_b_up")]
            for row in np.flatnonzero(slots):
                a = inputs[name.replace("lora_b", "lora_a")][slots[row] - 1].astype(np.float64)
                low = scales[row] * factor[row] * (a @ x[row])
                target[row] += inputs[name][slots[row] - 1].astype(np.float64) @ low
        return made
