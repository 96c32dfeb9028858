"""Which slots of a cache of experts have the chosen ones, and which are to be copied there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.experts.selection import MAX_EXPERTS
from urdir.ptxgen.kernels.pairs import random_choice
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param

#: Pairs of rows and experts of a launch, at most.
MAX_PAIRS = 256


@dataclass(frozen=True)
class PlaceExperts(KernelSpec):
    """The slot of the expert of each pair; those without one take the least recently used slots.

    ``state`` (u32) has for every expert its slot + 1 (0: none), for every slot its expert + 1 and
    the launch that used it last, the number of the launch, how many pairs there were, how many
    copies, a blank; for every expert, how many pairs have chosen it. Zeros are an empty cache.
    ``copies``: how many, three blanks, then (expert, slot) of each that is to be copied,
    then zeros.

    Raises PtxgenError for fewer slots than pairs.
    """

    rows: int
    used: int
    experts: int
    slots: int

    name = "place_experts"
    template = ("urdir.templates", "experts/place.ptx.j2")

    def __post_init__(self) -> None:
        if not 1 <= self.pairs <= MAX_PAIRS or not 1 <= self.experts <= MAX_EXPERTS:
            raise PtxgenError(
                f"place_experts: {self.rows} x {self.used} of {self.experts} experts: up to "
                f"{MAX_PAIRS} pairs, {MAX_EXPERTS} experts"
            )
        if not self.most_copies <= self.slots <= self.experts:
            raise PtxgenError(
                f"place_experts: {self.slots} slots for {self.rows} x {self.used} of "
                f"{self.experts} experts: at least as many as are chosen, at most one each"
            )

    @property
    def pairs(self) -> int:
        """Pairs of rows and experts."""
        return self.rows * self.used

    @property
    def most_copies(self) -> int:
        """Experts that are copied at most."""
        return min(self.pairs, self.experts)

    @property
    def list_vectors(self) -> int:
        """Vectors of four words in the list of copies."""
        return copies_words(self.most_copies) // 4

    @property
    def words(self) -> int:
        """Words of the state."""
        return state_words(self.experts, self.slots)

    @property
    def params(self) -> tuple[Param, ...]:
        return (
            Param("expert", "u32", ("rows", "used"), Access.IN),
            Param("state", "u32", ("words",), Access.INOUT),
            Param("slot", "u32", ("rows", "used"), Access.OUT),
            Param("copies", "u32", (copies_words(self.most_copies),), Access.OUT),
        )

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(grid=(1, 1, 1), block=(32, 1, 1))

    def reference(self, **inputs: Any) -> dict[str, Array]:
        state = inputs["state"].copy()
        held, holder, stamp, rest, chosen = parts_of(state, self.experts, self.slots)
        now = rest[0] + 1
        experts = np.minimum(inputs["expert"], self.experts - 1).ravel()
        present = held[experts]
        stamp[present[present > 0] - 1] = now
        copies = np.zeros(copies_words(self.most_copies), np.uint32)
        for expert in experts:
            if not held[expert]:
                slot = int(stamp.argmin())
                if holder[slot]:
                    held[holder[slot] - 1] = 0
                holder[slot], held[expert], stamp[slot] = expert + 1, slot + 1, now
                copies[4 + 2 * copies[0] :][:2] = expert, slot
                copies[0] += 1
        rest[:3] += np.array([1, self.pairs, copies[0]], np.uint32)
        np.add.at(chosen, experts, np.uint32(1))
        slots = (held[experts] - 1).reshape(self.rows, self.used)
        return {"state": state, "slot": slots, "copies": copies}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """A cache of which some slots are used, and its state after launches like this one."""
        state = np.zeros(self.words, np.uint32)
        for _ in range(3):
            expert = random_choice(rng, self.rows, self.experts, self.used)
            state = self.reference(expert=expert, state=state)["state"]
        return {"expert": random_choice(rng, self.rows, self.experts, self.used), "state": state}

    @classmethod
    def examples(cls) -> Mapping[str, PlaceExperts]:
        return {
            "one": cls(1, 1, 1, 1),
            "two slots": cls(1, 2, 8, 2),
            "a row": cls(1, 8, 128, 40),
            "odd": cls(3, 5, 61, 17),
            "all of them": cls(2, 31, 31, 31),
            "many pairs": cls(8, 32, 512, 300),
        }

    def flops(self) -> int:
        return self.pairs + self.slots


def state_words(experts: int, slots: int) -> int:
    """Words of the state of a cache."""
    return 2 * experts + 2 * slots + 4


def copies_words(most: int) -> int:
    """Words of a list of copies, in whole vectors of four."""
    return 4 + 2 * (most + most % 2)


def parts_of(state: Array, experts: int, slots: int) -> list[Array]:
    """Views of the parts of a state, see `PlaceExperts`."""
    return np.split(state, np.cumsum([experts, slots, slots, 4]))
