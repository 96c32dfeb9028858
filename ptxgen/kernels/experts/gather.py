"""All experts of a matrix, from a cache and from host memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.experts.place import parts_of, state_words
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param

#: Threads of a CTA.
THREADS = 512


@dataclass(frozen=True)
class GatherExperts(KernelSpec):
    """Copy the ``experts`` of a matrix, ``expert_nbytes`` each, to one place: those in slots of a
    cache (``state``, see `PlaceExperts`) from there, others from ``source``, which may be host
    memory that the device has mapped, and ``tail`` bytes behind all of them.

    Raises PtxgenError unless bytes are multiples of 16.
    """

    experts: int
    slots: int
    expert_nbytes: int
    tail: int
    ctas: int

    name = "gather_experts"

    def __post_init__(self) -> None:
        if self.expert_nbytes < 16 or self.expert_nbytes % 16 or self.tail < 0 or self.tail % 16:
            raise PtxgenError(
                f"gather_experts: experts of {self.expert_nbytes} bytes, {self.tail} behind them: "
                "multiples of 16"
            )
        if not 1 <= self.slots <= self.experts or self.ctas < 1:
            raise PtxgenError(
                f"gather_experts: {self.slots} slots for {self.experts} experts, {self.ctas} CTAs: "
                "at least one, no more slots than experts"
            )

    @property
    def words(self) -> int:
        """Words of the state."""
        return state_words(self.experts, self.slots)

    @property
    def all_nbytes(self) -> int:
        """Bytes of the matrix."""
        return self.experts * self.expert_nbytes + self.tail

    @property
    def params(self) -> tuple[Param, ...]:
        return Param.given(
            Param("state", "u32", ("words",), Access.IN),
            Param("source", "u8", ("experts", "expert_nbytes"), Access.IN),
            Param("cached", "u8", ("slots", "expert_nbytes"), Access.IN),
            Param("target", "u8", ("all_nbytes",), Access.OUT),
            self.tail and Param("tail", "u8", ("tail",), Access.IN),
        )

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(grid=(self.ctas, 2, 1), block=(THREADS, 1, 1))

    def reference(self, **inputs: Any) -> dict[str, Array]:
        held = parts_of(inputs["state"], self.experts, self.slots)[0]
        experts = inputs["source"].copy()
        experts[held > 0] = inputs["cached"][held[held > 0] - 1]
        return {"target": np.append(experts.ravel(), inputs.get("tail", experts[:0]))}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Bytes of the cache are others, to show where they come from."""
        state = np.zeros(self.words, np.uint32)
        some = rng.permutation(self.experts)[: rng.integers(0, self.slots, endpoint=True)]
        state[some] = rng.permutation(self.slots)[: len(some)] + 1
        tail = {"tail": rng.integers(0, 256, self.tail, np.uint8)} if self.tail else {}
        return {
            **tail,
            "state": state,
            "source": rng.integers(0, 256, (self.experts, self.expert_nbytes), np.uint8),
            "cached": rng.integers(0, 256, (self.slots, self.expert_nbytes), np.uint8),
        }

    @classmethod
    def examples(cls) -> dict[str, GatherExperts]:
        return {
            "one": cls(1, 1, 16, 0, 1),
            "with a tail": cls(7, 5, 4112, 448, 2),
            "more than a round": cls(3, 2, 40000, 64, 1),
        }

    def flops(self) -> int:
        return self.all_nbytes // 16
