"""The second product of low-rank adapters where no product takes it as a step: of experts and of
routers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.epilogue.adapted import (
    Element,
    check_slots,
    element_dtype,
    random_slots,
)
from urdir.ptxgen.render.kernel import field_values
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, Tolerance, ceil_div

#: Rows of a CTA: a thread has one.
THREADS = 128


@dataclass(frozen=True)
class LoraExpand(KernelSpec):
    """y += B a of each pair of a row and one of its ``used`` experts: y is (batch, used, rows), or
    if ``summed`` (batch, rows), to which the pairs' results are added, times their ``weight``.

    ``lora`` (batch, used, count * rank) f32 has the a at ``place`` (`LoraShrink`), ``lora_slot``
    (batch,) u32 the slots of rows from 1 on, 0 for none, ``expert`` (batch, used) u32 the experts.
    If ``ordered``, y (pairs, rows) is in the ``order`` (batch, used) u32 of pairs (`GroupExperts`).
    B is ``lora_b`` (slots, experts, rows, rank); of 1 expert there is no ``expert``.
    """

    batch: int
    rows: int
    slots: int
    rank: int
    experts: int
    used: int
    element: Element = "f16"
    place: int = 0
    count: int = 1
    summed: bool = False
    ordered: bool = False

    name = "lora_expand"

    def __post_init__(self) -> None:
        check_slots(self.name, self.slots, self.rank)
        if min(self.batch, self.rows, self.experts, self.used, self.count) < 1:
            raise PtxgenError(f"lora_expand: {field_values(self)}: all from 1")
        if not 0 <= self.place < self.count:
            raise PtxgenError(f"lora_expand: place {self.place} of {self.count}")

    @property
    def width(self) -> int:
        """Values of ``lora`` of a pair."""
        return self.count * self.rank

    @property
    def params(self) -> tuple[Param, ...]:
        pairs, rows = ("batch", "used"), ("rows",)
        return Param.given(
            Param("lora", "f32", (*pairs, self.width), Access.IN),
            Param("lora_slot", "u32", ("batch",), Access.IN),
            Param("lora_b", self.element, (self.slots, "experts", *rows, "rank"), Access.IN),
            self.experts > 1 and Param("expert", "u32", pairs, Access.IN),
            self.ordered and Param("order", "u32", pairs, Access.IN),
            self.summed and Param("weight", "f32", pairs, Access.IN),
            Param("y", "f32", ("batch", *rows) if self.summed else (*pairs, *rows), Access.INOUT),
        )

    @property
    def launch_shape(self) -> LaunchShape:
        vectors = self.batch * (1 if self.summed else self.used)
        return LaunchShape(grid=(ceil_div(self.rows, THREADS), vectors, 1), block=(THREADS, 1, 1))

    @property
    def tolerance(self) -> Tolerance:
        return Tolerance(rtol=2e-6)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        first = self.place * self.rank
        low = inputs["lora"].astype(np.float64)[..., first : first + self.rank]
        y = inputs["y"].astype(np.float64).copy()
        order = inputs["order"].reshape(-1) if self.ordered else np.arange(self.batch * self.used)
        places = np.argsort(order).reshape(self.batch, self.used)
        for row, slot in enumerate(inputs["lora_slot"]):
            for number in range(self.used) if slot else ():
                expert = inputs["expert"][row, number] if self.experts > 1 else 0
                b = inputs["lora_b"][slot - 1, expert].astype(np.float64)
                if self.summed:
                    y[row] += float(inputs["weight"][row, number]) * (b @ low[row, number])
                else:
                    y.reshape(-1, self.rows)[places[row, number]] += b @ low[row, number]
        return {"y": y.astype(np.float32)}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        dtype = np.dtype(element_dtype(self.element))
        inputs: dict[str, Any] = {}
        for p in self.params:
            values = rng.standard_normal(self.shape_of(p))
            inputs[p.name] = values.astype(dtype if p.name == "lora_b" else np.float32)
        inputs["lora_slot"] = random_slots(self.batch, self.slots, rng)
        if self.ordered:
            order = rng.permutation(self.batch * self.used).astype(np.uint32)
            inputs["order"] = order.reshape(self.batch, self.used)
        if self.experts == 1:
            return inputs
        chosen = [rng.permutation(self.experts)[: self.used] for _ in range(self.batch)]
        inputs["expert"] = np.array(chosen, np.uint32)
        return inputs

    @classmethod
    def examples(cls) -> dict[str, LoraExpand]:
        return {
            "one pair": cls(1, 5, 1, 8, 2, 1),
            "no experts": cls(6, 9, 2, 8, 1, 1),
            "pairs": cls(5, 133, 2, 16, 4, 2, "f32", place=1, count=2),
            "ordered": cls(4, 130, 2, 8, 4, 3, ordered=True),
            "summed": cls(3, 257, 2, 24, 6, 3, summed=True),
        }

    def flops(self) -> int:
        return 2 * self.batch * self.used * self.rows * self.rank
