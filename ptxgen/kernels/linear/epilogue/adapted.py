"""Low-rank adapters of a product (LoRA, Hu et al. 2021, arXiv 2106.09685, eq. 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.prologue.norm import BegunNorm
from urdir.ptxgen.kernels.linear.steps import Epilogue, Part, Product, Reference
from urdir.ptxgen.spec import Access, Array, Param

#: Ranks are multiples of it: a thread reads as many values at once.
RANKS = 8
Element = Literal["f16", "f32"]


@dataclass(frozen=True, slots=True)
class Adapted(Epilogue):
    """y += B a: each vector has the adapter in one of ``slots``, or none. ``lora`` (batch, several
    ranks) f32 has the a of a vector for several matrices (`LoraShrink`), ``lora_slot`` (batch,) u32
    the number of its slot from 1 on, 0 for none.

    ``places`` says which a in ``lora`` is that of each matrix of the launch, a pair's other one
    included; None for a matrix without adapters. There are ``count`` of them. The matrices B of all
    slots are ``lora_b`` (slots, rows, rank), of the other product of a gated pair ``lora_b_up``.

    Products of packed activations round a to f16, as they do x, and add B a on tensor cores to the
    sums that other steps begin with: before the factor of a norm that has begun (`BegunNorm`), of
    an a without it.
    """

    slots: int
    rank: int
    element: Element = "f16"
    places: tuple[int | None, ...] = (0,)
    count: int = 1

    stem = "adapted"
    #: Whether the product computes a.
    computes: ClassVar[bool] = False

    @property
    def text(self) -> str:
        return f"+ lora_b (slots, rows, {self.rank}) {self.element} * lora, by lora_slot"

    def check(self, product: Product) -> None:
        matrices = product.steps.pair + len(product.others)
        given = [place for place in self.places if place is not None]
        if (
            len(self.places) != matrices
            or not given
            or not 0 <= min(given) <= max(given) < self.count
        ):
            raise PtxgenError(
                f"{product.name}: adapters at {self.places} of {self.count} for {matrices} matrices"
            )
        check_slots(product.name, self.slots, self.rank)

    @property
    def width(self) -> int:
        """Values of a row of ``lora``."""
        return self.count * self.rank

    def of_part(self, product: Product, part: Part) -> bool:
        return bool(self.matrices(product, part))

    def matrices(self, product: Product, part: Part) -> tuple[tuple[int, str], ...]:
        """Of each adapted matrix of a part where its a begins in ``lora``, and its parameter."""
        names = [(part.number, f"lora_b{part.suffix}"), (1, "lora_b_up")][: product.steps.pair]
        found = [(self.places[number], name) for number, name in names]
        return tuple((self.rank * place, name) for place, name in found if place is not None)

    def params(self, product: Product) -> tuple[Param, ...]:
        return (
            Param("lora", "f32", ("batch", self.width), Access.IN),
            Param("lora_slot", "u32", ("batch",), Access.IN),
        )

    def part_params(self, product: Product, part: Part) -> tuple[Param, ...]:
        shape = (self.slots, part.rows, self.rank)
        names = self.matrices(product, part)
        return tuple(Param(name, self.element, shape, Access.IN) for _, name in names)

    def make_inputs(self, product: Product, rng: np.random.Generator) -> dict[str, Any]:
        inputs: dict[str, Any] = {"lora_slot": random_slots(product.batch, self.slots, rng)}
        for part in product.parts:
            for param in self.part_params(product, part):
                values = rng.standard_normal(product.shape_of(param)) / self.rank
                inputs[param.name] = values.astype(np.dtype(element_dtype(self.element)))
        return inputs

    def apply(self, y: Array, of: Reference) -> Array:
        made = np.array(y, np.float64)
        products = made if of.product.steps.gated else made[None]
        low = of.inputs["lora"].astype(np.float64)
        norm = of.product.steps.find(BegunNorm) if of.product.packs_many else None
        low = low if norm is None else norm.apply(low, of)
        for first, name in self.matrices(of.product, of.part):
            each = low[:, first : first + self.rank]
            target = products[1 if name == "lora_b_up" else 0]
            for row, slot in enumerate(of.inputs["lora_slot"]):
                if slot:
                    target[row] += of.inputs[name][slot - 1].astype(np.float64) @ each[row]
        return made


def check_slots(name: str, slots: int, rank: int) -> None:
    """Raise PtxgenError for no slots, and for ranks that threads do not read."""
    if slots < 1 or rank < 1 or rank % RANKS:
        raise PtxgenError(f"{name}: {slots} adapters of rank {rank}: multiples of {RANKS}")


def random_slots(count: int, slots: int, rng: np.random.Generator) -> Array:
    """Slots of this many vectors, of which some have none."""
    found: Array = rng.permutation(np.arange(count) % (slots + 1)).astype(np.uint32)
    return found


def element_dtype(element: Element) -> str:
    """The numpy type of values of adapters."""
    return {"f16": "float16", "f32": "float32"}[element]
