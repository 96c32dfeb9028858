"""The first product of low-rank adapters: a = A x, for the product that adds B a (`Adapted`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.epilogue.adapted import Element, check_slots, element_dtype
from urdir.ptxgen.kernels.linear.lora_examples import shrink_examples
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.kernels.row_threads import RowThreads
from urdir.ptxgen.render.kernel import field_values
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, Tolerance, ceil_div

#: CTAs of a launch from which on a CTA computes several ranks: two for each SM of a large GPU.
CTAS = 264
#: Rows up to which the launch requests B: a lane for each.
MOST_REQUESTS = 32
#: Ranks of a CTA at most: each takes a register for its sum.
MOST_EACH = 16


@dataclass(frozen=True)
class LoraShrink(RowThreads, KernelSpec):
    """lora[r] = scale * A x'[r] for the adapter of each row, of up to several ``matrices`` that
    multiply the same x; x' is x or its ``norm`` (an RMSNorm without bias).

    ``sequence`` (batch,) u32 is the sequence of a row, ``adapter`` (sequences,) u32 the number of
    its slot from 1 on (0: none) and ``adapter_scale`` (sequences,) f32 its scale. The A of matrix m
    is ``lora_a<m>`` (slots, rank, cols). Rows without an adapter get zeros; ``lora_slot`` (batch,)
    u32 repeats the slots by row. A CTA computes ``each`` of the ranks of a row.

    With ``experts`` each pair of a row and one of the ``used`` ones in ``expert`` (batch, used) u32
    is multiplied with the A of its expert: ``lora`` is (batch, used, ...), A (slots, experts, rank,
    cols), and x (batch, used, cols) if ``by_pair``: in the ``order`` (batch, used) u32 of pairs if
    ``ordered`` (`GroupExperts`).

    With ``outs``, the rows of the products, the B of each matrix, ``lora_b<m>`` (slots, outs,
    rank), are requested for the L2 cache, once for all rows with the same adapter: they come while
    the product reads its weights. So is A, where it does not `holds`, before x is there.

    The next launch, which adds B a, may start at once: it waits for this one, and reads nothing
    before that of the launch that makes x.
    """

    batch: int
    cols: int
    matrices: int
    slots: int
    rank: int
    sequences: int
    element: Element = "f16"
    norm: Norm | None = None
    experts: int = 0
    used: int = 1
    by_pair: bool = False
    ordered: bool = False
    outs: tuple[int, ...] = ()
    each: int = 1

    name = "lora_shrink"

    def __post_init__(self) -> None:
        check_slots(self.name, self.slots, self.rank)
        if min(self.batch, self.cols, self.matrices, self.sequences) < 1:
            raise PtxgenError(f"lora_shrink: {field_values(self)}: all from 1")
        if self.norm is not None and (self.norm.kind != "rms" or self.norm.bias):
            raise PtxgenError(f"lora_shrink: {self.norm}: only an RMSNorm without bias")
        plain = self.used == 1 and not (self.by_pair or self.ordered)
        if self.used < 1 or not (self.experts or plain):
            raise PtxgenError(f"lora_shrink: {self.used} of {self.experts} experts")
        if self.outs and (len(self.outs) != self.matrices or self.experts):
            raise PtxgenError(f"lora_shrink: rows {self.outs} of {self.matrices} matrices")
        if self.outs and self.batch > MOST_REQUESTS:
            raise PtxgenError(
                f"lora_shrink: requests B of {self.batch} rows: up to {MOST_REQUESTS}"
            )
        if self.rank % self.each or not 1 <= self.each <= MOST_EACH:
            raise PtxgenError(f"lora_shrink: {self.each} ranks a CTA of {self.rank}")

    @property
    def cut(self) -> LoraShrink:
        """The same with more ranks for a CTA the more rows there are."""
        each, ranks = 1, self.batch * self.used * self.width
        while each < MOST_EACH and self.rank % (2 * each) == 0 and ranks > each * CTAS:
            each *= 2
        return replace(self, each=each)

    @property
    def warps(self) -> int:
        """Warps per CTA: 32 values per thread, so that an SM has room for the products before and
        after it."""
        return min(16, ceil_div(self.cols, 32 * 32))

    @property
    def width(self) -> int:
        """Values of a row of the result."""
        return self.matrices * self.rank

    @property
    def suffixes(self) -> tuple[str, ...]:
        """What follows the names of the parameters of each matrix."""
        return tuple(str(number or "") for number in range(self.matrices))

    @property
    def holds(self) -> bool:
        """Whether a thread has its values of all A in registers, and loads them before x."""
        return self.each * self.vector * self.steps <= 32

    @property
    def params(self) -> tuple[Param, ...]:
        weight = self.norm is not None and self.norm.weight
        of = ("batch", "used") if self.experts else ("batch",)
        a = (self.slots, *(("experts",) if self.experts else ()), self.rank, "cols")
        return Param.given(
            Param("x", "f32", (*(of if self.by_pair else of[:1]), "cols"), Access.IN),
            weight and Param("weight", "f32", ("cols",), Access.IN),
            Param("sequence", "u32", ("batch",), Access.IN),
            Param("adapter", "u32", ("sequences",), Access.IN),
            Param("adapter_scale", "f32", ("sequences",), Access.IN),
            self.experts and Param("expert", "u32", of, Access.IN),
            self.ordered and Param("order", "u32", of, Access.IN),
            *(Param(f"lora_a{suffix}", self.element, a, Access.IN) for suffix in self.suffixes),
            *(
                Param(f"lora_b{suffix}", self.element, (self.slots, rows, self.rank), Access.IN)
                for suffix, rows in zip(self.suffixes[: len(self.outs)], self.outs, strict=True)
            ),
            Param("lora", "f32", (*of, self.width), Access.OUT),
            Param("lora_slot", "u32", ("batch",), Access.OUT),
        )

    @property
    def launch_shape(self) -> LaunchShape:
        grid = (self.width // self.each, self.batch * self.used, 1)
        return LaunchShape(grid=grid, block=(32 * self.warps, 1, 1))

    @property
    def tolerance(self) -> Tolerance:
        return Tolerance(rtol=3e-6)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        return shrunk(self, inputs["x"], inputs)

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        dtype = np.dtype(element_dtype(self.element))
        inputs: dict[str, Any] = {}
        for p in self.params:
            if p.access is Access.IN:
                values = rng.standard_normal(self.shape_of(p))
                inputs[p.name] = values.astype(dtype if p.name.startswith("lora_") else np.float32)
        inputs["sequence"] = rng.integers(0, self.sequences, self.batch).astype(np.uint32)
        if self.experts:
            chosen = [rng.permutation(self.experts)[: self.used] for _ in range(self.batch)]
            inputs["expert"] = np.array(chosen, np.uint32)
        if self.ordered:
            order = rng.permutation(self.batch * self.used).astype(np.uint32)
            inputs["order"] = order.reshape(self.batch, self.used)
        adapter = np.arange(self.sequences) % (self.slots + 1)
        inputs["adapter"] = adapter[::-1].astype(np.uint32)
        return inputs

    def bytes_moved(self) -> int:
        """As if each row had an adapter of its own, up to the number of slots."""
        size = np.dtype(element_dtype(self.element)).itemsize
        used = min(self.batch, self.slots)
        return 4 * self.batch * (self.cols + self.width) + used * self.width * self.cols * size

    @classmethod
    def examples(cls) -> Mapping[str, LoraShrink]:
        return shrink_examples(cls)

    def flops(self) -> int:
        return 2 * self.batch * self.width * self.cols


def shrunk(spec: LoraShrink, x: Array, inputs: dict[str, Any]) -> dict[str, Array]:
    """``lora`` and ``lora_slot``, of x as it is multiplied."""
    x = x.astype(np.float64)
    if spec.norm is not None:
        x = spec.norm(x, inputs.get("weight"))
    slots = inputs["adapter"][inputs["sequence"]]
    lora = np.zeros((spec.batch, spec.used, spec.width))
    if spec.ordered and spec.by_pair:
        x = x.reshape(-1, spec.cols)[np.argsort(inputs["order"].reshape(-1))]
    x = x.reshape(spec.batch, -1, spec.cols)
    for row, slot in enumerate(slots):
        for number in range(spec.used) if slot else ():
            a = [inputs[f"lora_a{suffix}"][slot - 1] for suffix in spec.suffixes]
            if spec.experts:
                a = [of[inputs["expert"][row, number]] for of in a]
            scale = float(inputs["adapter_scale"][inputs["sequence"][row]])
            of_pair = x[row, number if spec.by_pair else 0]
            lora[row, number] = scale * (np.concatenate(a).astype(np.float64) @ of_pair)
    found = lora.astype(np.float32).reshape(spec.shape_of(spec.param("lora")))
    return {"lora": found, "lora_slot": slots.astype(np.uint32)}
