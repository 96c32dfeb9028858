"""Low-rank adapters of a product of one vector, whose CTAs share the work of A x."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.epilogue.own_adapted import OwnAdapted
from urdir.ptxgen.kernels.linear.epilogue.then import Continued
from urdir.ptxgen.kernels.linear.prologue.norm import Normed
from urdir.ptxgen.kernels.linear.steps import Product, Reference
from urdir.ptxgen.spec import Array, ceil_div

#: The most ranks, of both matrices of a gated pair: a lane of a warp awaits each a.
MOST_RANKS = 32
#: The most ranks that a CTA computes, one after the other.
MOST_EACH = 3


@dataclass(frozen=True, slots=True)
class SelfAdapted(OwnAdapted):
    """`OwnAdapted` of one vector: CTA i computes ranks i, i + CTAs, ... of ``lora`` as soon as it
    has x, and leaves them for all others in ``lora_words`` (width, 2) f32 (if the launch scales its
    sums by a norm's factor, before that). CTAs start in order, so that those with ranks never wait
    for one that has not started.
    """

    stem = "self_adapted"

    @property
    def text(self) -> str:
        return f"+ lora_b ({self.rank} ranks, {self.element}) * (scale * lora_a x'), by adapter"

    @property
    def shared_nbytes(self) -> int:
        return 128  # a sum of each warp

    def check(self, product: Product) -> None:
        super(SelfAdapted, self).check(product)
        if self.rank * product.steps.pair > MOST_RANKS or product.cluster > 1 or product.cols % 32:
            raise PtxgenError(
                f"{product.name}: A x of {self.rank} ranks and {product.cols} columns in clusters "
                f"of {product.cluster}: at most {MOST_RANKS} of a pair, whole units, no clusters"
            )
        if product.steps.has(Continued):
            raise PtxgenError(f"{product.name}: A x, and a recurrent kernel that takes the product")

    def each(self, product: Product) -> int:
        """Ranks of a CTA, at most."""
        return ceil_div(self.width, self.ctas(product))

    def counts(self, product: Product) -> int:
        return self.ctas(product)

    def words(self) -> tuple[int, ...]:
        return self.width, 2

    def suits(self, product: Product, sms: int) -> bool:
        return self.ctas(product) <= sms and self.each(product) <= MOST_EACH

    def make_inputs(self, product: Product, rng: np.random.Generator) -> dict[str, Any]:
        return {
            **super(SelfAdapted, self).make_inputs(product, rng),
            "sequence": np.array([self.sequences - 1], np.uint32),
            "adapter": np.full(self.sequences, self.slots, np.uint32),
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
            target = (made if of.product.steps.gated else made[None])[int(name == "lora_b_up")]
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
            if isinstance(step, Normed) and step.norm.is_factor:
                squares = np.mean(np.square(x.astype(np.float64)))
                factor = 1 / np.sqrt(squares + step.norm.eps)
            x = step.apply(x, Reference(product, product.parts[0], of.inputs, {}))
        scale = float(of.inputs["adapter_scale"][of.inputs["sequence"][0]])
        low = {}
        for first, name in self.firsts(product) if self._slot(of) else ():
            a = of.inputs[name][self._slot(of) - 1].astype(np.float64)
            low[first] = scale * (a @ x[0].astype(np.float64))
        return low, factor
