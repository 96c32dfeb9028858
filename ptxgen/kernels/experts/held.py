"""Products with experts of which a cache on the device has some."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.experts.place import CREDIT, PlaceExperts, state_words
from urdir.ptxgen.kernels.experts.spec import ExpertsProduct
from urdir.ptxgen.spec import Access, Array, Param
from urdir.ptxgen.weights.layout import Layout, random_weights


@dataclass(frozen=True)
class HeldExperts(ExpertsProduct):
    """With ``slots`` the matrices have this many of the experts, which one row looks up in the
    ``state`` of a cache (`PlaceExperts`). What is missing the launch copies from the matrices of
    all experts, which may be host memory that the device has mapped, to the slots that
    `PlaceExperts` would choose. The state stays as it is until `SettleExperts` takes in what was
    chosen: all launches of a row find the same.
    """

    slots: int = field(default=0, kw_only=True)

    #: A product that leaves there what was chosen writes it.
    state_access: ClassVar[Access] = Access.IN

    def check_slots(self) -> None:
        """Raise PtxgenError for slots that are too few, or for several rows."""
        if not self.slots:
            return
        if self.batch > 1 or not self.used <= self.slots <= self.experts:
            raise PtxgenError(
                f"{self.name}: {self.slots} slots for {self.batch} x {self.used} of {self.experts} "
                "experts: for one row, at least as many as it uses"
            )
        if self.layout.band_nbytes % 16:
            raise PtxgenError(f"{self.name}: bands of {self.layout.band_nbytes} bytes in slots")

    @property
    def held_layout(self) -> Layout:
        """How the matrices that are multiplied lie in memory, as one."""
        return replace(self.layout, rows=(self.slots or self.experts) * self.rows)

    @property
    def state_words(self) -> int:
        """Words of the state of the cache."""
        return state_words(self.experts, self.slots)

    @property
    def credit(self) -> int:
        """See `CREDIT`."""
        return CREDIT

    @property
    def weight_params(self) -> tuple[Param, ...]:
        """The matrices; with slots those of all experts, too, and the cache's state."""
        if not self.slots:
            return super().weight_params
        held, every = (self.held_layout.nbytes,), (self.layout.nbytes,)
        return (
            *(Param(name, "u8", held, Access.INOUT) for name in self.matrices),
            *(Param(f"{name}_source", "u8", every, Access.IN) for name in self.matrices),
            Param("state", "u32", ("state_words",), self.state_access),
        )

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Of a cache that has some of the experts, in other matrices than the sources have."""
        inputs = super().make_inputs(rng)
        if self.slots:
            inputs["state"] = self._place.make_inputs(rng)["state"]
            for name in self.matrices:
                inputs[name] = random_weights(self.held_layout, rng, 0.5 / self.cols**0.5)
        return inputs

    @property
    def _place(self) -> PlaceExperts:
        return PlaceExperts(1, self.used, self.experts, self.slots)

    def in_slots(self, inputs: dict[str, Any], experts: Array) -> tuple[Array, dict[str, Array]]:
        """Where the matrices of ``experts`` (batch, used) are, the same without slots; and the
        matrices after what was missing is copied to its slots."""
        if not self.slots:
            return experts, {}
        position, state = np.zeros(1, np.uint32), inputs["state"]
        placed = self._place.reference(expert=experts, position=position, state=state)
        copies, nbytes = placed["copies"], self.layout.tiles_nbytes // self.experts
        found = {}
        for name in self.matrices:
            held = found[name] = inputs[name].copy()
            for expert, slot in copies[4 : 4 + 2 * copies[0]].reshape(-1, 2).tolist():
                source = inputs[f"{name}_source"][expert * nbytes :][:nbytes]
                held[slot * nbytes :][:nbytes] = source
        return placed["slot"], found
