"""Low-rank adapters of a product of one vector, whose CTAs share the work of A x."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.exchange.spec import POLLS
from urdir.ptxgen.kernels.linear.epilogue.adapted import Adapted, element_dtype
from urdir.ptxgen.kernels.linear.epilogue.then import Continued
from urdir.ptxgen.kernels.linear.prologue.norm import Normed
from urdir.ptxgen.kernels.linear.steps import Part, Product, Reference
from urdir.ptxgen.spec import Access, Array, Param, ceil_div

#: The most ranks, of both matrices of a gated pair: a lane of a warp awaits each a.
MOST_RANKS = 32
#: The most ranks that a CTA computes, one after the other.
MOST_EACH = 3


@dataclass(frozen=True, slots=True)
class SelfAdapted(Adapted):
    """`Adapted` without `LoraShrink`: y += B (scale * A x). The adapter is ``adapter`` (sequences,)
    u32 of the vector's ``sequence`` (1,) u32, with its ``adapter_scale``; A are ``lora_a`` (slots,
    rank, cols), as B are ``lora_b``.

    CTA i computes ranks i, i + CTAs, ... of ``lora`` as soon as it has x, and leaves them for all
    others in ``lora_words`` (width, 2) f32: the value (if the launch scales its sums by a norm's
    factor, before that), and as bits the number of the launch, which each CTA counts by itself in
    ``lora_counts`` (CTAs,) u32. A CTA awaits the words once it has its sums. CTAs start in order,
    so that those with ranks never wait for one that has not started.
    """

    sequences: int = 1
    polls: int = POLLS

    stem: ClassVar[str] = "self_adapted"

    @property
    def text(self) -> str:
        return f"+ lora_b ({self.rank} ranks, {self.element}) * (scale * lora_a x'), by adapter"

    @property
    def shared_nbytes(self) -> int:
        return 128  # a sum of each warp

    def check(self, product: Product) -> None:
        super(SelfAdapted, self).check(product)
        if self.rank * product.pair > MOST_RANKS or product.cluster > 1 or product.cols % 32:
            raise PtxgenError(
                f"{product.name}: A x of {self.rank} ranks and {product.cols} columns in clusters "
                f"of {product.cluster}: at most {MOST_RANKS} of a pair, whole units, no clusters"
            )
        if product.has(Continued):
            raise PtxgenError(f"{product.name}: A x, and a recurrent kernel that takes the product")

    def each(self, product: Product) -> int:
        """Ranks of a CTA, at most."""
        return ceil_div(self.width, self.ctas(product))

    def ctas(self, product: Product) -> int:
        """CTAs of the launch."""
        across, down, _ = product.launch_shape.grid
        return across * down

    def counts(self, product: Product) -> int:
        """CTAs that count launches: those of others that have as many count on."""
        return self.ctas(product)

    def suits(self, product: Product, sms: int) -> bool:
        """Whether it is worth it on a device of so many SMs, and all CTAs are there at once."""
        return self.ctas(product) <= sms and self.each(product) <= MOST_EACH

    def firsts(self, product: Product) -> tuple[tuple[int, str], ...]:
        """Where the ranks of each adapted matrix begin, and the name of its A."""
        found = [each for part in product.parts for each in self.matrices(product, part)]
        return tuple((first, name.replace("lora_b", "lora_a")) for first, name in sorted(found))

    def params(self, product: Product) -> tuple[Param, ...]:
        return (
            Param("sequence", "u32", (1,), Access.IN),
            Param("adapter", "u32", (self.sequences,), Access.IN),
            Param("adapter_scale", "f32", (self.sequences,), Access.IN),
            Param("lora_words", "f32", (self.width, 2), Access.INOUT),
            Param("lora_counts", "u32", (self.counts(product),), Access.INOUT),
        )

    def part_params(self, product: Product, part: Part) -> tuple[Param, ...]:
        b = super(SelfAdapted, self).part_params(product, part)
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
        launches = np.full(self.counts(product), 7, np.uint32)
        return {
            **inputs,
            "sequence": np.array([self.sequences - 1], np.uint32),
            "adapter": np.full(self.sequences, self.slots, np.uint32),
            "adapter_scale": rng.uniform(0.5, 2, self.sequences).astype(np.float32),
            "lora_words": np.zeros((self.width, 2), np.float32),
            "lora_counts": launches,
        }

    def apply(self, y: Array, of: Reference) -> Array:
        low, factor = self._low(of)
        if "lora_words" not in of.outputs:
            counts = of.inputs["lora_counts"] + np.uint32(1)
            words = of.inputs["lora_words"].copy()
            for first, values in low.items():
                words[first : first + self.rank, 0] = values / factor
                words[first : first + self.rank, 1] = counts[:1].view(np.float32)
            of.outputs.update(lora_words=words, lora_counts=counts)
        made = np.array(y, np.float64)
        for first, name in self.matrices(of.product, of.part) if low else ():
            target = (made if of.product.gated else made[None])[int(name == "lora_b_up")]
            b = of.inputs[name][self._slot(of) - 1].astype(np.float64)
            target[0] += b @ low[first]
        return made

    def _slot(self, of: Reference) -> int:
        return int(of.inputs["adapter"][of.inputs["sequence"][0]])

    def _low(self, of: Reference) -> tuple[dict[int, Array], float]:
        """scale * A x' of each adapted matrix, by the place of its first rank, and the factor with
        which sums are multiplied; nothing without an adapter."""
        x, product, factor = of.inputs["x"], of.product, 1.0
        for step in product.prologue:
            if isinstance(step, Normed) and not step.is_first:
                squares = np.mean(np.square(x.astype(np.float64)))
                factor = 1 / np.sqrt(squares + step.norm.eps)
            x = step.apply(x, Reference(product, product.parts[0], of.inputs, {}))
        scale = float(of.inputs["adapter_scale"][of.inputs["sequence"][0]])
        low = {}
        for first, name in self.firsts(product) if self._slot(of) else ():
            a = of.inputs[name][self._slot(of) - 1].astype(np.float64)
            low[first] = scale * (a @ x[0].astype(np.float64))
        return low, factor
