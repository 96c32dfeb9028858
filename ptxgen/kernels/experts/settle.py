"""Caches of experts after a row whose products have looked up what it chose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from urdir.ptxgen.kernels.advance import IDLE
from urdir.ptxgen.kernels.experts.place import CREDIT, PlaceExperts, parts_of, state_words
from urdir.ptxgen.kernels.pairs import random_choice
from urdir.ptxgen.limits import limited, up_to
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param

#: Caches of a launch, at most.
MAX_CACHES = 128


@dataclass(frozen=True)
class SettleExperts(KernelSpec):
    """The ``caches`` of several layers take in the ``used`` experts that `ExpertsUp` has left in
    the state of each, and looked up there: `PlaceExperts` would make the same of them. Those of a
    padding row, whose ``position`` is `IDLE`, are in slots, too, but they are not counted.

    Raises PtxgenError for fewer slots than experts that are used.
    """

    caches: int
    used: int
    experts: int
    slots: int

    name = "settle_experts"
    limits = limited(caches=up_to(MAX_CACHES))
    credit: ClassVar[int] = CREDIT

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.place  # refuses other sizes

    @property
    def place(self) -> PlaceExperts:
        """What it does to each cache."""
        return PlaceExperts(1, self.used, self.experts, self.slots)

    @property
    def words(self) -> int:
        """Words of a state."""
        return state_words(self.experts, self.slots)

    @property
    def params(self) -> tuple[Param, ...]:
        states = (f"state{number}" for number in range(self.caches))
        return (
            Param("position", "u32", (1,), Access.IN),
            *(Param(name, "u32", ("words",), Access.INOUT) for name in states),
        )

    @property
    def idle(self) -> int:
        """The position of a padding row."""
        return IDLE

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(grid=(self.caches, 1, 1), block=(32, 1, 1))

    def reference(self, **inputs: Any) -> dict[str, Array]:
        (position,), found = inputs.pop("position"), {}
        for name, before in inputs.items():
            parts = parts_of(before, self.experts, self.slots)
            chosen = {"expert": parts[-1][None, : self.used], "position": np.zeros(1, np.uint32)}
            after = found[name] = self.place.reference(state=before, **chosen)["state"]
            if position == IDLE:
                rest, counts = parts_of(after, self.experts, self.slots)[3:5]
                rest[1:], counts[:] = parts[3][1:], parts[4]
        return found

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Caches after some launches, and a choice that some of them have; of two caches, one has a
        padding row."""
        idle = IDLE if self.caches == 2 else 7
        inputs: dict[str, Any] = {"position": np.array([idle], np.uint32)}
        for param in self.params[1:]:
            state = inputs[param.name] = self.place.make_inputs(rng)["state"]
            chosen = random_choice(rng, 1, self.experts, self.used)
            parts_of(state, self.experts, self.slots)[-1][: self.used] = chosen[0]
        return inputs

    @classmethod
    def examples(cls) -> dict[str, SettleExperts]:
        return {
            "one": cls(1, 1, 1, 1),
            "two slots": cls(3, 2, 8, 2),
            "layers": cls(5, 8, 128, 40),
            "odd": cls(2, 5, 61, 17),
            "all of them": cls(2, 31, 31, 31),
            "many experts": cls(1, 32, 512, 300),
        }

    def flops(self) -> int:
        return self.caches * self.slots
