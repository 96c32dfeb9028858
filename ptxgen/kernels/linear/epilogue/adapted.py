"""Low-rank adapters of a product (LoRA, Hu et al. 2021, arXiv 2106.09685, eq. 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.steps import Epilogue, Part, Product, Reference
from urdir.ptxgen.spec import Access, Array, Param

#: Ranks are multiples of it: a thread reads as many values at once.
RANKS = 8
Element = Literal["f16", "f32"]


@dataclass(frozen=True, slots=True)
class Adapted(Epilogue):
    """y += B a: each vector has the adapter in one of ``slots``, or none. ``lora`` (batch, rank of
    all adapted matrices) f32 has the a of a vector for each of them (`LoraShrink`), ``lora_slot``
    (batch,) u32 the number of its slot from 1 on, 0 for none.

    The matrices B of all slots are ``lora_b`` (slots, rows, rank), of the other product of a gated
    pair ``lora_b_up``. ``of``: which of several matrices have some, a pair's other one included;
    empty: all.
    """

    slots: int
    rank: int
    element: Element = "f16"
    of: tuple[bool, ...] = ()

    stem = "adapted"

    @property
    def text(self) -> str:
        return f"+ lora_b (slots, rows, {self.rank}) {self.element} * lora, by lora_slot"

    def check(self, product: Product) -> None:
        matrices = product.pair + len(product.others)
        if self.of and (len(self.of) != matrices or not any(self.of)):
            raise PtxgenError(f"{product.name}: adapted is {self.of} of {matrices} matrices")
        check_slots(product.name, self.slots, self.rank)

    def has(self, matrix: int) -> bool:
        """Whether matrix number ``matrix`` of the launch is adapted."""
        return not self.of or self.of[matrix]

    def place(self, matrix: int) -> int:
        """Where the a for a matrix begins in a row of ``lora``."""
        return self.rank * sum(map(self.has, range(matrix)))

    def width(self, product: Product) -> int:
        """Values of a row of ``lora``."""
        return self.place(product.pair + len(product.others))

    def of_part(self, part: Part) -> bool:
        # of a gated pair, which has no others, both are in the first part
        return part.number > 0 and self.has(part.number) or part.number == 0

    def matrices(self, product: Product, part: Part) -> tuple[tuple[int, str], ...]:
        """The number and the parameter of each adapted matrix of a part."""
        names = [(part.number, f"lora_b{part.suffix}"), (1, "lora_b_up")][: product.pair]
        return tuple((number, name) for number, name in names if self.has(number))

    def params(self, product: Product) -> tuple[Param, ...]:
        return (
            Param("lora", "f32", ("batch", self.width(product)), Access.IN),
            Param("lora_slot", "u32", ("batch",), Access.IN),
        )

    def part_params(self, product: Product, part: Part) -> tuple[Param, ...]:
        shape = (self.slots, part.rows, self.rank)
        names = self.matrices(product, part)
        return tuple(Param(name, self.element, shape, Access.IN) for _, name in names)

    def make_inputs(self, product: Product, rng: np.random.Generator) -> dict[str, Any]:
        inputs: dict[str, Any] = {"lora_slot": random_slots(product.batch, self.slots, rng)}
        for part in product.parts:
            for param in self.part_params(product, part) if self.of_part(part) else ():
                values = rng.standard_normal(product.shape_of(param)) / self.rank
                inputs[param.name] = values.astype(np.dtype(element_dtype(self.element)))
        return inputs

    def apply(self, y: Array, of: Reference) -> Array:
        made = np.array(y, np.float64)
        products = made if of.product.gated else made[None]
        for number, name in self.matrices(of.product, of.part):
            first = self.place(number)
            each = of.inputs["lora"][:, first : first + self.rank].astype(np.float64)
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
    """Slots of so many vectors, of which some have none."""
    found: Array = rng.permutation(np.arange(count) % (slots + 1)).astype(np.uint32)
    return found


def element_dtype(element: Element) -> str:
    """The numpy type of values of adapters."""
    return {"f16": "float16", "f32": "float32"}[element]


def adapted_where(
    slots: int, rank: int, element: Element, given: Sequence[bool]
) -> tuple[Adapted, ...]:
    """The step for matrices of which these are adapted; none if no matrix is."""
    if not any(given):
        return ()
    return (Adapted(slots, rank, element, () if all(given) else tuple(given)),)
