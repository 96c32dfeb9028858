"""Products with experts of which a cache on the device has some."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.experts.place import CREDIT, PlaceExperts, parts_of, state_words
from urdir.ptxgen.kernels.linear.epilogue.bias import Bias
from urdir.ptxgen.spec import Access, Array, Param, ceil_div
from urdir.ptxgen.weights.layout import Layout, random_weights

if TYPE_CHECKING:
    from urdir.ptxgen.kernels.linear.steps import Step

#: Vectors of each matrix that a thread has in flight when it copies an expert, at most.
MOST_VECTORS = 4


class OfExperts(Protocol):
    """What matters of a product with experts (`ExpertsProduct`)."""

    name: str

    @property
    def batch(self) -> int:
        """Rows that choose."""

    @property
    def experts(self) -> int:
        """Experts that they choose from."""

    @property
    def used(self) -> int:
        """Experts of a row."""

    @property
    def rows(self) -> int:
        """Rows of an expert's matrix."""

    @property
    def cols(self) -> int:
        """Columns of it."""

    @property
    def layout(self) -> Layout:
        """How the matrices of all experts lie in memory."""

    @property
    def matrices(self) -> tuple[str, ...]:
        """Their parameters."""

    def params_of(self, *kinds: type[Step]) -> tuple[Param, ...]:
        """The parameters of some steps."""


@dataclass(frozen=True, slots=True)
class Held:
    """The matrices of a product are in the ``slots`` of a cache, where one row looks its ``used``
    of ``experts`` up, in the ``state`` (`PlaceExperts`). What is missing the launch copies from the
    matrices of all experts, which may be host memory that the device has mapped, to the slots that
    `PlaceExperts` would choose. The state stays as it is until `SettleExperts` takes in what was
    chosen: all launches of a row find the same. One that ``tells`` leaves the choice there.

    Raises PtxgenError for fewer slots than experts that are used.
    """

    experts: int
    used: int
    slots: int
    tells: bool = False

    credit: ClassVar[int] = CREDIT

    def __post_init__(self) -> None:
        _ = self.place  # refuses other sizes

    @property
    def place(self) -> PlaceExperts:
        """What looking up amounts to."""
        return PlaceExperts(1, self.used, self.experts, self.slots)

    def check(self, spec: OfExperts) -> None:
        """Raise PtxgenError for a product that does not look up."""
        if spec.batch > 1 or (spec.experts, spec.used) != (self.experts, self.used):
            raise PtxgenError(
                f"{spec.name}: {spec.batch} x {spec.used} of {spec.experts} experts look up as one "
                f"row with {self.used} of {self.experts}"
            )
        if spec.layout.band_nbytes % 16:
            raise PtxgenError(f"{spec.name}: bands of {spec.layout.band_nbytes} bytes in slots")

    def layout(self, spec: OfExperts) -> Layout:
        """How the matrices in the slots lie in memory, as one."""
        return replace(spec.layout, rows=self.slots * spec.rows)

    @staticmethod
    def biases(spec: OfExperts) -> tuple[str, ...]:
        """The biases of all experts: the same are kept in slots, for products with the experts
        there."""
        return tuple(param.name for param in spec.params_of(Bias))

    def params(self, spec: OfExperts) -> tuple[Param, ...]:
        """The matrices and biases in the slots, the matrices of all experts, and the state."""
        held, every = (self.layout(spec).nbytes,), (spec.layout.nbytes,)
        words = (state_words(self.experts, self.slots),)
        return (
            *(Param(name, "u8", held, Access.INOUT) for name in spec.matrices),
            *(Param(f"{name}_source", "u8", every, Access.IN) for name in spec.matrices),
            *(
                Param(f"{name}_held", "f32", (self.slots, spec.rows), Access.INOUT)
                for name in self.biases(spec)
            ),
            Param("state", "u32", words, Access.INOUT if self.tells else Access.IN),
        )

    def make_inputs(self, spec: OfExperts, rng: np.random.Generator) -> dict[str, Any]:
        """A cache that has some of the experts, in other matrices than the sources have."""
        size = 0.5 / spec.cols**0.5
        slots = {name: random_weights(self.layout(spec), rng, size) for name in spec.matrices}
        return {**slots, "state": self.place.make_inputs(rng)["state"]}

    def find(
        self, spec: OfExperts, inputs: dict[str, Any], experts: Array
    ) -> tuple[Array, dict[str, Array]]:
        """The slots of ``experts`` (1, used), and what is in slots after what was missing is
        copied."""
        position, state = np.zeros(1, np.uint32), inputs["state"]
        placed = self.place.reference(expert=experts, position=position, state=state)
        copies, nbytes = placed["copies"], spec.layout.tiles_nbytes // self.experts
        missing, slots = copies[4 : 4 + 2 * copies[0]].reshape(-1, 2).T
        found = {name: inputs[name].copy() for name in spec.matrices}
        for name, held in found.items():
            for expert, slot in zip(missing.tolist(), slots.tolist(), strict=True):
                source = inputs[f"{name}_source"][expert * nbytes :][:nbytes]
                held[slot * nbytes :][:nbytes] = source
        for name in self.biases(spec):
            kept = found[f"{name}_held"] = inputs[f"{name}_held"].copy()
            kept[slots] = inputs[name][missing]
        if self.tells:
            told = found["state"] = state.copy()
            parts_of(told, self.experts, self.slots)[-1][: self.used] = experts[0]
        return placed["slot"], found

    @staticmethod
    def copy_rounds(nbytes: int, threads: int, few: bool) -> tuple[int, int]:
        """In how many rounds a CTA copies its part of an expert, ``nbytes`` of each matrix, and how
        many vectors of 16 bytes of each a thread has in flight in a round: one if it is to have a
        ``few``."""
        vectors = ceil_div(nbytes, 16 * threads)
        rounds = ceil_div(vectors, 1 if few else MOST_VECTORS)
        return rounds, ceil_div(vectors, rounds)
