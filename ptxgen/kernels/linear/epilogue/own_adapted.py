"""Low-rank adapters of a product that computes A x itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.kernels.exchange.spec import POLLS
from urdir.ptxgen.kernels.linear.epilogue.adapted import Adapted, element_dtype
from urdir.ptxgen.kernels.linear.steps import Part, Product
from urdir.ptxgen.spec import Access, Param


@dataclass(frozen=True, slots=True)
class OwnAdapted(Adapted):
    """`Adapted` without `LoraShrink`: y += B (scale * A x). The adapter is ``adapter`` (sequences,)
    u32 of each vector's ``sequence`` (batch,) u32, with its ``adapter_scale``; A are ``lora_a``
    (slots, rank, cols), as B are ``lora_b``.

    CTAs share the work of A x: each leaves some values for all others in ``lora_words`` f32, in
    pairs of a value and, as bits, the number of the launch, which each CTA counts by itself in
    ``lora_counts`` u32. A CTA awaits the words once it has its sums.
    """

    sequences: int = 1
    polls: int = POLLS

    computes = True

    def ctas(self, product: Product) -> int:
        """CTAs of the launch."""
        across, down, _ = product.launch_shape.grid
        return across * down

    def counts(self, product: Product) -> int:
        """Places for numbers of launches: all launches with as many count in the same ones."""
        raise NotImplementedError

    def words(self) -> tuple[int, ...]:
        """The shape of ``lora_words``."""
        raise NotImplementedError

    def suits(self, product: Product, sms: int) -> bool:
        """Whether it is worth it on a device of this many SMs, and all CTAs are there at once."""
        raise NotImplementedError

    def firsts(self, product: Product) -> tuple[tuple[int, str], ...]:
        """Where the ranks of each adapted matrix begin, and the name of its A."""
        found = [each for part in product.parts for each in self.matrices(product, part)]
        return tuple((first, name.replace("lora_b", "lora_a")) for first, name in sorted(found))

    def params(self, product: Product) -> tuple[Param, ...]:
        return (
            Param("sequence", "u32", ("batch",), Access.IN),
            Param("adapter", "u32", (self.sequences,), Access.IN),
            Param("adapter_scale", "f32", (self.sequences,), Access.IN),
            Param("lora_words", "f32", self.words(), Access.INOUT),
            Param("lora_counts", "u32", (self.counts(product),), Access.INOUT),
        )

    def part_params(self, product: Product, part: Part) -> tuple[Param, ...]:
        b = super(OwnAdapted, self).part_params(product, part)
        shape = (self.slots, self.rank, product.cols)
        names = (param.name.replace("lora_b", "lora_a") for param in b)
        return (*(Param(name, self.element, shape, Access.IN) for name in names), *b)

    def make_inputs(self, product: Product, rng: np.random.Generator) -> dict[str, Any]:
        inputs: dict[str, Any] = {}
        for part in product.parts:
            for param in self.part_params(product, part):
                values = rng.standard_normal(product.shape_of(param))
                values /= 1 if param.name.startswith("lora_a") else self.rank
                inputs[param.name] = values.astype(np.dtype(element_dtype(self.element)))
        adapter = rng.permutation(np.arange(self.sequences) % (self.slots + 1))
        return {
            **inputs,
            "sequence": rng.integers(0, self.sequences, product.batch).astype(np.uint32),
            "adapter": adapter.astype(np.uint32),
            "adapter_scale": rng.uniform(0.5, 2, self.sequences).astype(np.float32),
            "lora_words": np.zeros(self.words(), np.float32),
            "lora_counts": np.full(self.counts(product), 7, np.uint32),
        }
